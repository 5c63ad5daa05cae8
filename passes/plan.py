"""Which nodes run on a shard of the tokens and which on all of them: a minimum cut over the cost model.

Every node gets one label, S (it runs on the rank's rows) or R (it runs on all rows, on every rank). What labels cost:

* an R node's work is done by all ranks: its time; an S node's is shared: its time on the local rows.
* from S to R, a value is gathered, once for all users that need it whole; from R to S it is sliced, nearly free.
* keys and values that are S cost an attention's communication; that are R, nothing.

All of these are pairwise, so the cheapest labelling is a minimum s-t cut: exact, polynomial, nothing to tune.
Attentions that matter are held at S, with their keys where these lie along the same axis, since sharding them is what
was asked for; small ones (a text encoder's inside a video model) and keys of another axis (cross-attention) are left to
their cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import networkx as nx
from torch import fx

from ..placement import Placement
from .axes import Axes
from .costs import CostModel, bytes_of, flops_of, number
from .modes import Mode, axis_groups, choose_modes, modes_of
from .relation import Op, Position, is_tensor
from .rules.attention import ATTENTION
from .segments import Segment, Word, leaves

__all__ = ["Plan", "make_plan"]

_SMALL_ATTENTION = 1 / 16
"""An attention with less work than this share of the largest is sharded only if that is cheaper."""

_MOST_ORDERS = 4
"""How many axes are tried as the first one where several lie in one value."""


@dataclass(frozen=True)
class Plan:
    """The labelling, and what follows from it.

    Attributes:
        modes: how each S node runs; a node that is not here is R.
        keys_sharded: attentions over the token axis whose keys and values are sharded too.
        axes: the analysis that the plan rests on.
        groups: the axis of each segment.
        zigzag: axes that are cut zigzag, to balance causal attention over a ring.
        ring: ring degree.
        ulysses: ulysses degree.
        seconds: estimated time of one run, by the cost model.
    """

    modes: dict[fx.Node, Mode]
    keys_sharded: frozenset[fx.Node]
    axes: Axes
    groups: dict[Segment, int]
    zigzag: frozenset[int]
    ring: int
    ulysses: int
    seconds: float = 0.0

    def placement(self, word: Word) -> Placement:
        """How the rows of an axis are cut over the mesh."""
        lengths = tuple(s.length for s in leaves(word))
        return Placement(lengths, self.ring, self.ulysses, self.groups[leaves(word)[0]] in self.zigzag)


def make_plan(graph: fx.Graph, axes: Axes, ring: int, ulysses: int, costs: CostModel | None = None) -> Plan:
    """Find the cheapest plan. Changes nothing in the graph."""
    costs = costs or CostModel()
    candidates = {node: modes_of(axes, node) for node in axes.relations}
    groups = axis_groups(axes)
    best: Plan | None = None
    for order in _orders(candidates, groups):
        modes = choose_modes(axes, candidates, groups, order)
        plan = _cut(graph, axes, modes, groups, ring, ulysses, costs)
        if best is None or plan.seconds < best.seconds:
            best = plan
    assert best is not None
    return best


def _orders(candidates: dict[fx.Node, list[Mode]], groups: dict[Segment, int]) -> list[list[int]]:
    """Orders of precedence to try: by attention work, and each axis that shares a value with another one first."""
    work = dict.fromkeys(sorted(set(groups.values())), 0)
    meet: set[int] = set()
    for node, modes in candidates.items():
        here = {groups[m.word[0]] for m in modes}
        if len(here) > 1:
            meet |= here
        for m in modes:
            if m.attends:
                work[groups[m.word[0]]] += flops_of(node)
    base = sorted(work, key=lambda g: -work[g])
    first = [g for g in base if g in meet][:_MOST_ORDERS] or base[:1]
    return [[g, *(h for h in base if h != g)] for g in first] or [[]]


def _cut(
    graph: fx.Graph,
    axes: Axes,
    modes: dict[fx.Node, Mode],
    groups: dict[Segment, int],
    ring: int,
    ulysses: int,
    costs: CostModel,
) -> Plan:
    degree = ring * ulysses
    largest = max((flops_of(n) for n in graph.nodes if n.target is ATTENTION), default=0)
    net = _Network()
    for node in graph.nodes:
        if node.op == "call_function" and is_tensor(node):
            time = costs.compute(node)
            mode = modes.get(node)
            if mode is not None:
                net.whole(node, time)
                net.shard(node, time * _local_share(mode.word, degree))
                if mode.out is None:
                    net.shard(node, costs.send(2 * bytes_of(node) * (degree - 1) / degree))
                if mode.attends and flops_of(node) >= _SMALL_ATTENTION * largest:
                    net.hold(node)
                    for value in _own_keys(node, axes, modes, groups):
                        net.hold(value)
        for value, need, is_key in _requirements(node, axes, modes):
            source = modes.get(value)
            if source is None or source.out is None:
                continue  # the value is whole on every rank anyway, and slicing it costs next to nothing
            gather = costs.send(bytes_of(value) * (degree - 1) / degree)
            aligned = need is not None and need == source.out
            if is_key and aligned:
                sent = bytes_of(value) * (degree - 1) / degree
                net.keys(
                    value, node, costs.latency / 2 + min(sent, 2 * sent / max(ulysses, 1)) / costs.bandwidth, gather
                )
            elif aligned and node in modes:
                net.same(value, node, gather)
            else:
                net.needs_whole(value, gather)
    sharded, seconds = net.solve()
    kept = {n: m for n, m in modes.items() if n in sharded}
    keys = frozenset(n for n, m in kept.items() if m.attends and _keys_sharded(n, m, axes, kept))
    zigzag = frozenset(
        groups[m.word[0]]
        for n, m in kept.items()
        if ring > 1 and n in keys and axes.ops[n].args["is_causal"] and m.keys and leaves(m.keys[1]) == leaves(m.word)
    )
    return Plan(kept, keys, axes, groups, zigzag, ring, ulysses, seconds)


def _own_keys(node: fx.Node, axes: Axes, modes: dict[fx.Node, Mode], groups: dict[Segment, int]) -> Iterator[fx.Node]:
    """Keys and values that lie along the axis of the queries themselves: self-attention, or joint attention."""
    mode = modes[node]
    if mode.keys and groups[mode.keys[1][0]] == groups[mode.word[0]]:
        for slot in ("key", "value"):
            value = axes.ops[node].value(slot)
            if value in modes and modes[value].out == mode.keys[0]:
                yield value


def _keys_sharded(node: fx.Node, mode: Mode, axes: Axes, kept: dict[fx.Node, Mode]) -> bool:
    """Whether an attention's keys or values arrive sharded where it can use them so."""
    if mode.keys is None:
        return False
    values = (axes.ops[node].value("key"), axes.ops[node].value("value"))
    return any(v in kept and kept[v].out == mode.keys[0] for v in values)


def _requirements(
    node: fx.Node, axes: Axes, modes: dict[fx.Node, Mode]
) -> Iterator[tuple[fx.Node, Position | None, bool]]:
    """For each tensor input: the value, where it must be sharded if the node is S (None: whole), is it key or value."""
    if node.op == "placeholder":
        return
    if node not in axes.ops:
        for value in node.all_input_nodes:
            if is_tensor(value):
                yield value, None, False
        return
    op: Op = axes.ops[node]
    mode = modes.get(node)
    ignored = axes.relations[node].ignored
    for slot, value in op.inputs():
        if slot in ignored:
            continue
        if mode is None:
            yield value, None, False
        elif mode.keys and slot in ("key", "value"):
            yield value, mode.keys[0], True
        else:
            yield value, mode.needs.get(slot), False


def _local_share(word: Word, degree: int) -> float:
    rows = [number(s.length) for s in word]
    return sum(-(-n // degree) for n in rows) / max(sum(rows), 1)


class _Network:
    """The flow network: the source's side is S, the sink's side is R. Capacities are whole picoseconds."""

    def __init__(self) -> None:
        self.graph = nx.DiGraph()
        self.graph.add_nodes_from(("S", "R"))

    def _add(self, a: Any, b: Any, seconds: float | None) -> None:
        self._connect(a, b, None if seconds is None else round(seconds * 1e12))

    def _connect(self, a: Any, b: Any, capacity: int | None) -> None:
        """Adds to an edge; no capacity: it is never cut."""
        if capacity is None:
            self.graph.add_edge(a, b)
            self.graph[a][b].pop("capacity", None)
        elif self.graph.has_edge(a, b):
            if "capacity" in self.graph[a][b]:
                self.graph[a][b]["capacity"] += capacity
        else:
            self.graph.add_edge(a, b, capacity=capacity)

    def whole(self, node: fx.Node, seconds: float) -> None:
        """What it costs if the node is R."""
        self._add("S", node, seconds)

    def shard(self, node: fx.Node, seconds: float) -> None:
        """What it costs if the node is S."""
        self._add(node, "R", seconds)

    def hold(self, node: fx.Node) -> None:
        """The node is S whatever it costs."""
        self._add("S", node, None)

    def _gathered(self, value: fx.Node, seconds: float) -> tuple[str, fx.Node]:
        full = ("whole", value)
        if full not in self.graph:
            self._add(value, full, seconds)
        return full

    def same(self, value: fx.Node, user: fx.Node, gather: float) -> None:
        """The user takes the value sharded if it is S itself, whole if it is R."""
        self._add(self._gathered(value, gather), user, None)

    def needs_whole(self, value: fx.Node, gather: float) -> None:
        """The user takes the value whole, whatever its own label."""
        self._add(self._gathered(value, gather), "R", None)

    def keys(self, value: fx.Node, attention: fx.Node, exchange: float, gather: float) -> None:
        """Keys or values: if they are S they are exchanged, or gathered where the attention is R."""
        self._add(value, "R", exchange)
        self.same(value, attention, gather)

    def solve(self) -> tuple[set, float]:
        """The nodes that are S, and the cost of the cut in seconds."""
        # What can be told without a flow is taken out first. Then this algorithm is linear in a model's depth; one that
        # looks for paths is not, since a block's last resort is the gather at the model's end.
        paid = self._pay_unavoidable()
        settled = self._settle()
        value, (sharded, _) = nx.minimum_cut(self.graph, "S", "R", flow_func=nx.algorithms.flow.preflow_push)
        return sharded | settled, (paid + value) / 1e12

    def _pay_unavoidable(self) -> int:
        """Takes out what every cut costs, and returns it: of each node the lesser of its two labels."""
        paid = 0
        for node, edge in self.graph["S"].items():
            if self.graph.has_edge(node, "R"):
                both = [e for e in (edge, self.graph[node]["R"]) if "capacity" in e]
                least = min((e["capacity"] for e in both), default=0)
                paid += least
                for e in both:
                    e["capacity"] -= least
        return paid

    def _settle(self) -> set:
        """Takes out, and returns, what is surely S: what is held, and what nothing but such wants."""
        vertices = [v for v in self.graph if v not in ("S", "R")]
        wanted = {v: sum(e.get("capacity") != 0 for e in self.graph[v].values()) for v in vertices}
        todo = [v for v, e in self.graph["S"].items() if "capacity" not in e]
        todo += [v for v in vertices if wanted[v] == 0]
        settled: set = set()
        while todo:
            vertex = todo.pop()
            if vertex in settled:
                continue
            settled.add(vertex)
            for giver, edge in self.graph.pred[vertex].items():
                if giver != "S" and edge.get("capacity") != 0:
                    wanted[giver] -= 1
                    if wanted[giver] == 0:
                        todo.append(giver)
        for vertex in settled:
            for user, edge in self.graph[vertex].items():
                if user not in settled:
                    self._connect("S", user, edge.get("capacity"))
        self.graph.remove_nodes_from(settled)
        return settled
