"""Arguments that carry sizes, recomputed for a shard.

An op that runs on a shard keeps its arguments, except those that name a length along the sharded dim. A length is given
as the graph holds it: a number, or a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .relation import Link, Op, Part, Position
from .rules import relation_of

__all__ = ["local_arguments"]

aten = torch.ops.aten


def local_arguments(
    op: Op, at: Position, shape: Sequence[Any], part: Callable[[Part], tuple[Any, Any]]
) -> dict[str, Any]:
    """The arguments of a node that change when its output is sharded.

    Args:
        op: the call.
        at: where its output is sharded.
        shape: local shape of the output.
        part: local first and last row of a part of the sharded axis.
    """
    target = op.node.target
    if target in _SHAPE:
        return {_SHAPE[target]: list(shape)}
    if target in _BY_SIZE:
        return {"<view>": list(shape)}
    if target in (aten.slice.Tensor, aten.slice_scatter.default):
        for link in _links(op):
            if (
                isinstance(link, Part)
                and at.dim in (link.whole[1], link.part[1])
                and op.dim("dim", len(shape)) == at.dim
            ):
                start, stop = part(link)
                return {"start": start, "end": stop}
        return {}
    if target in _TIMES:
        name = _TIMES[target]
        times = [1] * (len(shape) - len(op.args[name])) + list(op.args[name])
        if at.dim < len(times) - len(op.shape("self")) or op.shape("self")[at.dim - len(times)] == 1:
            times[at.dim] = shape[at.dim]
            return {name: times}
        return {}
    if target is aten.repeat_interleave.self_int and op.dim("dim", len(shape)) == at.dim:
        return {"output_size": None}
    return {}


def _links(op: Op) -> tuple[Link, ...]:
    return relation_of(op.node).links


# Views whose meaning depends on sizes (a local dim may have one row and yet not be one to squeeze): local ones reshape.
_BY_SIZE = {aten.unflatten.int, aten.flatten.using_ints, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}

_TIMES = {aten.repeat.default: "repeats", aten.tile.default: "dims"}

_SHAPE = {
    aten.view.default: "size",
    aten._unsafe_view.default: "size",
    aten.reshape.default: "shape",
    aten.expand.default: "size",
    aten.full.default: "size",
    aten.zeros.default: "size",
    aten.ones.default: "size",
    aten.empty.memory_format: "size",
    aten.new_full.default: "size",
    aten.new_zeros.default: "size",
    aten.new_ones.default: "size",
    aten.new_empty.default: "size",
}
