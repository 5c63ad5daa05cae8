"""All ranks agree on a graph before it runs: same setup, same inputs, same collectives, or a clear error in time.

A rank that would run other collectives than its peers leaves them waiting for ever. So each rank says what it is about
to run (inputs, ops with collectives, their order, groups and sizes) at a :class:`~cp_compile.rendezvous.Rendezvous`,
where the last one to arrive compares.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from .. import errors
from .._version import __version__
from ..errors import InputError, ScheduleError
from ..inputs import describe_difference
from ..rendezvous import Rendezvous, listed

__all__ = ["Offer", "describe", "verify", "verify_setup"]


@dataclass(frozen=True)
class Offer:
    """What a rank would run.

    Attributes:
        lines: what :func:`describe` gave.
        values: checksums of its inputs by their labels, if they are to be compared.
        unable: why this rank could not make a program of the graph, or nothing.
    """

    lines: list[str] = field(default_factory=list)
    values: dict[str, int] = field(default_factory=dict)
    unable: str = ""


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


def verify_setup(settings: dict[str, Any], rendezvous: Rendezvous) -> None:
    """Compare versions and settings with the other ranks'.

    Args:
        settings: of the backend, each of which must be the same on all ranks.
        rendezvous: of the ranks that must agree.

    Raises:
        ScheduleError: a rank has another version or setting, or did not arrive in time.
    """
    versions = {"cp_compile": f"{__version__} (sources {_sources()})", "torch": torch.__version__}
    # Where an object lies in memory is each rank's own.
    said = {name: re.sub(r" at 0x[0-9a-f]+", "", str(value)) for name, value in (versions | settings).items()}
    rendezvous.meet("start to compile", json.dumps(said), _judge_setup)


def verify(offer: Offer, rendezvous: Rendezvous) -> str:
    """Compare a program with the other ranks'.

    Args:
        offer: this rank's.
        rendezvous: of the ranks that must agree.

    Returns:
        Nothing; or, if a rank was unable to make a program, which and why. No rank shall then run its own.

    Raises:
        InputError: a rank was given other inputs, or holds other weights.
        ScheduleError: a rank has another schedule, or did not arrive in time.
        PeerError: a rank failed.
    """
    return rendezvous.meet("compile the same graph", json.dumps(asdict(offer)), _judge)


def _judge_setup(said: dict[int, str]) -> str:
    settings = {rank: json.loads(text) for rank, text in said.items()}
    names = dict.fromkeys(name for values in settings.values() for name in values)
    differing = []
    for name in names:
        alike: dict[str, list[int]] = {}
        for rank, values in settings.items():
            alike.setdefault(values.get(name, "nothing"), []).append(rank)
        if len(alike) > 1:
            differing.append(f"  {name}: " + "; ".join(f"{value} on {listed(ranks)}" for value, ranks in alike.items()))
    if differing:
        raise ScheduleError(
            "\n".join(["cp_compile: the ranks are not set up alike, so their programs would differ:", *differing])
            + "\nInstall the same versions for every rank, and give cp_backend the same arguments."
        )
    return ""


def _judge(said: dict[int, str]) -> str:
    offers = {rank: Offer(**json.loads(text)) for rank, text in said.items()}
    unable: dict[str, list[int]] = {}
    for rank, offer in offers.items():
        if offer.unable:
            unable.setdefault(offer.unable, []).append(rank)
    if unable:
        return "; ".join(f"{listed(ranks)}: {why}" for why, ranks in unable.items())
    first, *others = offers
    mine = offers[first]
    apart = [rank for rank in others if offers[rank].lines != mine.lines]
    if apart:
        raise ScheduleError(
            f"cp_compile: rank {first} and {listed(apart)} compiled different programs, and would wait for each other "
            f"for ever.\n{_difference(mine.lines, offers[apart[0]].lines, first, apart[0])}\n"
            "Give all ranks the same model and inputs of the same shapes."
        )
    differing: dict[str, list[int]] = {}
    for rank in others:
        for label, value in offers[rank].values.items():
            if mine.values.get(label) != value:
                differing.setdefault(label, []).append(rank)
    if differing:
        raise InputError(describe_difference(differing, first))
    return ""


def _difference(mine: Sequence[str], theirs: Sequence[str], me: int, other: int) -> str:
    for i in range(max(len(mine), len(theirs))):
        a = mine[i] if i < len(mine) else "nothing more"
        b = theirs[i] if i < len(theirs) else "nothing more"
        if a != b:
            return f"  first difference, rank {me}: {a}\n  first difference, rank {other}: {b}"
    return ""


@cache
def _sources() -> str:
    """Tells two copies of this package apart that call themselves the same version."""
    files = {path for folder in (Path(__file__).parent, Path(errors.__file__).parent) for path in folder.rglob("*.py")}
    digests = sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:12]
