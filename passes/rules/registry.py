"""Where rules are kept, and the decorator that puts them there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..relation import OUT, Op, Relation, Same, Slot

Rule = Callable[[fx.Node], Relation]

_RULES: dict[Any, Rule] = {}

__all__ = ["aligned", "broadcast", "find_rule", "register_rule"]


def register_rule(*targets: Any) -> Callable[[Callable[[Op], Relation]], Callable[[Op], Relation]]:
    """Decorator: the function is the rule of these ops, in place of any earlier one.

    Args:
        targets: ATen (or custom) ops, as ``torch.ops.aten.cumsum.default`` or, for all overloads of one,
            ``torch.ops.aten.cumsum``.

    Example:
        A custom op that rotates each token on its own (token axis anywhere but in the last dim)::

            @register_rule(torch.ops.mylib.rotate.default)
            def _(op):
                rank = len(op.shape("x"))
                return Relation(tuple(Same((("x", d), (OUT, d))) for d in range(rank - 1)))
    """

    def keep(rule: Callable[[Op], Relation]) -> Callable[[Op], Relation]:
        for target in targets:
            overloads = (
                [getattr(target, name) for name in target.overloads()]
                if isinstance(target, torch._ops.OpOverloadPacket)
                else [target]
            )
            for overload in overloads:
                _RULES[overload] = lambda node: rule(Op.of(node))
        return rule

    return keep


def find_rule(target: Any) -> Rule | None:
    """The rule of an op, or None. Ops tagged as pointwise by torch need none of their own."""
    if target in _RULES:
        return _RULES[target]
    if isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
        return lambda node: broadcast(Op.of(node))
    return None


def broadcast(op: Op) -> Relation:
    """Every dim of the output is that dim of each input that is not broadcast there."""
    out = op.shape()
    links = []
    for d in range(len(out)):
        ends: list[tuple[Slot, int]] = [(OUT, d)]
        for slot, _ in op.inputs():
            shape = op.shape(slot)
            at = d - len(out) + len(shape)
            if at >= 0 and not (shape[at] == 1 and out[d] != 1):
                ends.append((slot, at))
        links.append(Same(tuple(ends)))
    return Relation(tuple(links))


def aligned(slot: Slot, dims: dict[int, int] | range) -> tuple[Same, ...]:
    """Links from dims of one input to dims of the output: ``{input dim: output dim}``, or the same ones."""
    pairs = dims.items() if isinstance(dims, dict) else ((d, d) for d in dims)
    return tuple(Same(((slot, a), (OUT, b))) for a, b in pairs)
