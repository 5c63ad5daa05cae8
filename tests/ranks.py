"""Real gloo ranks for tests, kept alive from one test to the next.

    def test_ranks_agree(ranks):
        assert ranks(2).run(my_module_level_function, 7) == [...]

All pools share one set of workers: ``ranks(2)`` uses the first two of the four that ``ranks(4)`` uses, so the memory is
that of the largest world ever asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cp_compile.local_ranks import LocalRanks, RankError

__all__ = ["Pool", "RankError", "Ranks"]


class Pool:
    """``world`` ranks of one machine.

    Args:
        world: how many.
        workers: whose processes to use; its own when left out, and then :meth:`close` ends them.
    """

    def __init__(self, world: int, workers: LocalRanks | None = None) -> None:
        self.world = world
        self.workers = workers or LocalRanks(imports=["diffusers"])

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Calls a module-level function on every rank and returns what each returned; see :class:`LocalRanks`."""
        return self.workers.run(self.world, fn, *args, timeout=timeout)

    def close(self) -> None:
        """Ends the processes, those of other pools with the same workers too."""
        self.workers.close()


class Ranks:
    """Pools by world size, over one set of workers."""

    def __init__(self) -> None:
        self.workers = LocalRanks(imports=["diffusers"])

    def __call__(self, world: int) -> Pool:
        return Pool(world, self.workers)

    def close(self) -> None:
        """Ends all workers."""
        self.workers.close()
