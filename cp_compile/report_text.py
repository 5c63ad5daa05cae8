"""The report as text: what ``print(backend.report)`` shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tabulate import tabulate

if TYPE_CHECKING:
    from .report import BarrierReport, GraphReport, Report

__all__ = [
    "as_text",
    "attention_calls",
    "barrier_counts",
    "break_cost",
    "gather_place",
    "lengths_text",
    "shape_text",
    "share_of_peak",
    "share_text",
]


def as_text(report: Report) -> str:
    """The whole report: the graphs one after another, then the breaks between them."""
    degrees = f"cp_compile: ulysses={report.ulysses} ring={report.ring}"
    if not report.graphs:
        return f"{degrees}; nothing is compiled yet (run the model once)"
    count = len(report.graphs)
    parts = [f"{degrees}, {count} graph{'s' if count > 1 else ''}"]
    parts += [_graph(g) for g in report.graphs]
    if report.breaks:
        parts.append(_breaks(report))
    return "\n\n".join(parts)


def shape_text(sizes: tuple[int | str, ...] | None) -> str:
    """A shape, as ``2x8x1152x64``."""
    return "x".join(map(str, sizes)) if sizes else "-"


def lengths_text(lengths: tuple[int | str, ...]) -> str:
    """The segments of an axis, as ``128 + 1024``."""
    return " + ".join(map(str, lengths))


def share_text(share: float) -> str:
    """A share in per cent; all of it is 100 % and nothing else is."""
    return ">99.9%" if 0.9995 <= share < 1 else f"{share:.1%}"


def gather_place(output: bool, inside: bool) -> str:
    """Where a gather stands, in a word."""
    return "output" if output else "inside" if inside else "end"


def barrier_counts(barriers: Iterable[BarrierReport]) -> dict[tuple[str, str, int, str], int]:
    """How often each barrier is met: one op of one source line, with its reason and its FLOPs."""
    return Counter((b.op, b.reason, b.flops, b.where) for b in barriers)


def share_of_peak(graph: GraphReport) -> str:
    """Peak activations of a rank against one process, as a clause."""
    if graph.peak_bytes is None:
        return "peak activations depend on the data"
    share = f"{graph.peak_bytes / graph.peak_bytes_single:.0%}" if graph.peak_bytes_single else "100%"
    return f"peak activations {graph.peak_bytes:,} bytes, {share} of one process"


def attention_calls(variant: str, collectives: int) -> str:
    """The collectives of an attention, by kind."""
    if variant == "ulysses":
        return f"{collectives} all-to-all"
    steps = collectives - 2 if variant == "unified" else collectives
    ring = f"{steps} ring exchange{'s' if steps != 1 else ''}"
    if variant == "unified":
        return f"2 all-to-all, {ring}"
    return ring if variant == "ring" else "no communication"


def _graph(g: GraphReport) -> str:
    lines = [f"graph {g.number}  {g.where}".rstrip()]
    if g.note:
        lines.append(f"  {g.note}")
    if not g.attentions:
        return "\n".join(lines)
    share = share_text(g.flops_sharded)
    lines.append(
        f"  {share} of the FLOPs run sharded; {g.collectives} collectives, {g.bytes_sent:,} bytes "
        f"sent by each rank; {g.inputs_sharded} inputs sharded"
    )
    lines.append(f"  {share_of_peak(g)}; planned in {g.seconds:.2f} s")
    if g.axes:
        rows = [
            [lengths_text(a.lengths), lengths_text(a.local), "zigzag" if a.zigzag else "contiguous"] for a in g.axes
        ]
        lines += ["", tabulate(rows, ["axis: segments", "on each rank", "cut"], tablefmt="simple")]
    rows = [
        [a.module or a.name, a.variant, shape_text(a.query), shape_text(a.key), shape_text(a.mask),
         "yes" if a.causal else "-", str(a.collectives), f"{a.bytes_sent:,}", a.kernel]
        for a in g.attentions
    ]  # fmt: skip
    head = ["attention", "variant", "query", "key", "mask", "causal", "collectives", "bytes", "kernel"]
    lines += ["", tabulate(rows, head, tablefmt="simple")]
    if g.gathers:
        rows = [
            [x.op, gather_place(x.output, x.inside), "; ".join(x.reasons), f"{x.bytes_sent:,}", x.where]
            for x in g.gathers
        ]
        lines += ["", tabulate(rows, ["gathered", "place", "reason", "bytes", "source"], tablefmt="simple")]
    if g.barriers:
        rows = [
            [op, reason, f"{flops:,}", str(times), where]
            for (op, reason, flops, where), times in barrier_counts(g.barriers).items()
        ]
        lines += ["", tabulate(rows, ["on all tokens", "reason", "FLOPs each", "times", "source"], tablefmt="simple")]
    if g.reductions:
        rows = [[r.op, f"{r.bytes_sent:,}", r.where] for r in g.reductions]
        lines += ["", tabulate(rows, ["summed over ranks", "bytes", "source"], tablefmt="simple")]
    if g.unknown_ops:
        lines += ["", "no rule for (see docs/rules.md): " + ", ".join(g.unknown_ops)]
    return "\n".join(lines)


def _breaks(report: Report) -> str:
    """One entry a line of source, however many graphs end there."""
    ends: dict[tuple[str, str], list[int]] = {}
    for i, b in report.breaks:
        ends.setdefault((b.where, b.reason), []).append(i)
    count = f"{len(ends)} line{'s' if len(ends) > 1 else ''}"
    lines = [f"graph breaks at {count} of source; values that leave a graph are made whole"]
    for (where, reason), before in ends.items():
        here = [report.graphs[i] for i in before]
        code = here[0].ends.code if here[0].ends else ""
        cost = break_cost(report, before)
        numbers = ", ".join(str(g.number) for g in here)
        lines += ["", f"  {where}  {code}".rstrip(), f"    {reason}", f"    after graph {numbers}: {cost}"]
    return "\n".join(lines)


def break_cost(report: Report, before: Iterable[int]) -> str:
    """What the breaks after these graphs cost, as a clause.

    Args:
        report: whose graphs.
        before: places in ``report.graphs``.
    """
    ends = [e for i in before if (e := report.graphs[i].ends) is not None]
    cut = sum(g.inputs_sharded for i in before for g in report.graphs[i + 1 : i + 2])
    gathers = sum(e.gathers for e in ends)
    costs = []
    if gathers:
        costs.append(f"{gathers} gather{'s' if gathers > 1 else ''}, {sum(e.bytes_sent for e in ends):,} bytes sent")
    if cut:
        costs.append(f"{cut} input{'s' if cut > 1 else ''} of the next graph sharded")
    return ", ".join(costs) or "nothing to gather or to shard"
