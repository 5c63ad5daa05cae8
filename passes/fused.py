"""torch's fused inference layers as the ops that they fuse.

``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` call one kernel for a whole layer where no gradient is
wanted. No shard of it could run; of its parts, all can. The capture takes these functions for decompositions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["FUSED"]

aten = torch.ops.aten

_ROWS_AND_COLUMNS, _KEYS = 0, 1
"""What a mask's type says: ``[rows, columns]``, or ``[batch, columns]``; else ``[batch, heads, rows, columns]``."""


def _seen(mask: Tensor | None, kind: int | None) -> Tensor | None:
    """The mask of attention, true where a key is seen, from one that is true where it is not."""
    if mask is None:
        return None
    if kind == _KEYS:
        mask = mask[:, None, None, :]
    elif kind == _ROWS_AND_COLUMNS:
        mask = mask[None, None]
    return ~mask.to(torch.bool)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``[batch, tokens, dim]`` to the same, and the weights ``[batch, rows, columns]`` or by head."""
    pieces = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3))
    q, k, v = (_heads(F.linear(x, w, b), num_head) for x, w, b in pieces)
    seen = _seen(mask, mask_type)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    out = F.linear(y.transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return out, query.new_empty(0)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1)
    return out, weights.mean(1) if average_attn_weights else weights


def _encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """``[batch, tokens, dim]`` to the same."""

    def attend(x: Tensor) -> Tensor:
        return _attention(
            x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type
        )[0]

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    if norm_first:
        src = src + attend(norm(src, norm_weight_1, norm_bias_1))
        return src + feed_forward(norm(src, norm_weight_2, norm_bias_2))
    src = norm(src + attend(src), norm_weight_1, norm_bias_1)
    return norm(src + feed_forward(src), norm_weight_2, norm_bias_2)


FUSED: dict[Any, Callable[..., Any]] = {
    aten._native_multi_head_attention.default: _attention,
    aten._transformer_encoder_layer_fwd.default: _encoder_layer,
}
