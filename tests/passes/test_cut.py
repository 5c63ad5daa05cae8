"""The cheapest labelling, against all labellings."""

from __future__ import annotations

import itertools
import random

import networkx as nx
import pytest

from cp_compile.passes.plan import _Network

pytestmark = pytest.mark.fast


def _random_network(seed: int) -> _Network:
    draw = random.Random(seed)
    net = _Network()
    nodes = range(draw.randint(2, 5))
    for a in nodes:
        if draw.random() < 0.8:
            net.whole(a, draw.choice([0, 1, 2, 3, 7]) * 1e-12)
        if draw.random() < 0.8:
            net.shard(a, draw.choice([0, 1, 2, 3]) * 1e-12)
        if draw.random() < 0.2:
            net.hold(a)
        for b in nodes[a + 1 :]:
            kind, cost = draw.random(), draw.choice([0, 1, 2, 5]) * 1e-12
            if kind < 0.3:
                net.same(a, b, cost)
            elif kind < 0.4:
                net.needs_whole(a, cost)
            elif kind < 0.5:
                net.keys(a, b, 1e-12, cost)
    return net


def _cost(graph: nx.DiGraph, sharded: set) -> float:
    """Of a cut, in picoseconds; infinite where an edge without a capacity is cut."""
    return sum(
        e.get("capacity", float("inf")) for a, b, e in graph.edges(data=True) if a in sharded and b not in sharded
    )


@pytest.mark.parametrize("seed", range(60))
def test_no_labelling_is_cheaper_and_none_as_cheap_shards_more(seed: int) -> None:
    net = _random_network(seed)
    graph = net.graph.copy()
    free = [v for v in graph if v not in ("S", "R")]
    cuts = [{"S", *some} for n in range(len(free) + 1) for some in itertools.combinations(free, n)]
    cheapest = min(_cost(graph, cut) for cut in cuts)
    sharded, seconds = net.solve()
    assert round(seconds * 1e12) == cheapest == _cost(graph, sharded)
    assert all(cut <= sharded for cut in cuts if _cost(graph, cut) == cheapest)
