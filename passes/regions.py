"""Child graphs become part of the graph that calls them.

The capture cannot see through a higher-order op, and an attention inside one would run whole. *Before*, a call of an
activation checkpoint or of a nested compile region with a child graph. *After*, the child's nodes in its place. For a
checkpoint they keep the tags by which the partitioner of AOTAutograd recomputes them in the backward: what the
higher-order op would have done, had it been left.

Regions whose child graphs run zero or many times (``cond``, ``while_loop``, ``scan``) are left: they run on all tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from . import _torch

__all__ = ["enter_regions"]


def enter_regions(gm: fx.GraphModule, recompute: bool) -> fx.GraphModule:
    """The same graph with its regions entered; ``gm`` itself, if it has none. ``gm`` is not changed.

    Args:
        gm: the graph.
        recompute: tag what is checkpointed; where nothing is differentiated AOTAutograd refuses the tags.
    """
    if not any(n.target in _CHILD for n in gm.graph.nodes):
        return gm
    graph = fx.Graph()
    _copy_into(graph, gm, {}, {}, recompute)
    out = fx.GraphModule(gm, graph)
    out.meta = dict(gm.meta)
    return enter_regions(out, recompute)  # a region can hold another


def _copy_into(
    graph: fx.Graph,
    gm: fx.GraphModule,
    names: dict[fx.Node, Any],
    tags: dict[str, Any],
    recompute: bool,
    prefix: str = "",
) -> Any:
    """Copy a graph's nodes, entering regions. Returns what its output holds.

    Args:
        graph: where to.
        gm: what to copy.
        names: values of nodes that stand for something else already: a child's placeholders.
        tags: metadata that every copied node gets.
        recompute: tag what is checkpointed.
        prefix: path of ``gm`` in the outermost module.
    """
    regions = 0
    for node in gm.graph.nodes:
        if node in names:
            continue
        if node.op == "output":
            values = fx.map_arg(node.args[0], names.__getitem__)
            if prefix:
                return values
            graph.output(values).meta = dict(node.meta)
        elif node.target in _CHILD:
            child, operands = _CHILD[node.target](node, gm)
            path = f"{prefix}{node.args[0].target}"
            operands = [fx.map_arg(x, names.__getitem__) for x in operands]
            inner = dict(zip(child.graph.find_nodes(op="placeholder"), operands, strict=True))
            own = _tags(node, regions) if recompute else {}
            names[node] = _copy_into(graph, child, inner, {**tags, **own}, recompute, f"{path}.")
            regions += 1
        elif node.target is operator.getitem and isinstance(names.get(node.args[0]), (tuple, list)):
            names[node] = names[node.args[0]][node.args[1]]
        else:
            names[node] = new = graph.node_copy(node, names.__getitem__)
            new.meta = {**node.meta, **tags}
            if node.op == "get_attr":
                new.target = f"{prefix}{node.target}"
            if hasattr(node, "_dynamo_source"):
                new._dynamo_source = node._dynamo_source
    return None


def _tags(node: fx.Node, number: int) -> dict[str, Any]:
    if node.target is not _torch.checkpoint:
        return {}
    return {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": number + 1}


def _checkpoint(node: fx.Node, gm: fx.GraphModule) -> tuple[fx.GraphModule, list[Any]]:
    child = gm.get_submodule(str(node.args[0].target))  # type: ignore[union-attr]
    _, named = _torch.checkpoint.divide_kwargs(node.kwargs)
    return child, [*node.args[1:], *named.values()]  # type: ignore[return-value]


def _nested(node: fx.Node, gm: fx.GraphModule) -> tuple[fx.GraphModule, list[Any]]:
    child = gm.get_submodule(str(node.args[0].target))  # type: ignore[union-attr]
    return child, list(node.args[2:])  # type: ignore[return-value]


_CHILD: dict[Any, Callable[[fx.Node, fx.GraphModule], tuple[fx.GraphModule, list[Any]]]] = {
    _torch.checkpoint: _checkpoint,
    torch.ops.higher_order.invoke_subgraph: _nested,
}
