"""Ops that sum over shared dims: linear layers, matrix products, einsum, convolutions."""

from __future__ import annotations

from typing import Any

import torch

from ..relation import OUT, Op, Relation, Same, Slot
from .registry import aligned, register_rule

aten = torch.ops.aten


def by_labels(operands: list[tuple[Slot, str]], out: str) -> Relation:
    """The relation of an einsum: each label is one index; labels that the output lacks are summed over."""
    links, sums = [], []
    for label in dict.fromkeys("".join(labels for _, labels in operands)):
        ends = tuple((slot, labels.index(label)) for slot, labels in operands if label in labels)
        if label in out:
            links.append(Same((*ends, (OUT, out.index(label)))))
        else:
            sums.append(ends)
    return Relation(tuple(links), sums=tuple(sums), reason="it sums over tokens")


@register_rule(aten.linear)
def linear(op: Op) -> Relation:
    rank = len(op.shape("input"))
    return Relation(aligned("input", range(rank - 1)), reason="it mixes the last dim")


@register_rule(aten.matmul, aten.mm, aten.bmm, aten.dot, aten.mv)
def matmul(op: Op) -> Relation:
    (a, _), (b, _) = op.inputs()
    n, m = len(op.shape(a)), len(op.shape(b))
    # Rows i, columns j, summed k, batch dims counted from the right.
    batch = "abcdefgh"[: max(n, m, 2) - 2]
    left = "k" if n == 1 else batch[len(batch) - (n - 2) :] + "ik"
    right = "k" if m == 1 else batch[len(batch) - (m - 2) :] + "kj"
    out = batch + ("i" if n > 1 else "") + ("j" if m > 1 else "")
    return _without_broadcast(op, by_labels([(a, left), (b, right)], out))


@register_rule(aten.addmm, aten.baddbmm, aten.addbmm)
def addmm(op: Op) -> Relation:
    if op.node.target is aten.addbmm.default:
        return Relation()
    batch = "b" if len(op.shape()) == 3 else ""
    names = [name for name, _ in op.inputs()]
    left, right = names[1], names[2]
    relation = by_labels([(left, batch + "ik"), (right, batch + "kj")], batch + "ij")
    # The added term would be added once a rank, so a partial sum over k is not one of the whole.
    first = op.shape("self")
    links = []
    for link in relation.links:
        (out_dim,) = (d for s, d in link.ends if s == OUT)  # type: ignore[union-attr]
        at = out_dim - len(op.shape()) + len(first)
        extra = (("self", at),) if at >= 0 and not (first[at] == 1 and op.shape()[out_dim] != 1) else ()
        links.append(Same((*link.ends, *extra)))  # type: ignore[union-attr]
    return Relation(tuple(links), reason="it sums over tokens")


@register_rule(aten.outer)
def outer(op: Op) -> Relation:
    return by_labels([("self", "i"), ("vec2", "j")], "ij")


@register_rule(aten.einsum)
def einsum(op: Op) -> Relation:
    equation = op.args["equation"].replace(" ", "")
    if "..." in equation or "->" not in equation:
        return Relation(reason="its equation has an ellipsis or no output")
    inputs, out = equation.split("->")
    operands = [(slot, labels) for (slot, _), labels in zip(op.inputs(), inputs.split(","), strict=True)]
    if any(len(set(labels)) != len(labels) for _, labels in operands):
        return Relation(reason="its equation takes a diagonal")
    return _without_broadcast(op, by_labels(operands, out))


@register_rule(aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution, aten.conv_transpose1d, aten.conv_transpose2d)
def convolution(op: Op) -> Relation:
    name = "input"
    links = list(aligned(name, {0: 0} if len(op.shape(name)) == len(op.shape("weight")) else {}))
    if links:
        kernel = op.shape("weight")[2:]
        stride, padding = op.args.get("stride"), op.args.get("padding")
        transposed = op.args.get("transposed", "transpose" in str(op.node.target))
        for i, size in enumerate(kernel):
            # A window of one pixel is a linear layer.
            if size == 1 and not transposed and _all_are(stride, 1) and _all_are(padding, 0):
                links += aligned(name, {i + 2: i + 2})
    return Relation(tuple(links), reason="a convolution reads its neighbours")


@register_rule(aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d, aten.max_pool2d, aten.adaptive_avg_pool2d)
def pool(op: Op) -> Relation:
    spatial = len(op.args["kernel_size" if "kernel_size" in op.args else "output_size"])
    return Relation(aligned("self", range(len(op.shape()) - spatial)), reason="pooling reads its neighbours")


def _all_are(value: Any, wanted: int) -> bool:
    return all(v == wanted for v in value) if isinstance(value, (list, tuple)) else value == wanted


def _without_broadcast(op: Op, relation: Relation) -> Relation:
    """Drop the ends that are broadcast: of size 1 where the output is not."""
    links = []
    for link in relation.links:
        (out_dim,) = (d for s, d in link.ends if s == OUT)  # type: ignore[union-attr]
        size = op.shape()[out_dim]
        links.append(
            Same(tuple((s, d) for s, d in link.ends if s == OUT or not (op.shape(s)[d] == 1 and size != 1)))  # type: ignore[union-attr]
        )
    return Relation(tuple(links), sums=relation.sums, reason=relation.reason)
