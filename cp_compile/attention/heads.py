"""Which heads each ulysses rank computes, and which key and value heads it needs for them.

All ranks hold the same number of heads, whatever the counts: missing query heads are padded, and each rank receives
just the key and value heads that its query heads read. Query head ``i`` reads kv head ``i // (q_heads // kv_heads)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["HeadPlan", "plan_heads"]


@dataclass(frozen=True)
class HeadPlan:
    """An assignment of heads to ranks.

    The query heads are cut into ``groups``, each padded to a multiple of ``q_local``, and laid out on the ranks in
    order.

    Attributes:
        q_heads: query heads of the model.
        kv_heads: key and value heads of the model.
        ranks: ranks that share the heads.
        groups: 1, or ``kv_heads`` where several ranks serve one kv head.
        q_local: query heads on every rank, padding included.
        kv_local: kv heads on every rank.
        starts: first kv head of each rank; None where kv heads are simply cut evenly, padded if need be.
        aligned: whether local query head ``j`` reads local kv head ``j // (q_local // kv_local)`` on every rank, which
            is what ``enable_gqa`` of SDPA means.
    """

    q_heads: int
    kv_heads: int
    ranks: int
    groups: int
    q_local: int
    kv_local: int
    starts: tuple[int, ...] | None
    aligned: bool

    @property
    def padded(self) -> bool:
        """Whether some rank holds a query head that is not in the model."""
        return self.ranks * self.q_local != self.q_heads

    @property
    def _slots(self) -> int:
        return self.ranks * self.q_local // self.groups

    def cut_q(self, x: Tensor, dim: int) -> Tensor:
        """``[..., q_heads, ...]`` to ``[..., ranks, q_local, ...]``; heads of padding are zero."""
        if self.padded:
            x = _pad(x.unflatten(dim, (self.groups, -1)), dim + 1, self._slots).flatten(dim, dim + 1)
        return x.unflatten(dim, (self.ranks, self.q_local))

    def join_q(self, x: Tensor, dim: int) -> Tensor:
        """Inverse of :meth:`cut_q`."""
        x = x.flatten(dim, dim + 1)
        if self.padded:
            x = x.unflatten(dim, (self.groups, self._slots)).narrow(dim + 1, 0, self.q_heads // self.groups)
            x = x.flatten(dim, dim + 1)
        return x

    def cut_kv(self, x: Tensor, dim: int) -> Tensor:
        """``[..., kv_heads, ...]`` to ``[..., ranks, kv_local, ...]``; a head goes to every rank that reads it."""
        if self.starts is not None:
            return torch.stack([x.narrow(dim, s, self.kv_local) for s in self.starts], dim)
        return _pad(x, dim, self.ranks * self.kv_local).unflatten(dim, (self.ranks, self.kv_local))

    def q_index(self, rank: int, device: torch.device) -> Tensor:
        """Query head of the model for each local one, int64 ``[q_local]``; for padding, one that exists."""
        slot = torch.arange(self.q_local, device=device) + rank * self.q_local
        size = self.q_heads // self.groups
        return slot // self._slots * size + (slot % self._slots).clamp(max=size - 1)

    def kv_index(self, rank: int, device: torch.device) -> Tensor | None:
        """Local kv head of each local query head, int64 ``[q_local]``; None where ``aligned``."""
        if self.aligned or self.starts is None:
            return None
        return self.q_index(rank, device) // (self.q_heads // self.kv_heads) - self.starts[rank]

    def local_mask(self, mask: Tensor, rank: int) -> Tensor:
        """A mask ``[B, q_heads or 1, ...]`` for the rank's query heads."""
        if self.ranks == 1 or mask.shape[1] == 1:
            return mask
        if self.padded:
            return mask.index_select(1, self.q_index(rank, mask.device))
        return mask.narrow(1, rank * self.q_local, self.q_local)


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    extra = size - x.shape[dim]
    return pad(x, (0, 0) * (x.dim() - dim - 1) + (0, extra)) if extra else x


@cache
def plan_heads(q_heads: int, kv_heads: int, ranks: int) -> HeadPlan:
    """Cuts heads over ranks.

    Args:
        q_heads: query heads, a multiple of ``kv_heads``.
        kv_heads: key and value heads.
        ranks: ulysses ranks.

    Raises:
        ValueError: the head counts do not fit each other.
    """
    if q_heads % kv_heads:
        raise ValueError(
            f"cp_compile: {q_heads} query heads cannot share {kv_heads} key heads; expected a multiple of {kv_heads}"
        )
    local = -(-q_heads // ranks)
    group = q_heads // kv_heads
    if kv_heads % ranks == 0 or group == 1:
        return HeadPlan(q_heads, kv_heads, ranks, 1, local, -(-kv_heads // ranks), None, True)
    if ranks % kv_heads == 0:  # each kv head is served by ranks of its own: one kv head a rank
        share = ranks // kv_heads
        return HeadPlan(q_heads, kv_heads, ranks, kv_heads, local, 1, tuple(r // share for r in range(ranks)), True)
    first = [min(r * local, q_heads - 1) // group for r in range(ranks)]
    last = [min((r + 1) * local, q_heads) - 1 for r in range(ranks)]
    count = max(max(b // group, a) - a + 1 for a, b in zip(first, last))
    starts = tuple(min(a, kv_heads - count) for a in first)
    aligned = local % count == 0 and all(
        (r * local + j) // group - starts[r] == j // (local // count)
        for r in range(ranks)
        for j in range(local)
        if r * local + j < q_heads
    )
    return HeadPlan(q_heads, kv_heads, ranks, 1, local, count, starts, aligned)
