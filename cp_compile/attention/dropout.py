"""Dropout of attention weights that depends on nothing but a seed and where a weight is.

Each weight is decided by a hash of the seed and of its batch, head, row and column in the whole attention. So no two
tokens or heads share their draws, on whatever rank they are; a padded row is dropped like the row it copies; and the
ring's backward drops the weights that its forward dropped, block by block, without having kept them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cp_compile.attention.spec import AttentionSpec

__all__ = ["draw_seed", "dropout_attention", "keep_weights"]

_BITS = 32


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32 bit numbers (kept in int64; both factors are below 2**31, so nothing overflows)."""
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def draw_seed(device: torch.device) -> Tensor:
    """From the default generator, alike on ranks that are seeded alike: int64 scalar in ``[0, 2**32)``."""
    return torch.randint(2**_BITS, (), device=device)


def dropout_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec, heads: Tensor, rows: Tensor
) -> Tensor:
    """SDPA with dropout in plain math: no kernel of SDPA can be told where its rows and heads are.

    Args:
        q: ``[B, H, Sq, D]``.
        k, v: ``[B, H or fewer, Skv, D or Dv]``, all keys.
        mask: None, boolean (True is seen) or additive, broadcastable to ``[B, H, Sq, Skv]``; causality included.
        spec: its ``dropout_p`` and ``scale``.
        heads, rows: index of each head and row of ``q`` in the whole attention, int64.

    Returns:
        ``[B, H, Sq, Dv]``. A row that sees no key is 0.
    """
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scale = 1.0 / math.sqrt(q.shape[3]) if spec.scale is None else spec.scale
    scores = (q * scale) @ k.transpose(2, 3)
    scores = scores.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask
    batch, columns = (torch.arange(n, device=q.device) for n in (q.shape[0], k.shape[2]))
    kept = keep_weights(draw_seed(q.device), batch, heads, rows, columns, spec.dropout_p)
    weights = torch.ops.aten._safe_softmax(scores, -1) * kept
    return weights.to(v.dtype) @ v


def keep_weights(seed: Tensor, batch: Tensor, heads: Tensor, rows: Tensor, columns: Tensor, p: float) -> Tensor:
    """Factors of attention weights: 0 with probability ``p``, else ``1 / (1 - p)``.

    Args:
        seed: int64 scalar in ``[0, 2**32)``.
        batch, heads, rows, columns: int64 vectors of indices.
        p: in ``[0, 1]``.

    Returns:
        fp32 ``[len(batch), len(heads), len(rows), len(columns)]``.
    """
    x = seed
    for index in (batch, heads, rows, columns):
        x = _mix((x.unsqueeze(-1) + _mix(index + 1)) & 0xFFFFFFFF)
    keep = x >= int(p * 2**_BITS)
    return torch.where(keep, 1.0 / (1.0 - p) if p < 1 else 0.0, 0.0)
