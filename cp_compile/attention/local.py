"""Attention of this rank's rows to keys and values that every rank has: no communication.

Cross-attention to replicated text is the common case. Every rank adds its own part of the keys' gradient, so the keys'
true gradient is the sum over ranks (:func:`cp_compile.collectives.replicate`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cp_compile.attention.dropout import dropout_attention
from cp_compile.attention.spec import AttentionSpec

__all__ = ["local_attention", "sdpa"]


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec, causal: bool) -> Tensor:
    """SDPA of ``[B, H, S, D]`` with the scale of ``spec``, without dropout; groups of query heads share kv heads."""
    # SDPA takes fp32 masks for any dtype of q, but in torch 2.13 its CPU kernel misreads them where q is fp64.
    wide = torch.bool, q.dtype, torch.float32 if q.dtype != torch.float64 else q.dtype
    if mask is not None and mask.dtype not in wide:
        mask = mask.to(q.dtype)
    return scaled_dot_product_attention(
        q, k, v, mask, 0.0, causal, scale=spec.scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def local_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """Attention without communication.

    Args:
        q: ``[B, Hq, spec.q.local, D]``.
        k: ``[B, Hkv, Skv, D]``, all rows in global order, or the rows of the only rank.
        v: ``[B, Hkv, Skv, Dv]``.
        mask: None, or whole, of four dims.
        spec: the attention.

    Returns:
        ``[B, Hq, spec.q.local, Dv]``.
    """
    if spec.kv is not None and spec.kv.padded:  # one rank, whose zigzag chunks are padded to an even length
        k, v = (spec.kv.merge(x.unsqueeze(2), 2) for x in (k, v))
    if spec.mesh.degree == 1 and not spec.q.padded and not spec.dropout_p:
        return sdpa(q, k, v, mask, spec, spec.causal)
    rows = spec.q.rows(spec.mesh.rank, q.device)
    if spec.causal:
        mask = (rows.unsqueeze(1) >= torch.arange(k.shape[2], device=q.device))[None, None]
    elif mask is not None and mask.shape[2] != 1:
        mask = mask.index_select(2, rows)
    if spec.dropout_p:
        return dropout_attention(q, k, v, mask, spec, torch.arange(q.shape[1], device=q.device), rows)
    return sdpa(q, k, v, mask, spec, False)
