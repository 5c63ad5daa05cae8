"""All ranks agree on the collective schedule before the first run, or a clear error within a time limit.

A rank that would run other collectives than its peers leaves them waiting for ever. So each rank describes what it is
about to run (inputs, ops with collectives, their order, groups and sizes), and the ranks compare a hash of that through
the store of the process group: a key-value store that is there already, so nothing new is opened, and text is all that
is read from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from ..errors import ScheduleError
from ..mesh import Mesh
from . import _torch

__all__ = ["describe", "verify"]


def describe(module: fx.GraphModule, example_inputs: Sequence[Any]) -> list[str]:
    """What a local program receives and which collectives it runs, a line each, the same on all ranks if they agree."""
    lines = []
    for node, value in zip(module.graph.find_nodes(op="placeholder"), example_inputs):
        if isinstance(value, torch.Tensor):
            lines.append(f"input {node.name}: {value.dtype} {[str(n) for n in value.shape]}")
        else:
            lines.append(f"input {node.name}: {type(value).__name__}")
    for node in module.graph.nodes:
        target = node.target
        if node.op == "call_function" and getattr(target, "namespace", "") == "cp_compile":
            # Rank and group names are each rank's own.
            own = {"mesh", "groups", "group"}
            args = {a.name: value for a, value in zip(target._schema.arguments, node.args) if a.name not in own}
            lines.append(f"{target._schema.name}({', '.join(f'{k}={v}' for k, v in args.items())})")
    return lines


def verify(lines: Sequence[str], mesh: Mesh, timeout: float) -> None:
    """Compare a schedule with the other ranks'.

    Args:
        lines: what :func:`describe` gave.
        mesh: the ranks that must agree.
        timeout: seconds to wait for the slowest rank.

    Raises:
        ScheduleError: a rank has another schedule, or did not arrive in time.
    """
    if mesh.degree == 1 or dist.get_backend() == "fake":
        return
    text = "\n".join(lines)
    digest = hashlib.sha256(text.encode()).hexdigest()
    me = mesh.ranks[mesh.rank]
    shared = dist.PrefixStore(f"cp_compile/{'-'.join(map(str, mesh.ranks))}", _torch._get_default_store())
    # Each rank counts its own compilations, over all backends, in the store: the count lives as long as the group does.
    number = shared.add(f"compiled/{me}", 1)
    store = dist.PrefixStore(f"{number}", shared)
    store.set(f"text/{me}", text)
    store.set(f"hash/{me}", digest)
    missing = _missing(store, mesh, timeout)
    if missing:
        raise ScheduleError(
            f"cp_compile: rank {me} compiled graph {number} ({len(lines)} lines of schedule) and waited {timeout:g} s; "
            f"rank{'s' if len(missing) > 1 else ''} {_listed(missing)} did not compile it. Either they failed before "
            "(look at their output), or only some ranks had to recompile: their inputs differ in shape, dtype or in a "
            "Python value that Dynamo guards on. Give all ranks the same inputs."
        )
    hashes = {rank: store.get(f"hash/{rank}").decode() for rank in mesh.ranks}
    others = [rank for rank in mesh.ranks if hashes[rank] != digest]
    if others:
        theirs = store.get(f"text/{others[0]}").decode().split("\n")
        raise ScheduleError(
            f"cp_compile: rank {me} and rank{'s' if len(others) > 1 else ''} {_listed(others)} compiled different "
            f"programs for graph {number}, and would wait for each other for ever.\n"
            f"{_difference(lines, theirs, me, others[0])}\n"
            "Give all ranks the same model and inputs of the same shapes."
        )


def _missing(store: dist.Store, mesh: Mesh, timeout: float) -> list[int]:
    keys = {rank: f"hash/{rank}" for rank in mesh.ranks}
    try:
        store.wait(list(keys.values()), timedelta(seconds=timeout))
    except (RuntimeError, ValueError):
        return [rank for rank, key in keys.items() if not store.check([key])]
    return []


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _difference(mine: Sequence[str], theirs: Sequence[str], me: int, other: int) -> str:
    for i in range(max(len(mine), len(theirs))):
        a = mine[i] if i < len(mine) else "nothing more"
        b = theirs[i] if i < len(theirs) else "nothing more"
        if a != b:
            return f"  first difference, rank {me}: {a}\n  first difference, rank {other}: {b}"
    return ""
