"""What was compiled: what runs sharded, what does not, why, and what it costs to communicate."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tabulate import tabulate

__all__ = ["AttentionReport", "GatherReport", "GraphReport", "Report", "SegmentReport"]


@dataclass(frozen=True)
class SegmentReport:
    """One axis: its segments' lengths, global and on each rank, and whether it is cut zigzag.

    A length is a number, or an expression of the sizes that vary.
    """

    lengths: tuple[int | str, ...]
    local: tuple[int | str, ...]
    zigzag: bool


@dataclass(frozen=True)
class AttentionReport:
    """One attention.

    Attributes:
        name: of its node in the captured graph.
        variant: ``ulysses``, ``ring``, ``unified``, ``local`` (keys and values are on every rank), ``batch`` (sharded
            along a batch dim) or ``whole`` (every rank runs all of it).
        query: global shape.
        key: global shape.
        mask: shape of the mask, or None.
        causal: whether rows see only rows before them.
        collectives: started by one forward.
        bytes_sent: by one rank in one forward.
        kernel: the per-block kernel of a ring, else ``sdpa``.
        where: source line.
        module: path of the module that calls it.
    """

    name: str
    variant: str
    query: tuple[int | str, ...]
    key: tuple[int | str, ...]
    mask: tuple[int | str, ...] | None
    causal: bool
    collectives: int
    bytes_sent: int
    kernel: str
    where: str
    module: str


@dataclass(frozen=True)
class GatherReport:
    """A value that is made whole.

    Attributes:
        name: of the node whose value it is.
        op: what made the value.
        reasons: why each user needs all of it.
        bytes_sent: by one rank.
        output: the value leaves the graph (perhaps after views and the like), so the gather stands at the boundary.
        inside: a sharded attention still follows.
        where: source line.
        module: path of the module.
    """

    name: str
    op: str
    reasons: tuple[str, ...]
    bytes_sent: int
    output: bool
    inside: bool
    where: str
    module: str


@dataclass(frozen=True)
class GraphReport:
    """One graph that Dynamo handed over.

    Attributes:
        number: which one, counted on this rank.
        note: what a reader must know: no attention in it, say.
        axes: the token axes that are sharded.
        attentions: all of them.
        gathers: values made whole.
        reductions: ops whose partial sums are added up over the ranks, with their source lines.
        inputs_sharded: inputs of which each rank takes its rows.
        unknown_ops: ops without a rule, that the token axis meets.
        flops_sharded: share of the FLOPs (of products and attentions) that runs sharded.
        collectives: started by one forward.
        bytes_sent: by one rank in one forward.
        seconds: time of our own passes.
        where: source line of the graph's first op.
    """

    number: int
    note: str = ""
    axes: tuple[SegmentReport, ...] = ()
    attentions: tuple[AttentionReport, ...] = ()
    gathers: tuple[GatherReport, ...] = ()
    reductions: tuple[str, ...] = ()
    inputs_sharded: int = 0
    unknown_ops: tuple[str, ...] = ()
    flops_sharded: float = 0.0
    collectives: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    where: str = ""

    @property
    def summary(self) -> str:
        """One line for the log."""
        if not self.attentions:
            return f"cp: {self.note}"
        count = f"{len(self.attentions)} attention{'s' if len(self.attentions) != 1 else ''}"
        return (
            f"cp: {count}, {self.inputs_sharded} inputs sharded, {len(self.gathers)} values gathered, "
            f"{self.collectives} collectives, {self.bytes_sent} bytes sent by each rank"
        )


@dataclass
class Report:
    """All graphs that one backend compiled. ``str()`` of it is for a person, :meth:`to_dict` for a program."""

    ulysses: int
    ring: int
    graphs: list[GraphReport] = field(default_factory=list)

    @property
    def collectives(self) -> int:
        """Collectives that one rank starts when each graph runs once, forward."""
        return sum(g.collectives for g in self.graphs)

    @property
    def bytes_per_rank(self) -> int:
        """Bytes that one rank sends when each graph runs once, forward."""
        return sum(g.bytes_sent for g in self.graphs)

    def to_dict(self) -> dict[str, Any]:
        """The whole report as plain data.

        Keys: ``ulysses``, ``ring``, ``collectives``, ``bytes_per_rank``, and ``graphs``: a list whose members have the
        fields of :class:`GraphReport`.
        """
        return {
            "ulysses": self.ulysses,
            "ring": self.ring,
            "collectives": self.collectives,
            "bytes_per_rank": self.bytes_per_rank,
            "graphs": [asdict(g) for g in self.graphs],
        }

    def __str__(self) -> str:
        if not self.graphs:
            return f"cp_compile: ulysses={self.ulysses} ring={self.ring}; nothing is compiled yet (run the model once)"
        parts = [f"cp_compile: ulysses={self.ulysses} ring={self.ring}, {len(self.graphs)} graph(s)"]
        return "\n\n".join(parts + [_graph_text(g) for g in self.graphs])


def _graph_text(g: GraphReport) -> str:
    lines = [f"graph {g.number}  {g.where}".rstrip()]
    if g.note:
        lines.append(f"  {g.note}")
    if not g.attentions:
        return "\n".join(lines)
    lines.append(
        f"  {g.flops_sharded:.0%} of the FLOPs run sharded; {g.collectives} collectives, {g.bytes_sent:,} bytes sent "
        f"by each rank; {g.inputs_sharded} inputs sharded; compiled by us in {g.seconds:.2f} s"
    )
    if g.axes:
        rows = [
            [" + ".join(map(str, a.lengths)), " + ".join(map(str, a.local)), "zigzag" if a.zigzag else "contiguous"]
            for a in g.axes
        ]
        lines += ["", tabulate(rows, ["axis: segments", "on each rank", "cut"], tablefmt="simple")]
    rows = [
        [a.module or a.name, a.variant, _sizes(a.query), _sizes(a.key), _sizes(a.mask or ()) or "-",
         "yes" if a.causal else "-", str(a.collectives), f"{a.bytes_sent:,}", a.kernel]
        for a in g.attentions
    ]  # fmt: skip
    head = ["attention", "variant", "query", "key", "mask", "causal", "collectives", "bytes", "kernel"]
    lines += ["", tabulate(rows, head, tablefmt="simple")]
    if g.gathers:
        rows = [
            [
                x.op,
                "output" if x.output else "inside" if x.inside else "end",
                "; ".join(x.reasons),
                f"{x.bytes_sent:,}",
                x.where,
            ]
            for x in g.gathers
        ]
        lines += ["", tabulate(rows, ["gathered", "place", "reason", "bytes", "source"], tablefmt="simple")]
    if g.reductions:
        lines += ["", "summed over ranks: " + "; ".join(g.reductions)]
    if g.unknown_ops:
        lines += ["", "ops without a rule (see docs/rules.md): " + ", ".join(g.unknown_ops)]
    return "\n".join(lines)


def _sizes(sizes: tuple[int | str, ...]) -> str:
    return "x".join(map(str, sizes))
