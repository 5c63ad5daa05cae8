"""Ops that look rows up: each row of the index is looked up on its own, in a table that is needed whole."""

from __future__ import annotations

import torch

from ..relation import OUT, Op, Relation, Same
from ..sizes import equal
from .registry import aligned, register_rule

aten = torch.ops.aten


@register_rule(aten.embedding)
def embedding(op: Op) -> Relation:
    return Relation(aligned("indices", range(len(op.shape("indices")))), reason="it is the table of a lookup")


@register_rule(aten.index_select)
def index_select(op: Op) -> Relation:
    rank = len(op.shape())
    d = op.dim("dim", rank)
    table = aligned("self", {i: i for i in range(rank) if i != d})
    return Relation((*table, *aligned("index", {0: d})), reason="it is the table of a lookup")


@register_rule(aten.gather.default)
def gather(op: Op) -> Relation:
    rank = len(op.shape())
    d = op.dim("dim", rank)
    table, index = op.shape("self"), op.shape("index")
    links = [Same((("index", d), (OUT, d)))] if rank else []
    links += [Same((("self", i), ("index", i), (OUT, i))) for i in range(rank) if i != d and equal(table[i], index[i])]
    return Relation(tuple(links), reason="it is the table of a lookup")


@register_rule(aten.index.Tensor)
def index(op: Op) -> Relation:
    table = op.shape("self")
    given = list(op.args["indices"]) + [None] * (len(table) - len(op.args["indices"]))
    at = [i for i, x in enumerate(given) if x is not None]
    if not at:
        return Relation(aligned("self", range(len(table))))
    if any(given[i].meta["val"].dtype == torch.bool for i in at) or at != list(range(at[0], at[-1] + 1)):
        return Relation(reason="it takes rows by a mask, or from dims that are apart")
    width = max(len(op.shape(("indices", i))) for i in at)
    first, out = at[0], op.shape()
    if len(out) != len(table) - len(at) + width:
        return Relation(reason="its output is not made dim by dim")
    links = list(
        aligned("self", {d: d if d < first else d - len(at) + width for d in range(len(table)) if d not in at})
    )
    for j in range(width):
        ends = []
        for i in at:
            shape = op.shape(("indices", i))
            d = j - width + len(shape)
            if d >= 0 and not (shape[d] == 1 and out[first + j] != 1):
                ends.append((("indices", i), d))
        links.append(Same((*ends, (OUT, first + j))))
    return Relation(tuple(links), reason="it is the table of a lookup")


@register_rule(aten.triu, aten.tril)
def triangle(op: Op) -> Relation:
    return Relation(aligned("self", range(len(op.shape()) - 2)), reason="it compares rows with columns")
