"""Ops that make a tensor from nothing but a shape."""

from __future__ import annotations

import torch

from ..relation import Op, Relation
from .registry import register_rule

aten = torch.ops.aten


@register_rule(
    aten.full,
    aten.zeros,
    aten.ones,
    aten.empty.memory_format,
    aten.new_full,
    aten.new_zeros,
    aten.new_ones,
    aten.new_empty,
)
def constant(op: Op) -> Relation:
    """One value everywhere: any dim can be made at any length."""
    return Relation(free=frozenset(range(len(op.shape()))), ignored=frozenset(slot for slot, _ in op.inputs()))


@register_rule(aten.dropout, aten.bernoulli.p, aten.uniform, aten.normal_functional, aten.exponential)
def drawn(op: Op) -> Relation:
    """A draw for each element of the whole tensor, of which each rank takes its rows: those of one process."""
    return Relation(reason="random values are drawn for all tokens")


@register_rule(aten.arange, aten.linspace, aten.rand, aten.randn, aten.randint, aten.randperm, aten.eye)
def by_position(op: Op) -> Relation:
    """Values that depend on the global index are made whole; their shards are then slices."""
    return Relation(reason="its values depend on the global index")
