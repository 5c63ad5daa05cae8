"""``python -m cp_compile explain``: the report of a model on any number of ranks, without starting one.

Our passes run as they would on rank 0. torch's fake process group stands for the other ranks: it knows how many there
are and moves nothing. Each graph then runs as Dynamo gave it, so that what follows a graph break sees true values.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from cp_compile.backend import CPBackend
from cp_compile.demo import configure
from cp_compile.passes.capture import Captured
from cp_compile.report import Report

__all__ = ["add_arguments", "plan_of", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--model", default="flux", help="'flux', or a case of the zoo by name (default: flux)")
    parser.add_argument("--world", type=int, help="number of ranks (default: ulysses * ring, or 2)")
    parser.add_argument("--ulysses", type=int, help="ranks that share heads (default: what --ring leaves)")
    parser.add_argument("--ring", type=int, help="ranks that pass keys and values around (default: what is left)")
    parser.add_argument("--height", type=int, help="picture height in pixels, of flux (default: 512)")
    parser.add_argument("--width", type=int, help="picture width in pixels, of flux (default: 512)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page that draws the plan to FILE")
    parser.set_defaults(steps=1, timeout=None, inner="aot_eager")


def run(args: argparse.Namespace, error: Callable[[str], Any]) -> int:
    """Prints the report. Returns the exit status.

    Args:
        args: the options that :func:`add_arguments` added.
        error: called with a sentence when the options make no sense; does not return.
    """
    try:
        config = configure(args, None)
    except ValueError as reason:
        error(str(reason))
        raise
    case = config.case()
    report = plan_of(case.model(), case.kwargs(), config.ulysses, config.ring)
    if args.html is not None:
        try:
            args.html.write_text(report.to_html(case.cls), encoding="utf-8")
        except OSError as reason:
            error(f"--html: {reason}")
    print(json.dumps(report.to_dict()) if args.json else report)
    return 0


def plan_of(model: torch.nn.Module, inputs: dict[str, Any], ulysses: int, ring: int) -> Report:
    """The report of a model on ``ulysses * ring`` ranks, of which none is started. No process group may exist.

    Args:
        model: runs once, without gradients.
        inputs: its keyword arguments.
        ulysses: degree.
        ring: degree.
    """
    # The only process group of any size in one process. It lives among torch's testing code, and nowhere else.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ulysses * ring, store=FakeStore())
    try:
        backend = _Explainer(ulysses, ring, None, "alltoall", True, "aot_eager", None, 60.0)
        with torch.no_grad():
            torch.compile(model, backend=backend)(**inputs)
    finally:
        dist.destroy_process_group()
    return backend.report


class _Explainer(CPBackend):
    """Plans and rewrites each graph, and then runs it as it was."""

    def _finish(self, captured: Captured, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return captured.dynamo.forward
