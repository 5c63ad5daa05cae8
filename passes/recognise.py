"""Attention written by hand becomes attention.

*Before*, ``softmax(q @ k.transpose(-1, -2) * scale + mask, -1) @ v`` as products and a softmax, by ``matmul``,
``bmm``, ``baddbmm`` or ``einsum``. *After*, one ``scaled_dot_product_attention``. What makes it right: every value in
between has that one user, so nobody sees the scores, and the two are the same function. Where the weights have another
user (``nn.MultiheadAttention`` returns them), the softmax stays for it, and attention is computed beside: the scores
twice, but sharded.

A chain that is not exactly this is left as it is. It still runs, rows sharded and keys gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .graphs import call
from .relation import Op, is_tensor

__all__ = ["recognise_attention"]

aten = torch.ops.aten

_PRODUCTS = {aten.matmul.default: ("self", "other"), aten.bmm.default: ("self", "mat2")}


@dataclass
class _Scores:
    """The left half of an attention: what goes into the softmax.

    Attributes:
        query: ``[..., rows, dim]``.
        key: ``[..., columns, dim]``, or its transpose where ``transposed``.
        transposed: the key comes as ``[..., dim, columns]``.
        scale: of the product.
        masks: values added to the scaled product.
    """

    query: fx.Node
    key: fx.Node
    transposed: bool
    scale: float = 1.0
    masks: list[fx.Node] = field(default_factory=list)


def recognise_attention(graph: fx.Graph) -> int:
    """Replace every attention written by hand. Returns how many there were."""
    count = 0
    for node in list(graph.nodes):
        if node.target in (aten.softmax.int, aten._softmax.default, aten._safe_softmax.default):
            count += _replace(graph, node)
    return count


def _replace(graph: fx.Graph, softmax: fx.Node) -> bool:
    rank = softmax.meta["val"].dim()
    if Op.of(softmax).dim("dim", rank) != rank - 1 or rank < 3:
        return False
    scores = _scores(softmax.args[0])
    found = _product_with_values(softmax)
    if scores is None or found is None:
        return False
    product, value, dropout = found
    batch = [tuple(n.meta["val"].shape[:-2]) for n in (scores.query, scores.key, value)]
    if len({len(b) for b in batch}) > 1 or any(a is not b and a != b for x in batch[1:] for a, b in zip(batch[0], x)):
        return False
    dtype = product.meta["val"].dtype
    if any(n.meta["val"].dtype != dtype for n in (scores.query, scores.key, value)):
        return False
    with graph.inserting_before(product):
        key = call(graph, product, aten.transpose.int, scores.key, -1, -2) if scores.transposed else scores.key
        mask: Any = None
        for m in scores.masks:
            mask = m if mask is None else call(graph, product, aten.add.Tensor, mask, m)
        if mask is not None and mask.meta["val"].dtype not in (dtype, torch.bool):
            mask = call(graph, product, aten._to_copy.default, mask, dtype=dtype)
        new = call(
            graph, product, aten.scaled_dot_product_attention.default,
            scores.query, key, value, mask, dropout, False, scale=scores.scale,
        )  # fmt: skip
    product.replace_all_uses_with(new)
    return True


def _scores(node: Any) -> _Scores | None:
    """Read the chain backwards from the softmax: casts, masks, then scales, then the product."""
    masks: list[fx.Node] = []
    scale = 1.0
    while isinstance(node, fx.Node) and is_tensor(node) and len(node.users) == 1:
        op = Op.of(node) if isinstance(node.target, torch._ops.OpOverload) else None
        if op is None:
            return None
        number = _number(op)
        if node.target is aten._to_copy.default and node.meta["val"].is_floating_point():
            node = op.args["self"]
        elif node.target is aten.add.Tensor and scale == 1.0 and op.args["alpha"] == 1 and _chain(op) is not None:
            main = _chain(op)
            other = op.args["other"] if main is op.args["self"] else op.args["self"]
            masks.append(other)
            node = main
        elif number is not None:
            scale *= number
            node = op.args["self"]
        elif node.target in _PRODUCTS:
            a, b = (op.args[name] for name in _PRODUCTS[node.target])
            return _Scores(a, b, True, scale, masks)
        elif node.target is aten.baddbmm.default and (op.args["beta"] == 0 or (op.args["beta"] == 1 and scale == 1.0)):
            masks += [op.args["self"]] if op.args["beta"] else []
            return _Scores(op.args["batch1"], op.args["batch2"], True, scale * op.args["alpha"], masks)
        elif node.target is aten.einsum.default:
            return _einsum_scores(op, scale, masks)
        else:
            return None
    return None


def _chain(op: Op) -> fx.Node | None:
    """The operand of a sum that leads to a product; the other one is a mask."""
    sides = [x for x in (op.args["self"], op.args["other"]) if is_tensor(x)]
    full = [x for x in sides if len(x.users) == 1 and _leads_to_product(x)]
    return (
        full[0]
        if len(sides) == 2 and len(full) == 1 and full[0].meta["val"].shape == op.node.meta["val"].shape
        else None
    )


def _leads_to_product(node: fx.Node) -> bool:
    for _ in range(8):
        if node.target in _PRODUCTS or node.target in (aten.baddbmm.default, aten.einsum.default):
            return True
        if node.target not in (aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten._to_copy.default):
            return False
        following = [x for x in node.args[:1] if is_tensor(x)]
        if not following:
            return False
        node = following[0]  # type: ignore[assignment]
    return False


def _number(op: Op) -> float | None:
    """The factor, where a node multiplies or divides by a number."""
    if op.node.target not in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
        return None
    other = op.args["other"]
    if isinstance(other, bool) or not isinstance(other, (int, float)) or other == 0:
        return None
    return float(other) if op.node.target in (aten.mul.Tensor, aten.mul.Scalar) else 1.0 / other


def _einsum_scores(op: Op, scale: float, masks: list[fx.Node]) -> _Scores | None:
    parts = _labels(op)
    if parts is None:
        return None
    (a, b), out = parts
    batch = out[:-2]
    if a == batch + out[-2] + a[-1] and b == batch + out[-1] + a[-1] and a[-1] not in out:
        query, key = op.args["tensors"]
        return _Scores(query, key, False, scale, masks)
    return None


def _labels(op: Op) -> tuple[tuple[str, str], str] | None:
    equation = op.args["equation"].replace(" ", "")
    if "..." in equation or "->" not in equation or len(op.args["tensors"]) != 2:
        return None
    inputs, out = equation.split("->")
    a, b = inputs.split(",")
    return (a, b), out


def _product_beside_others(weights: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """The one product with the values, where the weights are wanted besides: as an output, say."""
    found = [
        (user, Op.of(user).args[_PRODUCTS[user.target][1]], 0.0)
        for user in weights.users
        if user.target in _PRODUCTS and user.args[0] is weights and user.args[1] is not weights
    ]
    return found[0] if len(found) == 1 else None


def _product_with_values(node: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """Read forwards from the softmax: casts and dropout, then the product with the values."""
    if len(node.users) > 1:
        return _product_beside_others(node)
    dropout = 0.0
    while len(node.users) == 1:
        (user,) = node.users
        if not isinstance(user.target, torch._ops.OpOverload):
            return None
        op = Op.of(user)
        if user.target is aten._to_copy.default and user.meta["val"].is_floating_point():
            node = user
        elif user.target is aten.dropout.default:
            dropout = float(op.args["p"]) if op.args["train"] else dropout
            node = user
        elif user.target in _PRODUCTS:
            first, second = (op.args[name] for name in _PRODUCTS[user.target])
            return (user, second, dropout) if first is node else None
        elif user.target is aten.einsum.default:
            parts = _labels(op)
            if parts is None or op.args["tensors"][0] is not node:
                return None
            (a, b), out = parts
            if b == a[:-2] + a[-1] + b[-1] and out == a[:-1] + b[-1] and b[-1] not in a:
                return user, op.args["tensors"][1], dropout
            return None
        else:
            return None
    return None
