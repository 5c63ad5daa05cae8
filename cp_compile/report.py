"""What was compiled: what runs sharded, what does not, why, and what it costs to communicate."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .page import as_html
from .report_text import as_text

__all__ = [
    "AttentionReport",
    "BarrierReport",
    "BreakReport",
    "GatherReport",
    "GraphReport",
    "ModuleReport",
    "ReductionReport",
    "Report",
    "SegmentReport",
]


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
class BarrierReport:
    """An op on values along the token axis that cannot run on a shard: it works on all tokens, on every rank.

    Attributes:
        op: which.
        reason: why, or that there is no rule for it.
        flops: of one forward; every rank does all of them.
        where: source line.
        module: path of the module.
    """

    op: str
    reason: str
    flops: int
    where: str
    module: str


@dataclass(frozen=True)
class ReductionReport:
    """An op over tokens that runs on a shard; its partial sums are added up over the ranks.

    Attributes:
        op: which.
        bytes_sent: by one rank.
        where: source line.
        module: path of the module.
    """

    op: str
    bytes_sent: int
    where: str
    module: str


@dataclass(frozen=True)
class ModuleReport:
    """What one module of the model does itself, the modules inside it apart.

    Attributes:
        path: as in ``transformer_blocks.0.attn``; empty for what the compiled function does outside any module.
        kind: name of its class.
        ops: how many ATen ops.
        ops_sharded: how many of them run on a shard of the tokens.
        flops: of one forward on one process.
        flops_sharded: those of the ops that run on a shard.
        collectives: started by one forward: of its attentions and reductions, and of gathers of its values.
        bytes_sent: by one rank in one forward.
    """

    path: str
    kind: str
    ops: int
    ops_sharded: int
    flops: int
    flops_sharded: int
    collectives: int
    bytes_sent: int


@dataclass(frozen=True)
class BreakReport:
    """Where a graph ends though the model goes on: values that leave it are made whole.

    Attributes:
        where: source line at which Dynamo stopped.
        code: that line.
        reason: Dynamo's.
        gathers: values that are gathered because they leave the graph here.
        bytes_sent: by one rank, for these.
    """

    where: str
    code: str
    reason: str
    gathers: int
    bytes_sent: int


@dataclass(frozen=True)
class GraphReport:
    """One graph that Dynamo handed over.

    Attributes:
        number: which one, counted on this rank.
        note: what a reader must know: no attention in it, say.
        axes: the token axes that are sharded.
        attentions: all of them.
        gathers: values made whole.
        barriers: ops that cannot run on a shard.
        reductions: ops whose partial sums are added up over the ranks.
        inputs_sharded: inputs of which each rank takes its rows.
        unknown_ops: ops without a rule, that the token axis meets.
        flops: of products, convolutions and attentions in one forward, on one process.
        flops_sharded: share of the FLOPs that runs sharded, 0 to 1.
        collectives: started by one forward.
        bytes_sent: by one rank in one forward.
        peak_bytes: estimate of the most bytes that activations hold at once on one rank, in a forward without
            gradients; None if that depends on the data.
        peak_bytes_single: the same on one process.
        modules: the model's modules in this graph, by first use.
        ends: the graph break after it; None if the model (or the function given to torch.compile) ends here.
        seconds: time of our own passes.
        where: source line of the graph's first op.
    """

    number: int
    note: str = ""
    axes: tuple[SegmentReport, ...] = ()
    attentions: tuple[AttentionReport, ...] = ()
    gathers: tuple[GatherReport, ...] = ()
    barriers: tuple[BarrierReport, ...] = ()
    reductions: tuple[ReductionReport, ...] = ()
    inputs_sharded: int = 0
    unknown_ops: tuple[str, ...] = ()
    flops: int = 0
    flops_sharded: float = 0.0
    collectives: int = 0
    bytes_sent: int = 0
    peak_bytes: int | None = None
    peak_bytes_single: int = 0
    modules: tuple[ModuleReport, ...] = ()
    ends: BreakReport | None = None
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

    @property
    def breaks(self) -> list[tuple[int, BreakReport]]:
        """Graph breaks, each with the place in ``graphs`` of the graph before it."""
        return [(i, g.ends) for i, g in enumerate(self.graphs) if g.ends is not None]

    def to_dict(self) -> dict[str, Any]:
        """The whole report as plain data that JSON can hold. ``docs/report.md`` has every key and its unit.

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

    def to_html(self, title: str = "Context parallel plan") -> str:
        """A page that draws the model's modules, what of them is sharded, and where they communicate.

        It needs nothing else: no network, no script.
        """
        return as_html(self, title)

    def __str__(self) -> str:
        return as_text(self)
