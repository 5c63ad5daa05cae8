"""Ops that compute each element from the elements at its own index."""

from __future__ import annotations

import torch

from ..relation import OUT, Op, Relation, Same
from .registry import aligned, broadcast, register_rule

aten = torch.ops.aten


@register_rule(
    aten.clone,
    aten._to_copy,
    aten.alias,
    aten.detach,
    aten.contiguous,
    aten.lift_fresh_copy,
    aten.masked_fill,
    aten.where.self,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.complex,
    aten.polar,
    aten.addcmul,
    aten.addcdiv,
    aten.lerp,
    aten.fill,
    aten.relu6,
    aten.selu,
    aten.square,
    aten.clip,
    aten.type_as,
    aten.real,
    aten.imag,
    aten._conj,
    aten.resolve_conj,
    aten.resolve_neg,
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.empty_like,
    aten.silu,
    aten.mish,
    aten.softplus,
    aten.hardtanh,
    aten.hardswish,
    aten.logit,
    aten.nan_to_num,
)
def elementwise(op: Op) -> Relation:
    """All dims, with broadcasting. Ops that torch tags as pointwise come here without being named."""
    return broadcast(op)


@register_rule(aten.rrelu)
def rrelu(op: Op) -> Relation:
    """In training each element has a slope of its own."""
    return Relation(reason="random values are drawn for all tokens") if op.args["training"] else broadcast(op)


@register_rule(aten.prelu)
def prelu(op: Op) -> Relation:
    """A slope for each channel, which is dim 1, or one for all."""
    rank = len(op.shape())
    if op.shape("weight") in ((), (1,)) or rank < 2:
        return Relation(aligned("self", range(rank)))
    others = aligned("self", {d: d for d in range(rank) if d != 1})
    return Relation((*others, Same((("self", 1), ("weight", 0), (OUT, 1)))))
