"""The ranks that share one sequence, as the compiler and the collectives see them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Mesh"]


@dataclass(frozen=True)
class Mesh:
    """One rank's view of a ``ring x ulysses`` mesh, ring outermost.

    Attributes:
        ring: size of the ring dim.
        ulysses: size of the ulysses dim.
        rank: this rank's place in the mesh, ``ring_rank * ulysses + ulysses_rank``.
        group: name of the process group of all ``ring * ulysses`` ranks, in mesh order.
        ring_group: name of the group of the ranks that have this ulysses rank, in ring order.
        ulysses_group: name of the group of the ranks that have this ring rank, in ulysses order.
        ranks: global ranks of the mesh, in mesh order.
    """

    ring: int
    ulysses: int
    rank: int
    group: str
    ring_group: str
    ulysses_group: str
    ranks: tuple[int, ...]

    @property
    def degree(self) -> int:
        """Number of ranks."""
        return self.ring * self.ulysses

    @property
    def ring_rank(self) -> int:
        """This rank's place along the ring dim."""
        return self.rank // self.ulysses

    @property
    def ulysses_rank(self) -> int:
        """This rank's place along the ulysses dim."""
        return self.rank % self.ulysses
