"""Attention: the op that mixes tokens and that we know how to run on shards of them."""

from __future__ import annotations

import torch

from ..relation import OUT, Op, Relation, Same, Slot
from ..sizes import equal
from .registry import register_rule

aten = torch.ops.aten

ATTENTION = aten.scaled_dot_product_attention.default


@register_rule(aten.scaled_dot_product_attention)
def attention(op: Op) -> Relation:
    """Query rows are output rows, key rows are value rows, and batch and head dims are everyone's.

    The mask is not linked to the rows: every variant selects the rows and columns that it needs from the whole mask.
    With dropout, tokens do not lie along a batch dim: SDPA on a rank's part of a batch would drop what others drop.
    """
    out = op.shape()
    rank = len(out)
    links = [Same((("query", rank - 2), (OUT, rank - 2))), Same((("key", rank - 2), ("value", rank - 2)))]
    mask = op.value("attn_mask")
    for d in range(rank - 2 if op.args["dropout_p"] == 0 else 0):
        ends: list[tuple[Slot, int]] = [(OUT, d)]
        for slot in ("query", "key", "value"):
            if not equal(op.shape(slot)[d], out[d]):
                break
            ends.append((slot, d))
        else:
            if mask is not None:
                shape = op.shape("attn_mask")
                at = d - rank + len(shape)
                if at >= 0 and not (shape[at] == 1 and out[d] != 1):
                    ends.append(("attn_mask", at))
            links.append(Same(tuple(ends)))
    return Relation(tuple(links), reason="attention needs all keys")
