"""Ops that move elements and compute nothing: views, concatenation, slices, repeats."""

from __future__ import annotations

import torch

from ..relation import OUT, Concat, Link, Op, Part, Relation, Reshape, Same, Spread
from ..sizes import Size, at_most, equal, less, size_of
from .registry import aligned, register_rule

aten = torch.ops.aten


@register_rule(aten.view.default, aten._unsafe_view, aten.reshape, aten.flatten, aten.unflatten)
def reshape(op: Op) -> Relation:
    return Relation((Reshape("self"),), reason="it splits the token axis over several dims")


@register_rule(aten.squeeze, aten.unsqueeze)
def squeeze(op: Op) -> Relation:
    return Relation((Reshape("self"),))


@register_rule(aten.view.dtype)
def view_as_dtype(op: Op) -> Relation:
    return Relation(aligned("self", range(len(op.shape()) - 1)))


@register_rule(aten.view_as_complex)
def view_as_complex(op: Op) -> Relation:
    return Relation(aligned("self", range(len(op.shape()))))


@register_rule(aten.view_as_real)
def view_as_real(op: Op) -> Relation:
    return Relation(aligned("self", range(len(op.shape("self")))))


@register_rule(aten.permute)
def permute(op: Op) -> Relation:
    rank = len(op.shape())
    return Relation(aligned("self", {d % rank: i for i, d in enumerate(op.args["dims"])}))


@register_rule(aten.transpose.int)
def transpose(op: Op) -> Relation:
    rank = len(op.shape())
    a, b = op.dim("dim0", rank), op.dim("dim1", rank)
    return Relation(aligned("self", {d: {a: b, b: a}.get(d, d) for d in range(rank)}))


@register_rule(aten.mT)
def transpose_last(op: Op) -> Relation:
    rank = len(op.shape())
    return Relation(aligned("self", {d: {rank - 2: rank - 1, rank - 1: rank - 2}.get(d, d) for d in range(rank)}))


@register_rule(aten.t, aten.numpy_T)
def transpose_all(op: Op) -> Relation:
    rank = len(op.shape())
    return Relation(aligned("self", {d: rank - 1 - d for d in range(rank)}))


@register_rule(aten.expand)
def expand(op: Op) -> Relation:
    before, after = op.shape("self"), op.shape()
    new = len(after) - len(before)
    kept = {d: d + new for d, n in enumerate(before) if equal(n, after[d + new])}
    return Relation(aligned("self", kept), free=frozenset(range(len(after))) - set(kept.values()))


@register_rule(aten.repeat, aten.tile)
def repeat(op: Op) -> Relation:
    before, after = op.shape("self"), op.shape()
    new = len(after) - len(before)
    times = op.args["repeats" if "repeats" in op.args else "dims"]
    times = [1] * (len(after) - len(times)) + list(times)
    links: list[Link] = []
    free = set(range(new))
    for d, n in enumerate(before):
        if times[d + new] == 1:
            links.append(Same((("self", d), (OUT, d + new))))
        elif equal(n, 1):
            free.add(d + new)
        elif isinstance(times[d + new], int):
            links.append(Concat(d + new, (("self", d),) * times[d + new]))
    return Relation(tuple(links), free=frozenset(free))


@register_rule(aten.repeat_interleave.self_int)
def repeat_interleave(op: Op) -> Relation:
    if op.args["dim"] is None:
        return Relation(reason="it flattens its input")
    rank = len(op.shape())
    d = op.dim("dim", rank)
    times = op.args["repeats"]
    times = size_of(times.meta["val"] if isinstance(times, torch.fx.Node) else times)
    others = tuple(link for i, link in enumerate(aligned("self", range(rank))) if i != d)
    return Relation((*others, Spread("self", d, d, times)))


@register_rule(aten.cat, aten.concat.default, aten.concatenate.default)
def cat(op: Op) -> Relation:
    rank = len(op.shape())
    d = op.dim("dim", rank)
    # An empty 1-D tensor is allowed in any concatenation and adds nothing.
    pieces = [slot for slot, _ in op.inputs() if len(op.shape(slot)) == rank]
    links = [Same((*((s, i) for s in pieces), (OUT, i))) for i in range(rank) if i != d]
    return Relation((*links, Concat(d, tuple((s, d) for s in pieces if not equal(op.shape(s)[d], 0)))))


@register_rule(aten.stack)
def stack(op: Op) -> Relation:
    rank = len(op.shape())
    d = op.dim("dim", rank)
    links = [Same((*((s, i - (i > d)) for s, _ in op.inputs()), (OUT, i))) for i in range(rank) if i != d]
    return Relation(tuple(links))


@register_rule(aten.slice.Tensor)
def slice_(op: Op) -> Relation:
    shape = op.shape("self")
    d = op.dim("dim", len(shape))
    others = tuple(link for i, link in enumerate(aligned("self", range(len(shape)))) if i != d)
    bounds = _bounds(op, shape[d])
    if bounds is None:
        return Relation(others, reason="it takes every other row, or rows that are not known")
    return Relation((*others, Part(("self", d), (OUT, d), *bounds)))


@register_rule(aten.slice_scatter.default)
def slice_scatter(op: Op) -> Relation:
    shape = op.shape("self")
    d = op.dim("dim", len(shape))
    both = tuple(Same((("self", i), ("src", i), (OUT, i))) for i in range(len(shape)) if i != d)
    bounds = _bounds(op, shape[d])
    if bounds is None:
        return Relation(both, reason="it writes every other row, or rows that are not known")
    return Relation((*both, Same((("self", d), (OUT, d))), Part((OUT, d), ("src", d), *bounds)))


@register_rule(aten.select.int)
def select(op: Op) -> Relation:
    rank = len(op.shape("self"))
    d = op.dim("dim", rank)
    return Relation(aligned("self", {i: i - (i > d) for i in range(rank) if i != d}), reason="it takes one token")


@register_rule(aten.select_scatter)
def select_scatter(op: Op) -> Relation:
    rank = len(op.shape())
    d = op.dim("dim", rank)
    return Relation(
        tuple(Same((("self", i), ("src", i - (i > d)), (OUT, i))) for i in range(rank) if i != d),
        reason="it writes one token",
    )


@register_rule(aten.roll, aten.flip)
def roll(op: Op) -> Relation:
    rank = len(op.shape())
    moved = {d % rank for d in op.args["dims"]} if op.args["dims"] else set(range(rank))
    return Relation(aligned("self", {d: d for d in range(rank) if d not in moved}), reason="it moves tokens")


@register_rule(aten.pad.default, aten.constant_pad_nd)
def pad(op: Op) -> Relation:
    rank = len(op.shape())
    amounts = list(op.args["pad"])
    grown = {rank - 1 - i // 2 for i, n in enumerate(amounts) if not (isinstance(n, int) and n == 0)}
    return Relation(aligned("self", {d: d for d in range(rank) if d not in grown}), reason="it pads the token axis")


def _bounds(op: Op, size: Size) -> tuple[Size, Size] | None:
    """First and last row of a slice, counted from the front; None if it has a step or is not known."""
    if op.args["step"] != 1:
        return None
    found = []
    for name, default in (("start", 0), ("end", size)):
        value = op.args[name]
        value = default if value is None else size_of(value.meta["val"] if isinstance(value, torch.fx.Node) else value)
        if less(value, 0):
            value = value + size
        if less(value, 0):
            value = 0
        if less(size, value):
            value = size
        if less(value, 0) is None or less(size, value) is None:
            return None
        found.append(value)
    start, end = found
    return (start, end) if at_most(start, end) and not equal(start, end) else None
