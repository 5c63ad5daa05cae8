"""Which rows meet which columns at each step of a ring, with what mask: everything the ring knows before it runs.

Every rank has the same blocks of the same shapes in the same order; only where they start differs. So the graph that is
traced on each rank is the same but for constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from cp_compile.attention.dropout import keep_weights
from cp_compile.attention.heads import HeadPlan
from cp_compile.attention.kernel import Kernel, accumulation_dtype
from cp_compile.attention.spec import AttentionSpec, same_placement
from cp_compile.placement import Placement, Size

__all__ = ["Block", "RingPlan", "order_matters"]


class Block(NamedTuple):
    """Some query rows against some keys of one step; ``causal`` on the diagonal of the block."""

    q_start: Size
    q_rows: Size
    k_start: Size
    k_rows: Size
    causal: bool


def order_matters(spec: AttentionSpec, masked: bool) -> bool:
    """Whether keys can be told apart by their place."""
    return masked or spec.causal or spec.dropout_p > 0 or spec.kv is None or spec.kv.padded


@dataclass(frozen=True)
class RingPlan:
    """One ring attention of one rank.

    Attributes:
        spec: the attention.
        kv: placement of keys and values.
        heads: the heads of this rank.
        kernel: what computes a block.
        scale: of the scores.
        masked: whether there is a mask.
    """

    spec: AttentionSpec
    kv: Placement
    heads: HeadPlan
    kernel: Kernel
    scale: float
    masked: bool

    @property
    def balanced(self) -> bool:
        """Whether blocks above the causal diagonal are left out, by the pattern of :meth:`blocks`."""
        return self.spec.causal and self.kv.zigzag and same_placement(self.spec.q, self.kv)

    @property
    def whole(self) -> bool:
        """Whether all keys are gathered into one block, in global order and without padding."""
        return self.spec.rotate == "allgather" and not self.balanced

    @property
    def steps(self) -> int:
        """Blocks of keys, one after the other."""
        return 1 if self.whole else self.spec.mesh.ring

    def source(self, step: int) -> int:
        """Ring rank whose keys are here at a step."""
        return (self.spec.mesh.ring_rank - step) % self.spec.mesh.ring

    def blocks(self, step: int, q_rows: Size, k_rows: Size) -> list[Block]:
        """What is computed at a step.

        Without balance, everything. With it, each segment of a rank is a head and a tail chunk, equally long, and by
        the numbers of the chunks (head ``i``, tail ``2R-1-i``) at any step but the first:

        - a tail sees the head of the source, and a head never its tail;
        - a head sees the head, if the source comes first, else the tail sees the tail;
        - all of a segment sees all of the segments before it.
        """
        if not self.balanced:
            return [Block(0, q_rows, 0, k_rows, False)]
        if step == 0:  # local rows increase globally, so the local diagonal is the global one
            return [Block(0, q_rows, 0, k_rows, True)]
        out: list[Block] = []
        start: Size = 0
        late = self.source(step) > self.spec.mesh.ring_rank
        for chunk in self.kv.chunks:
            rows = self.kv.ulysses * chunk
            half = rows // 2
            if out:
                out.append(Block(start, rows, 0, start, False))
            out.append(Block(start + half, half, start, half, False))
            own = start + (half if late else 0)
            out.append(Block(own, half, own, half, False))
            start = start + rows
        return out

    def row_index(self, device: torch.device) -> Tensor:
        """Global row of each query row here."""
        return self.spec.q.ring_rows(self.spec.mesh.ring_rank, device)[0]

    def column_index(self, step: int, device: torch.device) -> Tensor:
        """Global column of each key of a step."""
        if self.whole:
            return torch.arange(cast(int, self.kv.total), device=device)
        return self.kv.ring_rows(self.source(step), device)[0]

    @property
    def biased(self) -> bool:
        """Whether :meth:`bias` has something to add."""
        return self.masked or (self.spec.causal and not self.balanced) or (self.kv.padded and not self.whole)

    def bias(self, step: int, mask: Tensor | None, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores of a step, but for the diagonals of its blocks.

        Args:
            step: of the ring.
            mask: additive, the rows of this rank, all columns.
            device: of q.
            dtype: of q.

        Returns:
            ``[B or 1, H or 1, Lq or 1, Lk or 1]``. Padded keys are masked by a value, not left out: their number
            differs from rank to rank.
        """
        if not self.biased:
            return None
        valid = None
        if self.kv.padded and not self.whole:
            valid = self.kv.ring_rows(self.source(step), device)[1]
        if mask is not None:
            if mask.shape[3] != 1 and not self.whole:
                mask = mask.index_select(3, self.column_index(step, device))
            return mask if valid is None else torch.where(valid, mask, -torch.inf)
        if self.spec.causal and not self.balanced:
            seen = self.row_index(device).unsqueeze(1) >= self.column_index(step, device)
            valid = seen if valid is None else seen & valid
        assert valid is not None
        values = torch.where(valid, 0.0, -torch.inf).to(dtype)
        return values.view(1, 1, -1, values.shape[-1])

    def weights(self, step: int, seed: Tensor | None, q: Tensor) -> Tensor | None:
        """Dropout of a step, ``[B, H, Lq, Lk]``, the same however often it is asked for."""
        if seed is None:
            return None
        batch = torch.arange(q.shape[0], device=q.device)
        heads = self.heads.q_index(self.spec.mesh.ulysses_rank, q.device)
        rows, columns = self.row_index(q.device), self.column_index(step, q.device)
        return keep_weights(seed, batch, heads, rows, columns, self.spec.dropout_p).to(accumulation_dtype(q.dtype))

    def kv_index(self, k: Tensor) -> Tensor | None:
        """Local kv head that each query head reads, where the kernel does not find it by itself."""
        index = self.heads.kv_index(self.spec.mesh.ulysses_rank, k.device)
        if index is None and not self.kernel.grouped and self.heads.q_local != self.heads.kv_local:
            index = torch.arange(self.heads.q_local, device=k.device) // (self.heads.q_local // self.heads.kv_local)
        return index
