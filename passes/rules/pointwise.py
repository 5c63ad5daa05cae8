"""Ops that compute each element from the elements at its own index."""

from __future__ import annotations

import torch

from ..relation import Op, Relation
from .registry import broadcast, register_rule

aten = torch.ops.aten


@register_rule(
    aten.clone,
    aten._to_copy,
    aten.alias,
    aten.detach,
    aten.contiguous,
    aten.lift_fresh_copy,
    aten.dropout,
    aten.bernoulli,
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
    aten.prelu,
    aten.rrelu,
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
