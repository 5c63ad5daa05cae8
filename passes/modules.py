"""What each module of a model does, sums over its nodes: its work, how much of it is sharded, what it sends."""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch import fx

from ..report import ModuleReport
from .costs import flops_of
from .provenance import modules_of
from .relation import is_tensor

__all__ = ["sum_by_module"]


def sum_by_module(
    graph: fx.Graph, sharded: Container[fx.Node], sent: Mapping[fx.Node, tuple[int, int]]
) -> tuple[ModuleReport, ...]:
    """One entry a module, in the order of their first ops. An op counts for the innermost module that it is in.

    Args:
        graph: the captured graph.
        sharded: the nodes that run on a shard of the tokens.
        sent: collectives and bytes for each node that communicates or whose value is gathered.
    """
    kinds: dict[str, str] = {}
    nodes: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and is_tensor(node):
            modules = modules_of(node) or [("", "")]
            for path, kind in modules:
                kinds[path] = kind
                nodes.setdefault(path, [])
            nodes[modules[-1][0]].append(node)
    return tuple(
        ModuleReport(
            path=path,
            kind=kinds[path],
            ops=len(own),
            ops_sharded=sum(n in sharded for n in own),
            flops=sum(map(flops_of, own)),
            flops_sharded=sum(flops_of(n) for n in own if n in sharded),
            collectives=sum(sent[n][0] for n in own if n in sent),
            bytes_sent=sum(sent[n][1] for n in own if n in sent),
        )
        for path, own in nodes.items()
    )
