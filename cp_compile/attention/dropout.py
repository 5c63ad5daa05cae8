"""Dropout that depends on nothing but a seed and where a weight is.

The ring's backward must drop the weights that its forward dropped, block by block, without having kept them. So each
weight is decided by a hash of the seed and of its batch, head, row and column. A padded row is dropped like the row it
copies.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["keep_weights"]

_BITS = 32


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32 bit numbers (kept in int64; both factors are below 2**31, so nothing overflows)."""
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


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
