"""``python -m benchmarks.steps``: a step of one process, of diffusers' own context parallelism, and of ours.

All sides are compiled by Inductor and live in the same ranks, one thread each. They take turns, a step a round, so that
whatever else the machine does hits all alike; ratios are taken within a round. What the machine allows is measured the
same way: every rank does the whole work at once, without a word to the others, and the share of that time that one rank
would need for its part is the limit.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import MODELS, SIZES
from cp_compile import cp_backend, zoo
from cp_compile.agreement import relative_error
from cp_compile.local_ranks import LocalRanks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALONE, AT_ONCE, INCUMBENT = "one process", "all at once", "diffusers ulysses"

_Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Config:
    """What to measure; the same on every rank."""

    model: str
    size: str
    dtype: str
    world: int
    rounds: int
    sides: tuple[str, ...]

    def case(self) -> zoo.Case:
        """The model and its inputs."""
        return MODELS[self.model](SIZES[self.size])


def _one_process(case: zoo.Case, dtype: torch.dtype, world: int) -> Any:
    return torch.compile(case.model(dtype=dtype), backend="inductor")


def _diffusers(case: zoo.Case, dtype: torch.dtype, world: int) -> Any:
    from diffusers import ContextParallelConfig

    # It takes its device number modulo this, which is 0 on a machine without an accelerator.
    torch.accelerator.device_count = lambda: 1
    model: Any = case.model(dtype=dtype)
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=world))
    return torch.compile(model, backend="inductor")


def _ours(**options: Any) -> Callable[[zoo.Case, torch.dtype, int], Any]:
    def build(case: zoo.Case, dtype: torch.dtype, world: int) -> Any:
        degrees = {k: world if v is None else v for k, v in options.items()}
        return torch.compile(case.model(dtype=dtype), backend=cp_backend(**degrees))

    return build


# Its ring is not among them: it has no implementation for the attention that a CPU has.
SIDES: dict[str, Callable[[zoo.Case, torch.dtype, int], Any]] = {
    INCUMBENT: _diffusers,
    "ours ulysses": _ours(ulysses=None),
    "ours ring alltoall": _ours(ring=None),
    "ours ring allgather": _ours(ring=None, rotate="allgather"),
}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="flux")
    parser.add_argument("--size", choices=SIZES, default="compute", help="what bounds it (default: compute)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--world", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each side (default: 15)")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="default: all")
    parser.add_argument("--json", action="store_true", help="print what each rank measured")
    args = parser.parse_args()
    config = Config(args.model, args.size, args.dtype, args.world, args.rounds, tuple(args.sides))
    with LocalRanks(imports=["diffusers"]) as ranks:
        answers = ranks.run(config.world, _measure, config, timeout=3600.0)
    print(json.dumps(answers) if args.json else _table(config, answers))


def _measure(config: Config) -> dict[str, Any]:
    """On every rank: compile all sides, then let them take turns."""
    with torch.no_grad():
        return {
            "machine": _machine(),
            "sides": _all_sides(config),
            "load": Path("/proc/loadavg").read_text().split()[0],
        }


def _all_sides(config: Config) -> dict[str, Any]:
    from torch._inductor.utils import fresh_cache

    case, dtype = config.case(), DTYPES[config.dtype]
    inputs = case.kwargs(dtype=dtype)
    steps: dict[str, _Step] = {}
    told: dict[str, dict[str, Any]] = {}
    expected = torch.empty(0)
    for name, build in {ALONE: _one_process, **{side: SIDES[side] for side in config.sides}}.items():
        torch._dynamo.reset()
        model = build(case, dtype, config.world)
        steps[name] = lambda model=model: model(**inputs)[0]  # type: ignore[misc]
        dist.barrier()
        with fresh_cache():
            seconds, output = _timed(steps[name])
        expected = output if name == ALONE else expected
        steps[name]()
        told[name] = {
            "compile_s": seconds,
            "error": relative_error(output, expected),
            **_communication(steps[name], dtype.itemsize),
            "working_mb": _working_mb(steps[name]),
            "seconds": [],
        }
    told[AT_ONCE] = {"seconds": []}
    for _ in range(config.rounds):
        for name in told:
            dist.barrier()
            if name != ALONE or dist.get_rank() == 0:
                told[name]["seconds"].append(_timed(steps[ALONE if name == AT_ONCE else name])[0])
            dist.barrier()
    return told


def _timed(step: _Step) -> tuple[float, torch.Tensor]:
    start = time.perf_counter()
    output = step()
    return time.perf_counter() - start, output


def _communication(step: _Step, itemsize: int) -> dict[str, Any]:
    """Collectives of one step, the bytes that this rank sends in them, and the time in starting and awaiting them."""
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        _, __ = _timed(step)
    count, sent, micros = 0, 0, 0.0
    world, rank = dist.get_world_size(), dist.get_rank()
    for event in seen.events():
        if not event.name.startswith("_c10d_functional::"):
            continue
        micros += event.cpu_time_total
        kind = event.name.split("::")[1]
        if kind == "wait_tensor":
            continue
        count += 1
        shape = event.input_shapes[0]
        held = torch.Size(shape).numel() * itemsize
        if kind == "all_to_all_single":
            to_each = event.concrete_inputs[2]
            sent += held * (sum(to_each) - to_each[rank]) // max(1, sum(to_each))
        else:
            sent += held * (world - 1)
    return {"collectives": count, "sent": sent, "communication_s": micros / 1e6}


def _working_mb(step: _Step) -> float:
    """What a step adds to the resident size at its peak."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    step()
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


def _machine() -> str:
    model = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    import diffusers

    return f"{model.split(': ')[1]}, torch {torch.__version__}, diffusers {diffusers.__version__}"


def _table(config: Config, answers: list[dict[str, Any]]) -> str:
    """A row a side. A step lasts as long as its slowest rank's."""
    sides = [answer["sides"] for answer in answers]

    def steps(name: str) -> list[float]:
        return [max(of_round) for of_round in zip(*(side[name]["seconds"] for side in sides if side[name]["seconds"]))]

    alone, limit = steps(ALONE), [s / config.world for s in steps(AT_ONCE)]
    incumbent = steps(INCUMBENT) if INCUMBENT in config.sides else None
    rows = [["limit", *_seconds(limit), _ratio(limit, alone), *([""] * 9)]]
    for name in [ALONE, *config.sides]:
        took, first = steps(name), sides[0][name]
        rows.append(
            [
                name,
                *_seconds(took),
                _ratio(took, alone),
                _ratio(took, incumbent) if incumbent else "",
                _ratio(limit, took) if name != ALONE else "",
                _ratio([s / config.world for s in alone], took) if name != ALONE else "",
                f"{max(side[name]['communication_s'] for side in sides) * 1e3:.0f}",
                f"{first['sent'] / 2**20:.2f}",
                first["collectives"],
                f"{max(side[name]['working_mb'] for side in sides):.0f}",
                f"{max(side[name]['compile_s'] for side in sides):.1f}",
                f"{max(side[name]['error'] for side in sides):.0e}",
            ]
        )
    heads = [
        "", "step ms", "of one process", "of diffusers", "share of limit", "efficiency",
        "in collectives ms", "MiB sent", "collectives", "working MiB", "compile s", "error",
    ]  # fmt: skip
    title = (
        f"{config.model}, {config.size}-bound, {config.dtype}, {config.world} ranks of one thread, {config.rounds} "
        f"rounds\n{answers[0]['machine']}; load at the end {answers[0]['load']}\nmedian (quartiles)\n"
    )
    return title + tabulate(rows, heads, disable_numparse=True)


def _seconds(values: list[float]) -> list[str]:
    return [f"{statistics.median(values) * 1e3:.0f}"]


def _ratio(above: list[float], below: list[float]) -> str:
    ratios = [a / b for a, b in zip(above, below)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


if __name__ == "__main__":
    main()
