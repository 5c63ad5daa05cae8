"""Which dims of which values are the token axis, and how the axis is cut into segments.

Seeds are the rows of every attention's q, k and v. From there positions spread through the graph, both ways, along the
links that the rules give, to a fixed point. A value can have several positions: a mask has the axis in its rows and in
its columns; the trunk of a video model has a spatial and a temporal axis. Which of them is sharded is not decided here.

Sizes are never compared to guess a meaning. A channel count that happens to equal the token count has no link to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from .relation import (
    OUT,
    Concat,
    Link,
    Op,
    Part,
    Position,
    Relation,
    Reshape,
    Same,
    Slot,
    Spread,
    is_tensor,
    shape_of,
    through_reshape,
)
from .rules import relation_of
from .rules.attention import ATTENTION
from .segments import Segment, Word, between, cut, leaves, total, unify
from .sizes import Size, equal, product, quotient

__all__ = ["Axes", "Conflict", "find_axes"]


@dataclass(frozen=True)
class Conflict:
    """Two axes that met in one value and could not be one."""

    node: fx.Node
    position: Position


class Axes:
    """Result of the analysis.

    Attributes:
        positions: for each value, the word of segments at each position where an axis lies.
        relations: for each call of an op, how its dims correspond.
        conflicts: where two axes met that cannot be one.
    """

    def __init__(self, graph: fx.Graph):
        self.relations: dict[fx.Node, Relation] = {}
        self.ops: dict[fx.Node, Op] = {}
        self.positions: dict[fx.Node, dict[Position, Word]] = {}
        self.conflicts: list[Conflict] = []
        for node in graph.nodes:
            if node.op == "call_function" and is_tensor(node) and hasattr(node.target, "_schema"):
                self.ops[node] = Op.of(node)
                self.relations[node] = relation_of(node)

    def word(self, node: fx.Node, at: Position) -> Word:
        """The segments at a position of a value, as finely cut as they are by now."""
        return leaves(self.positions[node][at])

    def inputs_at(self, node: fx.Node, at: Position) -> dict[Slot, Position] | None:
        """What an op needs to compute a shard of its output.

        Args:
            node: a call of an op.
            at: where the output is sharded.

        Returns:
            For each input that must be sharded, where; inputs that are not named are needed whole. None if the op
            cannot work on a shard there.
        """
        op, relation = self.ops[node], self.relations[node]
        out = self.word(node, at)
        needs: dict[Slot, Position] = {}
        covered = at.dim in relation.free and at.outer == 1 == at.inner
        for link in relation.links:
            for slot, position, word in self._through(link, op, at, out):
                covered = True
                if slot is None or position is None:
                    return None
                value = op.value(slot)
                known = self.positions.get(value, {}).get(position)  # type: ignore[arg-type]
                if known is None or leaves(known) != word:
                    return None
                needs[slot] = position
        return needs if covered else None

    def _through(
        self, link: Link, op: Op, at: Position, out: Word
    ) -> Iterator[tuple[Slot | None, Position | None, Word]]:
        """The inputs that a link ties to a position of the output, each with its position and word."""
        if isinstance(link, Same) and (OUT, at.dim) in link.ends:
            for slot, d in link.ends:
                if slot != OUT:
                    yield slot, Position(d, at.outer, at.inner), out
        elif isinstance(link, Reshape):
            yield link.slot, through_reshape(at, op.shape(), op.shape(link.slot)), out
        elif isinstance(link, Spread) and link.out == at.dim:
            inner = quotient(at.inner, link.times)
            yield link.slot, None if inner is None else Position(link.dim, at.outer, inner), out
        elif isinstance(link, Concat) and link.dim == at.dim:
            if at.outer != 1:
                yield None, None, out
                return
            start = 0
            for slot, d in link.pieces:
                position = Position(d, 1, at.inner)
                word = self.positions.get(op.value(slot), {}).get(position)  # type: ignore[arg-type]
                if word is None:
                    yield None, None, out
                    return
                word = leaves(word)
                if out[start : start + len(word)] != word:
                    yield None, None, out
                    return
                start += len(word)
                yield slot, position, word
        elif isinstance(link, Part):
            (whole, d), (part, e) = link.whole, link.part
            if part == OUT and e == at.dim:
                # A part of a sharded axis.
                position = Position(d, 1, at.inner)
                word = self.positions.get(op.value(whole), {}).get(position)  # type: ignore[arg-type]
                if at.outer != 1 or word is None or _inside(leaves(word), link, at.inner) != out:
                    yield None, None, out
                else:
                    yield whole, position, leaves(word)
            elif whole == OUT and d == at.dim:
                inside = _inside(out, link, at.inner)
                if at.outer != 1 or inside is None:
                    yield None, None, out
                else:
                    yield part, Position(e, 1, at.inner), inside


def find_axes(graph: fx.Graph, seeds: Iterable[tuple[fx.Node, Position, Word]] = ()) -> Axes:
    """Find the token axes of a functional ATen graph whose nodes carry ``meta["val"]``. Changes nothing in it.

    Args:
        graph: the graph.
        seeds: places, besides its attentions, where an axis is known to lie.
    """
    axes = Axes(graph)
    spread = _Spread(axes)
    for value, at, word in seeds:
        spread.tie(value, at, word)
    for node in graph.nodes:
        if node.target is ATTENTION:
            op = axes.ops[node]
            for slot in ("query", "key"):
                source, rank = op.value(slot), len(op.shape(slot))
                rows = op.shape(slot)[rank - 2]
                if source is not None and not (equal(rows, 1) or equal(rows, 0)):
                    spread.tie(source, Position(rank - 2), (Segment(rows),))
    spread.run()
    return axes


class _Spread:
    """The work list: nodes whose values have got a position that their links have not yet carried on."""

    def __init__(self, axes: Axes):
        self.axes = axes
        self.queue: deque[fx.Node] = deque()
        self.queued: set[fx.Node] = set()

    def run(self) -> None:
        while self.queue:
            node = self.queue.popleft()
            self.queued.discard(node)
            for link in self.axes.relations[node].links:
                self._carry(link, self.axes.ops[node])

    def _enqueue(self, node: fx.Node) -> None:
        if node in self.axes.relations and node not in self.queued:
            self.queued.add(node)
            self.queue.append(node)

    def tie(self, value: fx.Node, at: Position, word: Word) -> None:
        """An axis lies here: make it one with what is already known to lie here."""
        size = shape_of(value)[at.dim]
        if not word or equal(size, 0) or not equal(size, product((at.outer, total(word), at.inner))):
            return
        known = self.axes.positions.setdefault(value, {})
        if at in known:
            if not unify(known[at], word):
                self.axes.conflicts.append(Conflict(value, at))
            return
        known[at] = word
        self._enqueue(value)
        for user in value.users:
            self._enqueue(user)

    def _carry(self, link: Link, op: Op) -> None:
        known = self.axes.positions
        if isinstance(link, Same):
            for slot, d in link.ends:
                value = op.value(slot)
                for at, word in list(known.get(value, {}).items()):  # type: ignore[arg-type]
                    if at.dim == d:
                        for other, e in link.ends:
                            if (other, e) != (slot, d):
                                self.tie(op.value(other), Position(e, at.outer, at.inner), word)  # type: ignore[arg-type]
        elif isinstance(link, Reshape):
            for a, b in ((OUT, link.slot), (link.slot, OUT)):
                for at, word in list(known.get(op.value(a), {}).items()):  # type: ignore[arg-type]
                    moved = through_reshape(at, op.shape(a), op.shape(b))
                    if moved is not None:
                        self.tie(op.value(b), moved, word)  # type: ignore[arg-type]
        elif isinstance(link, Spread):
            source = op.value(link.slot)
            for at, word in list(known.get(source, {}).items()):  # type: ignore[arg-type]
                if at.dim == link.dim:
                    self.tie(op.node, Position(link.out, at.outer, product((at.inner, link.times))), word)
            for at, word in list(known.get(op.node, {}).items()):
                inner = quotient(at.inner, link.times)
                if at.dim == link.out and inner is not None:
                    self.tie(source, Position(link.dim, at.outer, inner), word)  # type: ignore[arg-type]
        elif isinstance(link, Concat):
            self._carry_concat(link, op)
        elif isinstance(link, Part):
            self._carry_part(link, op)

    def _carry_concat(self, link: Concat, op: Op) -> None:
        known = self.axes.positions
        pieces = [(op.value(slot), d, op.shape(slot)[d]) for slot, d in link.pieces]
        for value, d, _ in pieces:
            for at in list(known.get(value, {})):  # type: ignore[arg-type]
                if at.dim == d and at.outer == 1:
                    words = [self._word_or_new(v, Position(e, 1, at.inner), n) for v, e, n in pieces]
                    if all(w is not None for w in words):
                        self.tie(op.node, Position(link.dim, 1, at.inner), sum(words, ()))  # type: ignore[arg-type]
        for at, word in list(known.get(op.node, {}).items()):
            if at.dim == link.dim and at.outer == 1:
                rest = word
                for value, d, size in pieces:
                    rows = quotient(size, at.inner)
                    halves = None if rows is None else cut(rest, rows)
                    if halves is None:
                        break
                    self.tie(value, Position(d, 1, at.inner), halves[0])  # type: ignore[arg-type]
                    rest = halves[1]

    def _word_or_new(self, value: Any, at: Position, size: Size) -> Word | None:
        known = self.axes.positions.get(value, {}).get(at)
        if known is not None:
            return known
        rows = quotient(size, at.inner)
        if rows is None:
            return None
        word = (Segment(rows),)
        self.tie(value, at, word)
        return word

    def _carry_part(self, link: Part, op: Op) -> None:
        (whole, d), (part, e) = link.whole, link.part
        outer, inner = op.value(whole), op.value(part)
        for at, word in list(self.axes.positions.get(outer, {}).items()):  # type: ignore[arg-type]
            if at.dim == d and at.outer == 1:
                pieces = _cut_out(word, link, at.inner)
                if pieces is not None:
                    self.tie(inner, Position(e, 1, at.inner), pieces[1])  # type: ignore[arg-type]
        for at, word in list(self.axes.positions.get(inner, {}).items()):  # type: ignore[arg-type]
            position = Position(d, 1, at.inner)
            if at.dim == e and at.outer == 1 and position not in self.axes.positions.get(outer, {}):  # type: ignore[arg-type]
                start, size = quotient(link.start, at.inner), quotient(op.shape(whole)[d], at.inner)
                if start is None or size is None:
                    continue
                end = start + total(leaves(word))
                before = () if equal(start, 0) else (Segment(start),)
                after = () if equal(end, size) else (Segment(size - end),)
                self.tie(outer, position, (*before, *word, *after))  # type: ignore[arg-type]


def _cut_out(word: Word, link: Part, inner: Size) -> tuple[Word, Word, Word] | None:
    """The word before, in and after a part, with boundaries made where there are none."""
    start, stop = quotient(link.start, inner), quotient(link.stop, inner)
    if start is None or stop is None:
        return None
    last = cut(word, stop)
    first = None if last is None else cut(last[0], start)
    return None if first is None or last is None else (first[0], first[1], last[1])


def _inside(word: Word, link: Part, inner: Size) -> Word | None:
    """The segments in a part, if boundaries are there."""
    start, stop = quotient(link.start, inner), quotient(link.stop, inner)
    return None if start is None or stop is None else between(word, start, stop)
