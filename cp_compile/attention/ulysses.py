"""Ulysses: all-to-all from rows to heads, attention over all rows, and back (DeepSpeed Ulysses, arXiv 2309.14509).

::

    q, k, v   [B, H, S/U, D]   one packed all-to-all   [B, H/U, S, D]
                                                          | attention
    out       [B, H, S/U, D]   one all-to-all back     [B, H/U, S, D]

Beyond the paper: any length (padding is dropped before the attention and made again after it), any number of heads,
grouped queries (see heads.py), q and kv of different lengths, and, inside a ring, one ring chunk in place of the whole
sequence (USP, arXiv 2405.07719).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cp_compile.attention.dropout import dropout_attention
from cp_compile.attention.heads import HeadPlan, plan_heads
from cp_compile.attention.local import sdpa
from cp_compile.attention.spec import AttentionSpec, same_placement
from cp_compile.collectives import all_to_all
from cp_compile.placement import Placement

__all__ = ["exchange_heads", "ulysses_attention"]

Inner = Callable[[Tensor, Tensor, Tensor, "Tensor | None", HeadPlan], Tensor]


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """Attention by exchange of heads on a mesh without a ring.

    Args:
        q: ``[B, Hq, spec.q.local, D]``.
        k: ``[B, Hkv, spec.kv.local, D]``.
        v: ``[B, Hkv, spec.kv.local, Dv]``.
        mask: None, or whole, of four dims.
        spec: the attention.

    Returns:
        ``[B, Hq, spec.q.local, Dv]``, a transposed view of contiguous ``[B, rows, Hq, Dv]`` as of flash kernels.
    """
    assert spec.kv is not None
    # Softmax does not mind the order of the keys, and rows stay where they arrive if nothing tells them apart.
    # Padded keys have to go; padded queries may stay, they are copies and so are their results.
    ordered = mask is not None or spec.causal or spec.kv.padded or spec.dropout_p > 0

    def inner(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads: HeadPlan) -> Tensor:
        index = heads.kv_index(spec.mesh.ulysses_rank, k.device)
        if index is not None:
            k, v = k.index_select(1, index), v.index_select(1, index)
        if spec.dropout_p:
            rows = torch.arange(q.shape[2], device=q.device)
            if spec.causal:
                mask = (rows.unsqueeze(1) >= torch.arange(k.shape[2], device=q.device))[None, None]
            return dropout_attention(q, k, v, mask, spec, heads.q_index(spec.mesh.ulysses_rank, q.device), rows)
        return sdpa(q, k, v, mask, spec, spec.causal)

    return exchange_heads(q, k, v, mask, spec, (spec.q, spec.kv), ordered, inner)


def exchange_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    spec: AttentionSpec,
    placements: tuple[Placement, Placement],
    ordered: bool,
    inner: Inner,
) -> Tensor:
    """Calls ``inner`` with all the ulysses group's rows of this rank's heads; gives back this rank's rows of all heads.

    Args:
        q, k, v, mask: as in :func:`ulysses_attention`.
        spec: the attention.
        placements: of q's and kv's rows on the ulysses group alone.
        ordered: whether ``inner`` needs the rows in the group's order and without the group's padding; if not, they
            come as they arrive, each rank's after another's.
        inner: ``(q, k, v, mask, heads)`` to ``[B, q_local, rows of q, Dv]``.
    """
    size, group = spec.mesh.ulysses, spec.mesh.ulysses_group
    heads = plan_heads(int(q.shape[1]), int(k.shape[1]), size)
    parts = [_to_slices(heads.cut_q(q, 1)), _to_slices(heads.cut_kv(k, 1)), _to_slices(heads.cut_kv(v, 1))]
    # [U, rows, B * heads * dim] each. Packed side by side where all have the same rows, so that the received rows are
    # views of the buffer and nothing is copied; one after the other where they have not.
    beside = same_placement(spec.q, spec.kv)
    batch, q_dim, v_dim = q.shape[0], q.shape[3], v.shape[3]
    received = _split_like(
        all_to_all(torch.cat(parts if beside else [p.flatten(1) for p in parts], -1), group, size), parts
    )
    shapes = ((batch, heads.q_local, q_dim), (batch, heads.kv_local, q_dim), (batch, heads.kv_local, v_dim))
    q_placement, kv_placement = placements
    rows = []
    for part, shape, placement in zip(received, shapes, (q_placement, kv_placement, kv_placement)):
        blocks = part.unflatten(2, shape).permute(2, 3, 0, 1, 4)  # [B, heads, U, rows, dim]
        rows.append(placement.merge(blocks, 2) if ordered else blocks.flatten(2, 3))
    if mask is not None:
        mask = heads.local_mask(mask, spec.mesh.ulysses_rank)
    out = inner(rows[0], rows[1], rows[2], mask, heads)
    blocks = q_placement.split(out, 2) if ordered else out.unflatten(2, (size, q.shape[2]))
    back = all_to_all(blocks.permute(2, 3, 0, 1, 4), group, size)  # [U, rows, B, heads, Dv]
    return heads.join_q(back.permute(2, 1, 0, 3, 4), 2).transpose(1, 2)


def _to_slices(x: Tensor) -> Tensor:
    """``[B, U, heads, rows, dim]`` to ``[U, rows, B * heads * dim]``."""
    return x.permute(1, 3, 0, 2, 4).flatten(2)


def _split_like(buffer: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """Undoes the packing of ``parts`` along the last dim of ``buffer``, as views."""
    out, start = [], 0
    for part in parts:
        size = part.shape[2] if buffer.dim() == 3 else part.shape[1] * part.shape[2]
        out.append(buffer.narrow(-1, start, size).reshape(part.shape))
        start = start + size
    return out
