"""A rank that fails, dies, hangs or differs: every other rank ends with one clear error, in time, and can try again.

Each test injects a fault on real gloo ranks. The seconds that docs/reliability.md gives are those of these tests, which
print them with ``-rP``.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import cp_compile.backend
from cp_compile import cp_backend
from cp_compile.local_ranks import LocalRanks
from cp_compile.passes import verify
from tests.faults import attempt, mesh_of_seconds
from tests.ranks import Pool, RankError
from tests.test_backend import Block

pytestmark = pytest.mark.ranks

Outcome = tuple[str, float]


@pytest.fixture(scope="module")
def mortal() -> Iterator[Pool]:
    """Three workers of this module alone, without diffusers: its tests end them on purpose."""
    pool = Pool(3, LocalRanks())
    yield pool
    pool.close()


def _input() -> torch.Tensor:
    return torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(0))


def _compiled(block: Block, inner: Any = "aot_eager", **options: Any) -> Any:
    torch._dynamo.reset()
    backend = cp_backend(ulysses=dist.get_world_size(), inner=inner, **options)
    return torch.no_grad()(torch.compile(block, backend=backend, dynamic=False))


def _as_before(block: Block, model: Any) -> bool:
    """The compiled model gives the answer of the unmodified one, whose weights are those of the seed."""
    torch.manual_seed(0)
    fresh, x = Block(), _input()
    same = all(torch.equal(a, b) for a, b in zip(fresh.parameters(), block.parameters()))
    return same and torch.allclose(model(x), fresh(x), atol=1e-6)


def _block() -> Block:
    torch.manual_seed(0)
    return Block()


class _Faulty:
    """A compiler under AOTAutograd that calls ``fault`` on one rank: while it compiles, or in the middle of a step."""

    def __init__(self, rank: int, fault: Callable[[], None], *, step: bool) -> None:
        self.here = dist.get_rank() == rank
        self.fault, self.step = fault, step

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        if self.here and not self.step:
            self.fault()

        class Steps(torch.fx.Interpreter):
            def run_node(_, node: torch.fx.Node) -> Any:
                if self.here and self.step and "all_gather" in str(node.target):
                    self.fault()
                return super().run_node(node)

        return lambda *args: Steps(gm).run(*args)


class _Once:
    """Raises the second time that it is called."""

    calls = 0

    def __init__(self, which: int) -> None:
        self.which = which

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.which:
            raise ValueError("out of luck")


# While compiling


def test_a_rank_that_fails_to_compile_is_named_at_once_and_a_second_try_works(ranks):
    outcomes = ranks(3).run(_fails_to_compile)
    for rank, (text, seconds, again) in enumerate(outcomes):
        assert again and seconds < 20
        assert "ValueError: out of luck" in text
        assert text.startswith("ValueError" if rank == 1 else "PeerError: cp_compile: rank 1 failed while compiling")
    _show(o[1] for o in outcomes)


def _fails_to_compile() -> tuple[str, float, bool]:
    block = _block()
    model = _compiled(block, _Faulty(1, _Once(1), step=False))
    text, _, seconds = attempt(model, _input())
    return text, seconds, _as_before(block, model)


def test_a_rank_whose_passes_fail_is_named_at_once_and_a_second_try_works(ranks):
    for rank, (text, again) in enumerate(ranks(2).run(_fails_in_a_pass)):
        assert again and "ValueError: out of luck" in text
        assert rank == 1 or text.startswith("PeerError: cp_compile: rank 1 failed while compiling graph 0")


def _fails_in_a_pass() -> tuple[str, bool]:
    block = _block()
    model = _compiled(block)
    with _pass_fails_on(1):
        text, _, _ = attempt(model, _input())
    return text, _as_before(block, model)


def _pass_fails_on(rank: int) -> Any:
    fails = mock.Mock(side_effect=ValueError("out of luck"))
    return mock.patch.object(
        cp_compile.backend, "find_axes", fails if dist.get_rank() == rank else cp_compile.backend.find_axes
    )


def test_a_rank_that_is_killed_while_it_compiles_is_named_within_the_timeout(mortal: Pool, tmp_path: Path):
    told = _survivors(mortal, tmp_path, _killed_while_compiling)
    assert sorted(told) == [0, 2]
    for text, seconds in told.values():
        assert text.startswith("ScheduleError") and "rank 1 did not finish compiling" in text and "look at" in text
        assert 1.9 < seconds < 20


def _killed_while_compiling(folder: str) -> None:
    model = _compiled(_block(), _Faulty(1, _kill, step=False), timeout=2.0)
    _leave(folder, attempt(model, _input()))


def test_a_rank_that_compiles_for_longer_than_the_timeout_is_waited_for(ranks):
    for text, seconds in ranks(2).run(_slow):
        assert text == "" and seconds > 4


def _slow() -> Outcome:
    model = _compiled(_block(), _Faulty(1, lambda: time.sleep(4), step=False), timeout=1.5)
    text, _, seconds = attempt(model, _input())
    return text, seconds


def test_a_rank_that_never_compiles_is_named_within_the_timeout_and_may_come_later(ranks):
    outcomes = ranks(2).run(_absent)
    for text, _, again in outcomes:
        assert text.startswith("ScheduleError") and "waited 2 s" in text and "rank 1 did not start to compile" in text
        assert again
    assert outcomes[0][1] < 20
    _show(o[1] for o in outcomes[:1])


def _absent() -> tuple[str, float, bool]:
    block = _block()
    model = _compiled(block, timeout=2.0)
    if dist.get_rank() == 1:
        time.sleep(4)
    text, _, seconds = attempt(model, _input())
    return text, seconds, _as_before(block, model)


def test_a_rank_that_recompiles_alone_is_told_so_and_the_others_when_their_collective_ends(ranks):
    outcomes = ranks(2).run(_recompiles_alone)
    (waiting, waited), (alone, seconds) = outcomes
    assert alone.startswith("ScheduleError") and "rank 0 did not compile the same graph" in alone
    assert "shape, dtype or in a Python value" in alone
    assert waiting.startswith("PeerError") and "rank 0 did not compile the same graph" in waiting
    assert seconds < 20 and waited < 20
    _show([waited, seconds])


def _recompiles_alone() -> Outcome:
    model = _compiled(_block(), mesh=mesh_of_seconds(4), timeout=1.0)
    model(_input())
    x = _input() if dist.get_rank() == 0 else _input()[:, :4]
    text, _, seconds = attempt(model, x)
    return text, seconds


@pytest.mark.parametrize("what", ["cp_compile", "torch"])
def test_another_version_on_a_rank_is_told_by_all_ranks_and_a_second_try_works(ranks, what: str):
    for text, seconds, again in ranks(3).run(_other_version, what):
        assert text.startswith("ScheduleError") and f"{what}: " in text and "9.9" in text and "on rank 2" in text
        assert "Install the same versions" in text and seconds < 20 and again


def _other_version(what: str) -> tuple[str, float, bool]:
    block = _block()
    model = _compiled(block)
    place = (verify, "__version__") if what == "cp_compile" else (torch, "__version__")
    with mock.patch.object(*place, "9.9" if dist.get_rank() == 2 else getattr(*place)):
        text, _, seconds = attempt(model, _input())
    return text, seconds, _as_before(block, model)


def test_other_arguments_on_a_rank_are_told_before_a_group_is_made(ranks):
    for text, seconds in ranks(2).run(_other_arguments):
        assert text.startswith("ScheduleError") and "ulysses: 2 on rank 0; 1 on rank 1" in text and seconds < 20


def _other_arguments() -> Outcome:
    torch._dynamo.reset()
    degree = "ring" if dist.get_rank() else "ulysses"
    text, _, seconds = attempt(torch.compile(Block(), backend=cp_backend(**{degree: 2}, inner="aot_eager")), _input())
    return text, seconds


def test_a_world_of_another_size_is_refused_on_every_rank(ranks):
    for text, seconds in ranks(3).run(_other_world):
        assert text.startswith("MeshError") and "ulysses=2" in text and "3 ranks" in text and seconds < 20


def _other_world() -> Outcome:
    torch._dynamo.reset()
    text, _, seconds = attempt(torch.compile(Block(), backend=cp_backend(ulysses=2, inner="aot_eager")), _input())
    return text, seconds


def test_a_rank_that_never_starts_ends_the_others_in_torchs_own_rendezvous():
    script = (
        "import datetime, torch.distributed as dist\n"
        "store = dist.TCPStore('127.0.0.1', 0, 2, True, datetime.timedelta(seconds=2), wait_for_workers=False)\n"
        "dist.init_process_group('gloo', store=store, rank=0, world_size=2, timeout=datetime.timedelta(seconds=2))\n"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (done.returncode and "DistStoreError" in done.stderr) or "imed out" in done.stderr, done.stderr
    _show([time.monotonic() - start])


# While running


def test_a_rank_that_fails_in_a_step_is_named_to_those_that_wait_for_it(ranks):
    outcomes = ranks(2).run(_fails_in_a_step)
    assert outcomes[1][0].startswith("ValueError: out of luck")
    assert outcomes[0][0].startswith("PeerError: cp_compile: rank 1 failed while running a compiled graph")
    assert "ValueError: out of luck" in outcomes[0][0]
    assert all(o[1] < 20 for o in outcomes)
    _show(o[1] for o in outcomes)


def _fails_in_a_step() -> Outcome:
    model = _compiled(_block(), _Faulty(1, _Once(2), step=True), mesh=mesh_of_seconds(3))
    model(_input())
    text, _, seconds = attempt(model, _input())
    return text, seconds


def test_ranks_that_all_fail_in_a_step_keep_their_own_error_and_can_try_again(ranks):
    for text, again in ranks(2).run(_all_fail_in_a_step):
        assert text.startswith("ValueError: out of luck") and again


def _all_fail_in_a_step() -> tuple[str, bool]:
    block = _block()
    model = _compiled(block, _Faulty(dist.get_rank(), _Once(2), step=True))
    model(_input())
    text, _, _ = attempt(model, _input())
    return text, _as_before(block, model)


def test_a_rank_that_tries_again_alone_does_not_meet_a_collective_of_the_last_try(ranks):
    outcomes = ranks(2).run(_tries_again_alone)
    assert outcomes[1][0].startswith("ValueError: out of luck")
    assert outcomes[1][1].startswith("ScheduleError") and "rank 0 did not try again after a failure" in outcomes[1][1]
    assert outcomes[0][0].startswith("PeerError")


def _tries_again_alone() -> tuple[str, str]:
    model = _compiled(_block(), _Faulty(1, _Once(2), step=True), mesh=mesh_of_seconds(5), timeout=1.0)
    model(_input())
    text, _, _ = attempt(model, _input())
    return text, attempt(model, _input())[0] if dist.get_rank() else ""


def test_a_rank_that_is_killed_in_a_step_is_named_by_all_that_are_left(mortal: Pool, tmp_path: Path):
    told = _survivors(mortal, tmp_path, _killed_in_a_step)
    assert sorted(told) == [0, 2]
    for text, seconds in told.values():
        assert text.startswith("PeerError") and "a collective failed" in text and "rank 1 left no word" in text
        assert "start all ranks anew" in text and seconds < 20


def _killed_in_a_step(folder: str) -> None:
    model = _compiled(_block(), _Faulty(1, _kill, step=True))
    _leave(folder, attempt(model, _input()))


def test_a_collective_that_times_out_names_the_rank_that_is_busy_elsewhere(ranks):
    (text, seconds), _ = ranks(2).run(_times_out)
    assert text.startswith("PeerError") and "rank 1 left no word" in text and "imed out" in text
    assert 2 < seconds < 20
    _show([seconds])


def _times_out() -> Outcome:
    model = _compiled(_block(), _Faulty(1, lambda: time.sleep(7), step=True), mesh=mesh_of_seconds(2))
    text, _, seconds = attempt(model, _input())
    return text, seconds


def test_ctrl_c_ends_every_rank_and_leaves_the_model_usable(mortal: Pool):
    pool = Pool(2, mortal.workers)
    pool.workers.start(2)
    pids = pool.workers.pids[:2]
    presses = threading.Timer(6.0, lambda: [os.kill(pid, signal.SIGINT) for pid in pids if pid])
    presses.start()
    outcomes = pool.run(_interrupted)
    presses.join()
    assert any(text == "KeyboardInterrupt" for text, _, _ in outcomes)
    for text, seconds, usable in outcomes:
        assert text == "KeyboardInterrupt" or (text.startswith("PeerError") and "KeyboardInterrupt" in text)
        assert usable and seconds < 20
    _show(o[1] for o in outcomes)


def _interrupted() -> tuple[str, float, bool]:
    pressed: list[float] = []

    def interrupt(*_: Any) -> None:
        pressed.append(time.monotonic())
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    block = _block()
    try:
        model = _compiled(block, mesh=mesh_of_seconds(3))
        for _ in range(1_000_000):
            model(_input())
        text = "never interrupted"
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        seconds = time.monotonic() - (pressed or [time.monotonic()])[0]
    finally:
        signal.signal(signal.SIGINT, before)
    torch.manual_seed(0)
    return text, seconds, torch.equal(block(_input()), Block()(_input()))


# When a graph cannot be compiled


def test_a_graph_that_a_rank_cannot_compile_runs_whole_on_all_ranks_if_asked(ranks):
    for text, same, warned, note in ranks(2).run(_replicated):
        assert text == "" and same
        for said in (warned, note):
            assert "every rank runs all of it" in said and "rank 1: ValueError: out of luck" in said


def _replicated() -> tuple[str, bool, str, str]:
    torch._dynamo.reset()
    block, x = _block(), _input()
    backend = cp_backend(ulysses=2, inner="aot_eager", fallback="replicate")
    with _pass_fails_on(1), warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        text, out, _ = attempt(torch.compile(block, backend=backend), x)
    warned = " ".join(str(w.message) for w in caught if "cp_compile" in str(w.message))
    return text, torch.equal(out, block(x)), warned, backend.report.graphs[0].note


# Inductor's cache directory


@pytest.mark.inductor
@pytest.mark.parametrize("fault", ["read-only", "full"])
def test_a_rank_that_cannot_write_its_cache_is_named_and_a_second_try_works(ranks, tmp_path: Path, fault: str):
    outcomes = ranks(2).run(_bad_cache, str(tmp_path), fault)
    for rank, (text, seconds, again) in enumerate(outcomes):
        assert again and seconds < 60
        assert rank == 1 or text.startswith("PeerError: cp_compile: rank 1 failed while compiling graph 0")
        assert "Error" in text
    _show(o[1] for o in outcomes)


def _bad_cache(folder: str, fault: str) -> tuple[str, float, bool]:
    block = _block()
    model = _compiled(block, "inductor")
    rank = dist.get_rank()
    place = f"{folder}/{rank}"
    if rank == 1 and fault == "read-only":
        place = "/proc/cache"  # where nobody can write, root included
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with _cache_in(place):
        if rank == 1 and fault == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        try:
            text, _, seconds = attempt(model, _input())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with _cache_in(f"{folder}/{rank}"):
        return text, seconds, _as_before(block, model)


@pytest.mark.inductor
def test_a_corrupted_cache_is_not_believed(ranks, tmp_path: Path):
    for answers in ranks(2).run(_corrupted_cache, str(tmp_path)):
        assert answers


def _corrupted_cache(folder: str) -> bool:
    with _cache_in(f"{folder}/{dist.get_rank()}") as place:
        block = _block()
        assert _as_before(block, _compiled(block, "inductor"))
        files = [path for path in place.rglob("*") if path.is_file()]
        assert files
        for path in files:
            path.unlink()  # a library may be loaded, and must not change under the feet of its users
            path.write_bytes(b"\x13garbage" * 9)
        return _as_before(block, _compiled(block, "inductor"))


class _cache_in:
    """Inductor's caches in a folder of this rank alone."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __enter__(self) -> Path:
        names = {"TORCHINDUCTOR_CACHE_DIR": self.place, "TRITON_CACHE_DIR": f"{self.place}/triton"}
        self.patch = mock.patch.dict(os.environ, names)
        self.patch.start()
        for name, cache in vars(torch._inductor.codecache).items():
            if name.endswith("CodeCache") and hasattr(cache, "cache_clear"):
                cache.cache_clear()  # what a process that starts now would not have
        return Path(self.place)

    def __exit__(self, *_: object) -> None:
        self.patch.stop()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _survivors(pool: Pool, folder: Path, fn: Callable[[str], None]) -> dict[int, Outcome]:
    """What the ranks that outlived rank 1 had to say, from the files that they left."""
    with pytest.raises(RankError, match=r"rank 1: died \(SIGKILL\)"):
        pool.run(fn, str(folder))
    told = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}
    _show(seconds for _, seconds in told.values())
    return {rank: (text, seconds) for rank, (text, seconds) in told.items()}


def _leave(folder: str, outcome: tuple[str, Any, float]) -> None:
    text, _, seconds = outcome
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps([text, seconds]))


def _show(seconds: Any) -> None:
    print("ended after", ", ".join(f"{s:.1f} s" for s in seconds))
