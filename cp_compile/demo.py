"""``python -m cp_compile demo``: an unmodified model on several ranks, compared with one process.

The ranks are started here, or are those of ``torchrun``. Every rank runs the plain model eagerly for reference; the
first one also compiles the plain model with the same inner compiler, alone and on one thread, for the time of a step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from tabulate import tabulate

from cp_compile import zoo
from cp_compile.agreement import digest, relative_error
from cp_compile.local_ranks import LOOPBACK, LocalRanks, RankError

__all__ = ["add_arguments", "configure", "run"]

TOLERANCE = 1e-5

_FLUX = "flux"
_TEXT_TOKENS = 128

# A FLUX pixel patch: the autoencoder divides each side by 8 and the transformer packs 2 x 2 of what is left.
_PATCH = 16


@dataclass(frozen=True)
class Config:
    """What to run; checked, and the same on every rank."""

    model: str
    world: int
    ulysses: int
    ring: int
    inner: Literal["inductor", "aot_eager"]
    height: int
    width: int
    steps: int
    timeout: float
    started: float = field(default_factory=time.time)

    def case(self) -> zoo.Case:
        """The model and its inputs."""
        return _flux(self.height, self.width) if self.model == _FLUX else zoo.case(self.model)

    def __str__(self) -> str:
        tokens = self.height // _PATCH * (self.width // _PATCH)
        size = f" {self.width}x{self.height}, {tokens} image and {_TEXT_TOKENS} text tokens"
        return (
            f"{self.model}{size if self.model == _FLUX else ''}; {self.world} ranks, ulysses={self.ulysses} "
            f"ring={self.ring}; {self.inner}"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's options to ``parser``."""
    parser.add_argument("--model", default=_FLUX, help=f"{_FLUX!r}, or a case of the zoo by name (default: {_FLUX})")
    parser.add_argument("--world", type=int, help="number of ranks (default: ulysses * ring, or 2)")
    parser.add_argument("--ulysses", type=int, help="ranks that share heads (default: what --ring leaves)")
    parser.add_argument(
        "--ring", type=int, help="ranks that pass keys and values around (default: what --ulysses leaves)"
    )
    parser.add_argument("--height", type=int, help=f"picture height in pixels, a multiple of {_PATCH} (default: 512)")
    parser.add_argument("--width", type=int, help=f"picture width in pixels, a multiple of {_PATCH} (default: 512)")
    parser.add_argument("--inner", choices=["inductor", "aot_eager"], default="inductor", help="default: inductor")
    parser.add_argument("--steps", type=int, default=5, help="timed steps (default: 5)")
    parser.add_argument(
        "--timeout", type=float, default=1800.0, help="seconds before ranks are given up (default: 1800)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace, error: Callable[[str], Any]) -> int:
    """Runs the demo.

    Args:
        args: the options that :func:`add_arguments` added.
        error: called with a sentence when the options make no sense; does not return.

    Returns:
        Exit status: 0 when every rank has the answer of one process, and all the same bits.
    """
    given = dist.is_torchelastic_launched()
    try:
        config = configure(args, int(os.environ["WORLD_SIZE"]) if given else None)
    except ValueError as reason:
        if given and os.environ["RANK"] != "0":
            return 2
        error(str(reason))
        raise
    if given:
        answers = _on_given_ranks(config)
        if dist.get_rank() == 0:
            _show(config, answers, args.json)
        dist.destroy_process_group()
    else:
        try:
            answers = _on_local_ranks(config)
        except RankError as failure:
            print(failure, file=sys.stderr)
            return 1
        _show(config, answers, args.json)
    return 0 if _equal(_summary(config, answers)) else 1


def configure(args: argparse.Namespace, given: int | None) -> Config:
    """The options as a configuration; ``given`` is the number of ranks that a launcher has started.

    Raises:
        ValueError: with a sentence for a person.
    """
    for name in ("world", "ulysses", "ring", "height", "width", "steps", "timeout"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}; it must be at least 1")
    if args.model != _FLUX:
        try:
            zoo.case(args.model)
        except KeyError as reason:
            raise ValueError(f"--model: {reason.args[0]} (or {_FLUX!r}, the demo's own)") from None
        if args.height or args.width:
            raise ValueError(
                f"--height and --width size the demo's own {_FLUX!r}; {args.model} brings its inputs along"
            )
    for name in ("height", "width"):
        if (getattr(args, name) or 0) % _PATCH:
            raise ValueError(
                f"--{name} is {getattr(args, name)}; a token is {_PATCH} pixels wide, give a multiple of it"
            )
    world, ulysses, ring = _degrees(args, given)
    if importlib.util.find_spec("diffusers") is None:
        raise ValueError("the demo needs diffusers, which is not installed: pip install 'cp-compile[diffusers]'")
    return Config(
        model=args.model,
        world=world,
        ulysses=ulysses,
        ring=ring,
        inner=args.inner,
        height=args.height or 512,
        width=args.width or 512,
        steps=args.steps,
        timeout=args.timeout,
    )


def _degrees(args: argparse.Namespace, given: int | None) -> tuple[int, int, int]:
    world, ulysses, ring = args.world or given, args.ulysses, args.ring
    if given is not None and world != given:
        raise ValueError(f"--world is {world}, but the launcher started {given} ranks; leave --world out")
    if world is None:
        world = (ulysses or 1) * (ring or 1) if ulysses or ring else 2
    if world < 2:
        raise ValueError("one rank has nothing to share; give --world 2 or more, or degrees whose product is")
    ulysses = ulysses or max(1, world // (ring or 1))
    ring = ring or max(1, world // ulysses)
    if ulysses * ring != world:
        raise ValueError(
            f"ulysses * ring must be the number of ranks: {ulysses} * {ring} is not {world}; "
            "give --world alone, or degrees whose product it is"
        )
    return world, ulysses, ring


def _flux(height: int, width: int) -> zoo.Case:
    """FLUX, narrow and shallow enough for a laptop: 512 channels, 2 double and 4 single blocks.

    Like FLUX schnell it takes no guidance. Guidance enters as the sine and cosine of thousands of radians, where the
    last bit of one ``exp``, which compilers round differently, moves the output by more than the tolerance (4e-5,
    measured).
    """
    rows, columns = height // _PATCH, width // _PATCH
    positions = [[0, row, column] for row in range(rows) for column in range(columns)]

    def tensor(*shape: int, values: Any = None) -> dict[str, Any]:
        return {"tensor": list(shape), "dtype": "float32", **({} if values is None else {"values": values})}

    init = {
        "patch_size": 1,
        "in_channels": 64,
        "num_layers": 2,
        "num_single_layers": 4,
        "attention_head_dim": 64,
        "num_attention_heads": 8,
        "joint_attention_dim": 512,
        "pooled_projection_dim": 256,
        "axes_dims_rope": (8, 28, 28),
    }
    inputs = {
        "hidden_states": tensor(1, rows * columns, 64),
        "encoder_hidden_states": tensor(1, _TEXT_TOKENS, 512),
        "pooled_projections": tensor(1, 256),
        "timestep": tensor(1, values=[0.7]),
        "img_ids": tensor(rows * columns, 3, values=positions),
        "txt_ids": tensor(_TEXT_TOKENS, 3, values=[[0, 0, 0]] * _TEXT_TOKENS),
    }
    return zoo.Case(_FLUX, "FluxTransformer2DModel", {k: {"value": v} for k, v in init.items()}, inputs)


def _on_local_ranks(config: Config) -> list[dict[str, Any]]:
    with LocalRanks(imports=["diffusers"]) as ranks:
        _say(config, f"starting {config.world} ranks")
        ranks.start(config.world)
        return ranks.run(config.world, _measure, config, timeout=config.timeout)


def _on_given_ranks(config: Config) -> list[dict[str, Any]]:
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=config.timeout))
    answers: list[Any] = [None] * config.world
    dist.all_gather_object(answers, _measure(config))
    return answers


def _measure(config: Config) -> dict[str, Any]:
    """On every rank: the reference, the time of one process (first rank only), then the ranks together."""
    from cp_compile import cp_backend

    first = dist.get_rank() == 0
    case = config.case()
    with torch.no_grad():
        _say(config, f"building {case.cls} and running it on one process, eagerly")
        expected = case.model()(**case.kwargs())
        alone: list[float] = []
        alone_error = 0.0
        if first:
            _say(config, f"compiling it for one process ({config.inner})")
            single = torch.compile(case.model(), backend=config.inner)
            alone_error = relative_error(single(**case.kwargs()), expected)
            _say(config, f"timing {config.steps} steps of one process")
            alone = [_timed(single, case)[0] for _ in range(config.steps)]
        torch._dynamo.reset()
        dist.barrier()

        _say(config, f"compiling it for {config.world} ranks ({config.inner})")
        backend = cp_backend(ulysses=config.ulysses, ring=config.ring, inner=config.inner)
        model = torch.compile(case.model(), backend=backend)
        compile_s, output = _timed(model, case)
        outputs = [output]
        _say(config, f"timing {config.steps} steps of {config.world} ranks")
        together = []
        for _ in range(config.steps):
            dist.barrier()
            seconds, output = _timed(model, case)
            together.append(seconds)
        outputs.append(output)
        dist.barrier()
    report = backend.report.to_dict()
    return {
        "error": max(relative_error(o, expected) for o in outputs),
        "digest": [digest(o) for o in outputs],
        "alone": alone,
        "alone_error": alone_error,
        "together": together,
        "compile_s": compile_s,
        "collectives": report["collectives"],
        "bytes_per_rank": report["bytes_per_rank"],
    }


def _timed(model: Callable[..., Any], case: zoo.Case) -> tuple[float, Any]:
    inputs = case.kwargs()
    start = time.perf_counter()
    output = model(**inputs)
    return time.perf_counter() - start, output


def _summary(config: Config, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """What ``--json`` prints. A step of several ranks lasts as long as its slowest rank's."""
    return {
        "model": config.model,
        "world": config.world,
        "ulysses": config.ulysses,
        "ring": config.ring,
        "inner": config.inner,
        "max_rel_error": max(a["error"] for a in answers),
        "single_rel_error": answers[0]["alone_error"],
        "ranks_agree": all(a["digest"] == answers[0]["digest"] for a in answers),
        "step_s_single": statistics.median(answers[0]["alone"]),
        "step_s_parallel": statistics.median(map(max, zip(*(a["together"] for a in answers)))),
        "collectives": answers[0]["collectives"],
        "bytes_per_rank": max(a["bytes_per_rank"] for a in answers),
        "compile_s": max(a["compile_s"] for a in answers),
    }


def _equal(summary: dict[str, Any]) -> bool:
    return summary["max_rel_error"] <= TOLERANCE and summary["ranks_agree"]


def _show(config: Config, answers: list[dict[str, Any]], as_json: bool) -> None:
    s = _summary(config, answers)
    if as_json:
        # JSON has no infinity, which is what an error is when a number should not be finite and is, or the reverse.
        print(json.dumps({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in s.items()}))
        return
    faster = s["step_s_single"] / s["step_s_parallel"]
    rows = [
        ("max relative error", f"{s['max_rel_error']:.1e} (at most {TOLERANCE:.0e})"),
        ("- the same of one process, compiled", f"{s['single_rel_error']:.1e}"),
        ("ranks equal to the bit", "yes" if s["ranks_agree"] else "NO"),
        ("time a step, one process", f"{s['step_s_single']:.3f} s"),
        (f"time a step, {config.world} ranks", f"{s['step_s_parallel']:.3f} s ({faster:.2f} times as fast)"),
        ("collectives a step", s["collectives"]),
        ("bytes a step that a rank sends", f"{s['bytes_per_rank'] / 1e6:.2f} MB"),
        ("compile time and first step", f"{s['compile_s']:.1f} s"),
    ]
    print(config)
    print(tabulate(rows, tablefmt="simple", disable_numparse=True))
    same = "The ranks give the answer of one process."
    print(same if _equal(s) else "DIFFERENT: the ranks do not give the answer of one process.")


def _say(config: Config, what: str) -> None:
    """A progress line, from one rank only. On stderr, so that ``--json`` has stdout for itself."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"[{time.time() - config.started:6.1f} s] {what}", file=sys.stderr, flush=True)
