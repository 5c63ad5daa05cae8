"""Ranks as threads of one process: collectives without process groups, for tests.

Each rank runs in a thread of its own, under a dispatch mode that answers the ``_c10d_functional`` ops by exchanging
tensors with the other threads. No ``torch.distributed`` is initialised, so a draw of a property test costs
milliseconds, and ranks that disagree about a collective give an error that names both sides, not a hang.

    results = emulate(ring=2, ulysses=2, fn=lambda mesh: ...)
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed._functional_collectives
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cp_compile.mesh import Mesh

__all__ = ["CollectiveError", "Stats", "emulate", "meshes", "stats"]

T = TypeVar("T")


class CollectiveError(AssertionError):
    """Ranks that do not agree on a collective, or a result used before it was waited for."""


@dataclass
class Stats:
    """What one rank communicated: collectives started, and elements that left this rank for another one."""

    calls: list[str] = field(default_factory=list)
    elements: int = 0
    dtypes: set[torch.dtype] = field(default_factory=set)

    @property
    def collectives(self) -> int:
        return len(self.calls)


def meshes(ring: int, ulysses: int) -> list[Mesh]:
    """Every rank's view of one mesh whose groups exist only by name."""
    degree = ring * ulysses
    return [
        Mesh(
            ring=ring,
            ulysses=ulysses,
            rank=rank,
            group="all",
            ring_group=f"ring@{rank % ulysses}",
            ulysses_group=f"ulysses@{rank // ulysses}",
            ranks=tuple(range(degree)),
        )
        for rank in range(degree)
    ]


_stats: contextvars.ContextVar[Stats] = contextvars.ContextVar("stats")


def stats() -> Stats:
    """Counts of the emulated rank that calls this; a mark can be taken by copying and subtracting."""
    return _stats.get()


class _Group:
    """One named group: a meeting point for its ranks."""

    def __init__(self, members: list[int], timeout: float) -> None:
        self.members = members
        self.timeout = timeout
        self.barrier = threading.Barrier(len(members))
        self.slots: list[Any] = [None] * len(members)

    def meet(self, place: int, what: str, value: Any) -> list[Any]:
        self.slots[place] = (what, value)
        self._wait(what, place)
        slots = list(self.slots)
        self._wait(what, place)  # nobody overwrites a slot before all have read it
        if any(w != what for w, _ in slots):
            raise CollectiveError(
                "ranks call different collectives: "
                + "; ".join(f"rank {m}: {w}" for m, (w, _) in zip(self.members, slots))
            )
        return [v for _, v in slots]

    def _wait(self, what: str, place: int) -> None:
        try:
            self.barrier.wait(self.timeout)
        except threading.BrokenBarrierError:
            raise CollectiveError(f"rank {self.members[place]} waited in vain in {what}") from None


class _Rank(TorchDispatchMode):
    """Answers one rank's collectives."""

    def __init__(self, rank: int, groups: dict[str, _Group], counts: Stats) -> None:
        super().__init__()
        self.rank, self.groups, self.counts = rank, groups, counts
        self.pending: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "_c10d_functional":
            for x in pytree.tree_leaves((args, kwargs)):
                if isinstance(x, Tensor) and self.pending and x.untyped_storage()._cdata in self.pending:
                    raise CollectiveError(f"rank {self.rank}: {func} uses a result that was not waited for")
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if name == "wait_tensor":
            self.pending.pop(args[0].untyped_storage()._cdata, None)
            return args[0]
        out = getattr(self, name)(*args, **kwargs)
        self.counts.calls.append(name)
        self.counts.dtypes.add(out.dtype)
        self.pending[out.untyped_storage()._cdata] = out
        return out

    def _meet(self, group_name: str, what: str, x: Tensor, *extra: Any) -> tuple[int, list[Any]]:
        group = self.groups[group_name]
        place = group.members.index(self.rank)
        if not x.is_contiguous():
            raise CollectiveError(f"rank {self.rank}: {what} of a tensor that is not contiguous")
        what = f"{what} of {x.dtype} {tuple(x.shape)} in {group_name}"
        return place, group.meet(place, what, (x.detach(), *extra))

    def all_to_all_single(self, x: Tensor, received: list[int], sent: list[int], group_name: str) -> Tensor:
        place, values = self._meet(group_name, "all_to_all_single", x, list(sent))
        if sum(sent) != x.shape[0]:
            raise CollectiveError(f"rank {self.rank}: splits {sent} of {x.shape[0]} rows")
        pieces = [y.split(splits)[place] for y, splits in values]
        if [p.shape[0] for p in pieces] != list(received):
            raise CollectiveError(
                f"rank {self.rank}: all_to_all_single expects {received} rows, is sent {[p.shape[0] for p in pieces]}"
            )
        self.counts.elements += x.numel() - x.split(sent)[place].numel()
        return torch.cat(pieces)

    def all_gather_into_tensor(self, x: Tensor, size: int, group_name: str) -> Tensor:
        _, values = self._meet(group_name, f"all_gather_into_tensor({size})", x)
        self.counts.elements += x.numel() * (size - 1)
        return torch.cat([y for (y,) in values])

    def reduce_scatter_tensor(self, x: Tensor, op: str, size: int, group_name: str) -> Tensor:
        place, values = self._meet(group_name, f"reduce_scatter_tensor({op}, {size})", x)
        self.counts.elements += x.numel() // size * (size - 1)
        return torch.stack([y.chunk(size)[place] for (y,) in values]).sum(0)

    def all_reduce(self, x: Tensor, op: str, group_name: str) -> Tensor:
        _, values = self._meet(group_name, f"all_reduce({op})", x)
        size = len(values)
        self.counts.elements += 2 * x.numel() * (size - 1) // size
        return torch.stack([y for (y,) in values]).sum(0)


def emulate(ring: int, ulysses: int, fn: Callable[[Mesh], T], timeout: float = 120.0) -> list[T]:
    """Runs ``fn(mesh)`` on every rank of a mesh at once and returns the results in rank order.

    The first error of any rank is raised here; ranks that wait for it are released. Backward may be called in ``fn``:
    autograd on CPU runs it in the calling thread.
    """
    views = meshes(ring, ulysses)
    names = {n for v in views for n in (v.group, v.ring_group, v.ulysses_group)}
    groups = {
        n: _Group([v.rank for v in views if n in (v.group, v.ring_group, v.ulysses_group)], timeout) for n in names
    }
    results: list[Any] = [None] * len(views)
    errors: list[tuple[bool, int, BaseException]] = []

    def run(mesh: Mesh) -> None:
        counts = Stats()
        _stats.set(counts)
        try:
            with _Rank(mesh.rank, groups, counts):
                results[mesh.rank] = fn(mesh)
        except BaseException as e:
            vain = isinstance(e, CollectiveError) and "in vain" in str(e)  # a consequence, seldom the cause
            errors.append((vain, mesh.rank, e))
            for g in groups.values():
                g.barrier.abort()

    threads = [threading.Thread(target=run, args=(v,), daemon=True) for v in views]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise min(errors, key=lambda e: e[:2])[2]
    return results
