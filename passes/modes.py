"""The ways in which a node can run on a shard, and the choice of one way a node.

A node whose value has the token axis at one position has one way. A value can have it at several: a mask in its rows
and in its columns, the trunk of a video model along space and along time. Then the way is chosen by which axis comes
first (the plan tries each) and, for one axis at two dims, by what the node's users want.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from .axes import Axes
from .relation import OUT, Position, Slot
from .rules.attention import ATTENTION
from .segments import Segment, Word, leaves

__all__ = ["Mode", "axis_groups", "choose_modes", "modes_of"]


@dataclass(frozen=True)
class Mode:
    """One way to run a node on a shard.

    Attributes:
        out: where its value is then sharded; None if the value is whole on every rank (partial sums, added up).
        needs: inputs that must be sharded, and where.
        word: the axis.
        attends: the node is an attention over this axis, so its keys and values may be sharded or whole.
        keys: where keys and values are sharded if they are, and their axis.
    """

    out: Position | None
    needs: dict[Slot, Position]
    word: Word
    attends: bool = False
    keys: tuple[Position, Word] | None = None


def modes_of(axes: Axes, node: fx.Node) -> list[Mode]:
    """All ways in which a node can run on a shard."""
    relation = axes.relations.get(node)
    if relation is None:
        return []
    found = []
    for at in axes.positions.get(node, ()):
        needs = axes.inputs_at(node, at)
        if needs is None:
            continue
        if node.target is ATTENTION and at.dim == len(axes.ops[node].shape()) - 2:
            mode = _attending(axes, node, at, needs)
            if mode is not None:
                found.append(mode)
        else:
            found.append(Mode(at, needs, axes.word(node, at)))
    found += _partial(axes, node)
    return found


def _attending(axes: Axes, node: fx.Node, at: Position, needs: dict[Slot, Position]) -> Mode | None:
    if (at.outer, at.inner) != (1, 1):
        return None
    op = axes.ops[node]
    key = Position(len(op.shape("key")) - 2)
    words = [axes.positions.get(op.value(s), {}).get(key) for s in ("key", "value")]  # type: ignore[arg-type]
    known = words[0] is not None and words[1] is not None and leaves(words[0]) == leaves(words[1])
    return Mode(at, needs, axes.word(node, at), True, (key, leaves(words[0])) if known else None)  # type: ignore[arg-type]


def _partial(axes: Axes, node: fx.Node) -> list[Mode]:
    op, relation = axes.ops[node], axes.relations[node]
    found = []
    for ends in relation.sums:
        slot, d = ends[0]
        for at, word in axes.positions.get(op.value(slot), {}).items():  # type: ignore[arg-type]
            if at.dim != d:
                continue
            needs = {s: Position(e, at.outer, at.inner) for s, e in ends}
            words = [axes.positions.get(op.value(s), {}).get(p) for s, p in needs.items()]  # type: ignore[arg-type]
            if all(w is not None and leaves(w) == leaves(word) for w in words):
                found.append(Mode(None, needs, leaves(word)))
    return found


def axis_groups(axes: Axes) -> dict[Segment, int]:
    """Number the axes: segments that stand in one word belong to one axis."""
    parent: dict[Segment, Segment] = {}

    def root(s: Segment) -> Segment:
        while parent.setdefault(s, s) is not s:
            s = parent[s]
        return s

    for word in (leaves(w) for known in axes.positions.values() for w in known.values()):
        for segment in word[1:]:
            parent[root(segment)] = root(word[0])
        root(word[0])
    numbers: dict[Segment, int] = {}
    return {s: numbers.setdefault(root(s), len(numbers)) for s in list(parent)}


def choose_modes(
    axes: Axes, candidates: dict[fx.Node, list[Mode]], groups: dict[Segment, int], order: Sequence[int]
) -> dict[fx.Node, Mode]:
    """One mode for each node that has any.

    Args:
        axes: the analysis.
        candidates: all modes of each node, in the graph's order.
        groups: the axis of each segment.
        order: axes by precedence, first first.
    """
    place = {group: i for i, group in enumerate(order)}
    chosen: dict[fx.Node, Mode] = {}
    wanted: dict[fx.Node, dict[Position, int]] = {}
    for node in reversed(candidates):
        modes = candidates[node]
        if not modes:
            continue
        votes = wanted.get(node, {})
        mode = min(
            modes,
            key=lambda m: (
                m.out is None,
                place[groups[m.word[0]]],
                -votes.get(m.out, 0) if m.out else 0,
                m.out.dim if m.out else 0,
            ),
        )
        chosen[node] = mode
        needs = dict(mode.needs)
        if mode.keys:
            needs |= {"key": mode.keys[0], "value": mode.keys[0]}
        for slot, at in needs.items():
            if slot != OUT:
                value = axes.ops[node].value(slot)
                if value is not None:
                    ballot = wanted.setdefault(value, {})
                    ballot[at] = ballot.get(at, 0) + 1
    return chosen
