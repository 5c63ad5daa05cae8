"""The modules of a graph as a tree of blocks, equal neighbours drawn once: what the page shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .report import AttentionReport, BarrierReport, GatherReport, GraphReport, ReductionReport

__all__ = ["Block", "blocks_of"]


@dataclass
class Block:
    """A module with all that is inside it, or a run of equal ones.

    Attributes:
        name: its own name in the module around it; ``blocks.0`` for a member of a list.
        kind: name of its class.
        flops: of one forward on one process, the modules inside included; and so on for the next five.
        flops_sharded: of the ops that run on a shard.
        ops: how many.
        ops_sharded: how many run on a shard.
        collectives: started.
        bytes_sent: by one rank.
        children: the modules inside, by first use.
        attentions: in it; of the first of a run, as the next two.
        gathers: of values made in it.
        barriers: in it.
        reductions: in it.
        times: how many equal ones this block stands for.
        last: name of the last one of them.
    """

    name: str
    kind: str = ""
    flops: int = 0
    flops_sharded: int = 0
    ops: int = 0
    ops_sharded: int = 0
    collectives: int = 0
    bytes_sent: int = 0
    children: list[Block] = field(default_factory=list)
    attentions: list[AttentionReport] = field(default_factory=list)
    gathers: list[GatherReport] = field(default_factory=list)
    barriers: list[BarrierReport] = field(default_factory=list)
    reductions: list[ReductionReport] = field(default_factory=list)
    times: int = 1
    last: str = ""

    @property
    def share(self) -> float:
        """Share of the work that is sharded, 0 to 1: of FLOPs, or of ops where none of them has any."""
        if self.flops:
            return self.flops_sharded / self.flops
        return self.ops_sharded / self.ops if self.ops else 0.0

    @property
    def looks(self) -> object:
        """Equal for blocks that a reader need not tell apart."""
        calls = [(a.variant, a.query, a.key, a.mask, a.causal, a.collectives, a.bytes_sent) for a in self.attentions]
        whole = [(g.op, g.reasons, g.bytes_sent, g.output, g.inside) for g in self.gathers]
        numbers = (self.flops, round(self.share, 2), self.collectives, self.bytes_sent)
        inner = [(c.name, c.times, c.looks) for c in self.children]
        ops = [r.op for r in self.reductions], [b.op for b in self.barriers]
        return self.kind, numbers, calls, whole, ops, inner


def blocks_of(graph: GraphReport) -> list[Block]:
    """The outermost blocks of a graph, by first use."""
    root = Block("")
    for m in graph.modules:
        block = root
        for block in _way(root, m.path or _OWN):
            block.flops += m.flops
            block.flops_sharded += m.flops_sharded
            block.ops += m.ops
            block.ops_sharded += m.ops_sharded
            block.collectives += m.collectives
            block.bytes_sent += m.bytes_sent
        block.kind = m.kind
    for a in graph.attentions:
        for block in _way(root, a.module or _OWN):
            block.attentions.append(a)
    for g in graph.gathers:
        for block in _way(root, g.module or _OWN):
            block.gathers.append(g)
    for b in graph.barriers:
        for block in _way(root, b.module or _OWN):
            block.barriers.append(b)
    for r in graph.reductions:
        for block in _way(root, r.module or _OWN):
            block.reductions.append(r)
    return _tidy(root).children


_OWN = "outside any module"


def _way(root: Block, path: str) -> Iterator[Block]:
    """The blocks from the root to a module, made where missing."""
    yield root
    block = root
    for name in [path] if path == _OWN else path.split("."):
        inner = next((c for c in block.children if c.name == name), None)
        if inner is None:
            inner = Block(name)
            block.children.append(inner)
        block = inner
        yield block


def _tidy(block: Block) -> Block:
    """Members of a list stand in its place, and neighbours that look alike are one block."""
    children: list[Block] = []
    for child in map(_tidy, block.children):
        if not child.kind and child.children and all(_is_member(c) for c in child.children):
            for member in child.children:
                member.name = f"{child.name}.{member.name}"
                member.last = f"{child.name}.{member.last}" if member.last else ""
            children += child.children
        else:
            children.append(child)
    block.children = []
    for child in children:
        before = block.children[-1] if block.children else None
        if before is not None and _is_next(before, child) and before.looks == child.looks:
            before.times += child.times
            before.last = child.last or child.name
        else:
            block.children.append(child)
    return block


def _is_member(block: Block) -> bool:
    return block.name.isdigit()


def _is_next(before: Block, block: Block) -> bool:
    """Whether a block follows another one in one list."""
    stem, _, number = (before.last or before.name).rpartition(".")
    other, _, after = block.name.rpartition(".")
    return stem == other and number.isdigit() and after.isdigit()
