"""The ranks that other tests rely on: they fail clearly, in time, and come back."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from cp_compile.local_ranks import LocalRanks
from tests.ranks import Pool, RankError

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Workers of this module alone, without diffusers: its tests end them on purpose."""
    pool = Pool(2, LocalRanks())
    yield pool
    pool.close()


def _sum(x: int) -> tuple[int, int, int]:
    total = torch.tensor(x + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total)


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("a clear reason")
    dist.barrier()


def _raise() -> None:
    raise ValueError("the same on all")


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def _sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1000)


def _use_store() -> bool:
    store = dist.distributed_c10d._get_default_store()
    seen = store.check(["mark"])
    dist.barrier()
    store.set("mark", "set")
    return seen


def test_every_rank_returns_its_result(pool: Pool) -> None:
    assert pool.run(_sum, 3) == [(0, 2, 7), (1, 2, 7)]


def test_workers_stay_alive_between_runs(pool: Pool) -> None:
    pool.run(_sum, 0)
    before = pool.workers.pids
    assert pool.run(_sum, 1)[0] == (0, 2, 3)
    assert pool.workers.pids == before


def test_a_smaller_and_a_larger_world_share_the_workers(pool: Pool) -> None:
    pool.run(_sum, 0)
    before = pool.workers.pids
    assert Pool(3, pool.workers).run(_sum, 0)[2] == (2, 3, 3)
    assert Pool(1, pool.workers).run(_sum, 5) == [(0, 1, 5)]
    assert pool.workers.pids[:2] == before


def test_a_run_sees_nothing_of_the_last_ones_store(pool: Pool) -> None:
    assert pool.run(_use_store) == [False, False]
    assert pool.run(_use_store) == [False, False]


def test_an_exception_comes_back_with_rank_and_traceback(pool: Pool) -> None:
    with pytest.raises(
        RankError, match=r"(?s)rank 1: Traceback.*_raise_on.*ValueError: a clear reason.*rank 0: was still"
    ):
        pool.run(_raise_on, 1, timeout=60)
    assert pool.run(_sum, 3)[1] == (1, 2, 7)


def test_ranks_that_fail_alike_are_told_once(pool: Pool) -> None:
    with pytest.raises(RankError, match="ranks 0, 1: Traceback") as caught:
        pool.run(_raise)
    assert str(caught.value).count("ValueError: the same on all") == 1


def test_a_rank_that_dies_is_named_and_the_next_run_works(pool: Pool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1: died \(exit code 7\)"):
        pool.run(_die_on, 1, timeout=300)
    assert time.monotonic() - start < 200
    assert pool.run(_sum, 3)[0] == (0, 2, 7)


def test_a_rank_that_hangs_is_ended_in_time_and_shows_where_it_was(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1: was still running after \d+ s.*_sleep_on"):
        pool.run(_sleep_on, 1, timeout=2)
    assert pool.run(_sum, 3)[0] == (0, 2, 7)
