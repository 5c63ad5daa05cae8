"""Ranks on this machine: worker processes that run one function together, in one gloo group.

The demo and the tests use them. Starting a rank means importing torch, which takes seconds, so workers stay alive from
one :meth:`LocalRanks.run` to the next. A run begins with a fresh process group and ends with Dynamo forgotten, so that
nothing of one run is seen by another.

A rank that raises, dies or hangs ends the run with a :class:`RankError` within the time limit. Its peers may then be
stuck in a collective that nobody will finish, so all workers are ended; the next run starts new ones.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing as mp
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist

from cp_compile.errors import CPError

__all__ = ["LOOPBACK", "LocalRanks", "RankError"]

_HOST = "127.0.0.1"
# The network interface that gloo is to use, so that no host name has to be looked up.
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

# How long the others may go on after one rank failed: long enough to say that they failed too, and of what.
_GRACE_S = 3.0

# How long a worker has to end by itself once its pipe is closed.
_END_S = 3.0

# Importing torch and diffusers in several processes at once on a busy machine.
_START_S = 300.0


class RankError(CPError):
    """At least one rank did not finish; the message names each and says why, with the traceback."""


@dataclass(frozen=True)
class _Task:
    rank: int
    world: int
    run: int
    timeout: float
    call: bytes


@dataclass
class _Worker:
    process: SpawnProcess
    conn: Connection
    log: Path

    def stop(self) -> None:
        self.conn.close()  # an idle worker ends by itself
        self.process.join(_END_S)
        self.process.kill()
        self.process.join()
        self.log.unlink(missing_ok=True)

    def stacks(self) -> str:
        """What the worker is doing now, or was doing when it crashed."""
        if self.process.is_alive():
            before = self.log.stat().st_size
            os.kill(self.process.pid or 0, signal.SIGUSR1)
            for _ in range(20):
                time.sleep(0.05)
                if self.log.stat().st_size > before:
                    break
        return self.log.read_text(errors="replace").strip()


class LocalRanks:
    """Worker processes, started when a run needs them, at most as many as the largest run.

    Args:
        imports: modules that every worker imports before it is ready.
    """

    def __init__(self, imports: Sequence[str] = ()) -> None:
        self._imports = tuple(imports)
        self._workers: list[_Worker] = []
        self._store: dist.TCPStore | None = None
        self._runs = 0

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int | None]:
        """Process ids of the workers that are alive now."""
        return [w.process.pid for w in self._workers]

    def close(self) -> None:
        """Ends all workers."""
        for worker in self._workers:
            worker.conn.close()  # all at once, so that they end side by side
        for worker in self._workers:
            worker.stop()
        self._workers = []

    def run(self, world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Calls ``fn(*args)`` on ranks ``0..world-1``, the default process group being theirs.

        Args:
            world: number of ranks.
            fn: a function of a module, which each worker imports by name.
            args: anything that can be pickled.
            timeout: seconds for the call, not counting the start of workers.

        Returns:
            What each rank returned, by rank.

        Raises:
            RankError: a rank raised, died, or did not return in time.
        """
        call = pickle.dumps((fn, args))
        self.start(world)
        self._runs += 1
        for rank, worker in enumerate(self._workers[:world]):
            worker.conn.send_bytes(pickle.dumps(_Task(rank, world, self._runs, timeout, call)))
        results, failures = self._collect(world, timeout)
        if failures:
            self.close()
            name = getattr(fn, "__qualname__", repr(fn))
            raise RankError(f"cp_compile: {name} did not finish on all {world} ranks\n{_told(failures)}")
        for worker in self._workers[:world]:
            worker.conn.send_bytes(b"")
        return [results[rank] for rank in range(world)]

    def start(self, world: int) -> None:
        """Makes sure that ``world`` workers are alive and ready."""
        if not all(w.process.is_alive() for w in self._workers):
            self.close()
        if self._store is None:
            # Port 0: the system picks a free one, and nobody can take it in between.
            self._store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        new = range(len(self._workers), world)
        for _ in new:
            self._workers.append(self._spawn(self._store.port))
        for rank in new:
            worker = self._workers[rank]
            if worker.conn in wait([worker.conn, worker.process.sentinel], _START_S):
                with contextlib.suppress(EOFError):
                    worker.conn.recv_bytes()
                    continue
            worker.process.join(1)
            state = "did not start in time" if worker.process.is_alive() else "died at start"
            told = worker.stacks()
            self.close()
            raise RankError(f"cp_compile: the process of rank {rank} {state} (its own output says why)\n{told}".strip())

    def _spawn(self, port: int) -> _Worker:
        context = mp.get_context("spawn")
        parent, child = context.Pipe()
        handle, log = tempfile.mkstemp(prefix="cp_rank_", suffix=".log")
        os.close(handle)
        process = context.Process(target=_serve, args=(child, port, self._imports, log), daemon=True)
        process.start()
        child.close()
        return _Worker(process, parent, Path(log))

    def _collect(self, world: int, timeout: float) -> tuple[dict[int, Any], dict[int, str]]:
        """Results and failures by rank, failures in the order in which they happened."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = dict(enumerate(self._workers[:world]))
        start = time.monotonic()
        deadline = start + timeout
        while waiting:
            watched = [x for w in waiting.values() for x in (w.conn, w.process.sentinel)]
            ready = wait(watched, max(0.0, deadline - time.monotonic()))
            if not ready:
                late = not failures
                for rank, worker in waiting.items():
                    after = f"after {time.monotonic() - start:.0f} s, here:\n"
                    where = after + worker.stacks() if late else "when another rank failed"
                    failures[rank] = f"was still running {where}"
                break
            for rank, worker in list(waiting.items()):
                if worker.conn not in ready and worker.process.sentinel not in ready:
                    continue
                del waiting[rank]
                try:
                    failed, value = pickle.loads(worker.conn.recv_bytes())
                except (EOFError, OSError):
                    failed, value = True, _death(worker)
                if failed:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                else:
                    results[rank] = value
        return results, failures


def _death(worker: _Worker) -> str:
    worker.process.join(5)
    code = worker.process.exitcode
    how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    return f"died ({how})\n{worker.stacks()}".strip()


def _listed(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def _told(failures: dict[int, str]) -> str:
    """Each failure once: ranks that failed alike share one entry."""
    alike: dict[str, list[int]] = {}
    for rank, text in failures.items():
        alike.setdefault(re.sub(r"0x[0-9a-f]+", "0x...", text), []).append(rank)
    return "\n".join(f"--- {_listed(ranks)}: {text}" for text, ranks in alike.items())


def _serve(conn: Connection, port: int, imports: tuple[str, ...], log: str) -> None:
    """A worker's life: import, then run tasks until the parent closes the pipe."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends its workers
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    os.dup2(2, 1)  # stdout is the parent's, for its results
    torch.set_num_threads(1)
    inductor_config.compile_threads = 1  # the ranks already compile side by side
    with open(log, "w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks)
        for name in imports:
            importlib.import_module(name)
        store = dist.TCPStore(_HOST, port, is_master=False)
        conn.send_bytes(b"ready")
        with contextlib.suppress(EOFError):
            while message := conn.recv_bytes():
                conn.send_bytes(_answer(pickle.loads(message), store))
                # The parent sends an empty message once all ranks have answered. Leaving the group before that could
                # break a collective that a slower rank is still finishing.
                conn.recv_bytes()
                _forget()


def _answer(task: _Task, store: dist.Store) -> bytes:
    """``(False, result)`` or ``(True, what went wrong)``, pickled."""
    try:
        prefixed = dist.PrefixStore(f"run{task.run}", store)
        limit = timedelta(seconds=task.timeout)
        dist.init_process_group("gloo", store=prefixed, rank=task.rank, world_size=task.world, timeout=limit)
        torch.manual_seed(0)
        fn, args = pickle.loads(task.call)
        return pickle.dumps((False, fn(*args)))
    except BaseException as error:
        return pickle.dumps((True, "".join(traceback.format_exception(error)).rstrip()))


def _forget() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    torch.set_num_threads(1)
    gc.collect()


def _die_with_parent() -> None:
    """A worker stuck in a collective would outlive a parent that was killed."""
    parent = mp.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
