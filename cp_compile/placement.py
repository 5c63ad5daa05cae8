"""How the token axis is cut over the ranks of a mesh.

An axis is an ordered list of *segments* (text, image, ...), each cut on its own, so that a rank holds a piece of every
segment and concatenating segments never moves a row between ranks. All ranks hold the same number of rows: the last
piece of a segment is padded, and a padded row is always a copy of the segment's last row.

A placement is an index function and nothing more: which global row is local row ``i`` of rank ``r``. ``shard``,
``gather``, masks and causal order all follow from it. Lengths may be ``int`` or ``torch.SymInt``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

Size = int | torch.SymInt

__all__ = ["Placement", "Size", "ceildiv"]


def ceildiv(a: Size, b: int) -> Size:
    """``a / b`` rounded up."""
    return (a + b - 1) // b


@dataclass(frozen=True)
class Placement:
    """Rows of a segmented axis on a ``ring x ulysses`` mesh, ring outermost.

    Attributes:
        lengths: global rows of each segment, in order, each at least 1.
        ring: size of the mesh's ring dim.
        ulysses: size of the mesh's ulysses dim.
        zigzag: give ring rank ``i`` the chunks ``i`` and ``2 * ring - 1 - i`` of ``2 * ring`` equal ones, which
            balances causal attention, in place of one contiguous chunk.
    """

    lengths: tuple[Size, ...]
    ring: int
    ulysses: int
    zigzag: bool = False

    @property
    def degree(self) -> int:
        """Number of ranks."""
        return self.ring * self.ulysses

    @property
    def total(self) -> Size:
        """Global rows, all segments together."""
        return sum(self.lengths)

    @property
    def chunks(self) -> tuple[Size, ...]:
        """Rows of each segment on every rank, padding included."""
        if self.zigzag:
            return tuple(2 * ceildiv(n, 2 * self.degree) for n in self.lengths)
        return tuple(ceildiv(n, self.degree) for n in self.lengths)

    @property
    def local(self) -> Size:
        """Rows on every rank, all segments together."""
        return sum(self.chunks)

    @property
    def padded(self) -> bool:
        """Whether any rank may hold a padded row (always assumed of lengths that are not known)."""
        return any(not isinstance(n, int) or n != c * self.degree for n, c in zip(self.lengths, self.chunks))

    def positions(self, segment: int, ring_rank: int, device: torch.device | str) -> Tensor:
        """Rows of one segment, counted from its start, held by all ulysses ranks of one ring rank together.

        Returns:
            int64 ``[ulysses * chunks[segment]]``, increasing. A position that is not below the segment's length is a
            padded row.
        """
        rows = self.ulysses * self.chunks[segment]
        if not self.zigzag:
            return torch.arange(cast(int, rows), device=device) + cast(int, ring_rank * rows)
        half = rows // 2
        offset = torch.arange(cast(int, half), device=device)
        starts = ring_rank * half, (2 * self.ring - 1 - ring_rank) * half
        return torch.cat([offset + start for start in starts])

    def rows(self, rank: int, device: torch.device | str) -> Tensor:
        """Global row of every local row of ``rank`` (``ring_rank * ulysses + ulysses_rank``): int64 ``[local]``."""
        return self._local(rank, device)[0]

    def valid(self, rank: int, device: torch.device | str) -> Tensor:
        """Which local rows of ``rank`` are not padding: bool ``[local]``."""
        return self._local(rank, device)[1]

    def _local(self, rank: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        rows: list[Tensor] = []
        valid: list[Tensor] = []
        start: Size = 0
        for s, (n, c) in enumerate(zip(self.lengths, self.chunks)):
            position = self.positions(s, rank // self.ulysses, device).narrow(0, rank % self.ulysses * c, c)
            rows.append(position.clamp(max=cast(int, n - 1)) + cast(int, start))
            valid.append(position < cast(int, n))
            start = start + n
        return torch.cat(rows), torch.cat(valid)

    def ring_rows(self, ring_rank: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """The rows that one ring rank's ulysses ranks hold together, ordered segment by segment.

        Returns:
            int64 ``[ulysses * local]`` global rows, clamped to the segment, and bool of the same shape: not padding.
        """
        rows: list[Tensor] = []
        valid: list[Tensor] = []
        start: Size = 0
        for s, n in enumerate(self.lengths):
            position = self.positions(s, ring_rank, device)
            rows.append(position.clamp(max=cast(int, n - 1)) + cast(int, start))
            valid.append(position < cast(int, n))
            start = start + n
        return torch.cat(rows), torch.cat(valid)

    def merge(self, blocks: Tensor, dim: int) -> Tensor:
        """All ranks' rows in global order, padding dropped.

        Args:
            blocks: ``[..., degree, local, ...]``, the ranks at ``dim``.
            dim: not negative.

        Returns:
            ``[..., total, ...]``.
        """
        out: list[Tensor] = []
        start: Size = 0
        for n, c in zip(self.lengths, self.chunks):
            piece = blocks.narrow(dim + 1, start, c)
            start = start + c
            if self.zigzag:
                half = self.ulysses * c // 2
                piece = piece.flatten(dim, dim + 1).unflatten(dim, (self.ring, 2, half))
                piece = torch.cat([piece.select(dim + 1, 0), piece.select(dim + 1, 1).flip(dim)], dim)
            piece = piece.flatten(dim, dim + 1)
            if not (isinstance(n, int) and isinstance(c, int)):
                # By index: a view's strides would depend on whether the last row is padding, and so become a guard.
                piece = piece.index_select(dim, torch.arange(cast(int, n), device=piece.device))
            elif not _same(piece.shape[dim], n):
                piece = piece.narrow(dim, 0, n)
            out.append(piece)
        return out[0] if len(out) == 1 else torch.cat(out, dim)

    def split(self, x: Tensor, dim: int) -> Tensor:
        """Inverse of :meth:`merge`: rows in global order to every rank's rows, padded by each segment's last row.

        Args:
            x: ``[..., total, ...]``.
            dim: not negative.

        Returns:
            ``[..., degree, local, ...]``.
        """
        out: list[Tensor] = []
        start: Size = 0
        for n, c in zip(self.lengths, self.chunks):
            piece = x.narrow(dim, start, n)
            start = start + n
            if not (isinstance(n, int) and isinstance(c, int)):
                # By index: the number of padded rows may be 0, which a concatenation would turn into a guard.
                piece = piece.index_select(dim, _upto(c * self.degree, n - 1, x.device))
            elif not _same(n, c * self.degree):
                last = piece.narrow(dim, n - 1, 1)
                shape: list[Size] = list(last.shape)
                shape[dim] = c * self.degree - n
                piece = torch.cat([piece, last.expand(shape)], dim)
            if self.zigzag:
                half = self.ulysses * c // 2
                piece = piece.unflatten(dim, (2, self.ring, half))
                piece = torch.stack([piece.select(dim, 0), piece.select(dim, 1).flip(dim)], dim + 1)
                piece = piece.flatten(dim, dim + 2)
            out.append(piece.unflatten(dim, (self.degree, c)))
        return out[0] if len(out) == 1 else torch.cat(out, dim + 1)

    def of_ulysses(self) -> Placement:
        """How the ulysses ranks of one ring rank share that ring rank's rows, padding of the ring included."""
        return Placement(tuple(self.ulysses * c for c in self.chunks), 1, self.ulysses)


def _upto(rows: Size, last: Size, device: torch.device) -> Tensor:
    """Row numbers from 0, the last one repeated."""
    return torch.arange(cast(int, rows), device=device).clamp(max=cast(int, last))


def _same(a: Size, b: Size) -> bool:
    """Equality that adds no guard: two sizes that are not known to be equal are not."""
    return isinstance(a, int) and isinstance(b, int) and a == b
