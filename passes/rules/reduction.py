"""Ops that work over whole dims: reductions, normalisations, softmax, scans, sorts."""

from __future__ import annotations

import torch

from ..relation import OUT, Op, Relation, Same
from .registry import aligned, register_rule

aten = torch.ops.aten


@register_rule(aten.layer_norm, aten.rms_norm, aten._fused_rms_norm)
def normalise_last(op: Op) -> Relation:
    rank = len(op.shape("input"))
    return Relation(
        aligned("input", range(rank - len(op.args["normalized_shape"]))), reason="it normalises over tokens"
    )


@register_rule(aten.group_norm, aten.instance_norm)
def group_norm(op: Op) -> Relation:
    return Relation(aligned("input", {0: 0}), reason="it normalises over tokens")


@register_rule(
    aten.softmax,
    aten.log_softmax,
    aten._softmax,
    aten._log_softmax,
    aten._safe_softmax,
    aten.cumsum,
    aten.cumprod,
    aten.logcumsumexp,
    aten.argsort,
    aten.glu,
)
def over_one_dim(op: Op) -> Relation:
    rank = len(op.shape("self"))
    d = op.dim("dim", rank)
    return Relation(aligned("self", {i: i for i in range(rank) if i != d}), reason="it works over all tokens at once")


@register_rule(aten.sum, aten.mean)
def linear_reduction(op: Op) -> Relation:
    dims, links = _reduced(op)
    return Relation(links, sums=tuple(((("self", d),)) for d in dims), reason="it sums over tokens")


@register_rule(
    aten.amax,
    aten.amin,
    aten.var,
    aten.std,
    aten.any,
    aten.all,
    aten.logsumexp,
    aten.norm,
    aten.prod,
    aten.argmax,
    aten.argmin,
    aten.linalg_vector_norm,
)
def reduction(op: Op) -> Relation:
    if isinstance(op.node.meta["val"], tuple):
        return Relation()
    return Relation(_reduced(op)[1], reason="it reduces over tokens")


def _reduced(op: Op) -> tuple[list[int], tuple[Same, ...]]:
    """Dims that an op reduces over, and links of the others."""
    rank = len(op.shape("self"))
    dims = op.args.get("dim")
    if dims is None or dims == []:
        dims = list(range(rank))
    dims = [d % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])] if rank else []
    keep = op.args.get("keepdim", False)
    kept = {d: d if keep else d - sum(r < d for r in dims) for d in range(rank) if d not in dims}
    return dims, tuple(Same((("self", a), (OUT, b))) for a, b in kept.items())
