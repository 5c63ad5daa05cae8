"""What an op does with the dims of its tensors: the language in which rules are written.

A rule answers one question about a node: *which index of an input does an index of the output come from?* It answers
with links between dims. Everything else (which dims can be the token axis, whether the op can run on a shard, what its
local sizes are) follows from the links and is worked out once, for all ops, in ``axes`` and ``rewrite``.

A dim of the output without a link cannot be sharded (a softmax's dim, a convolution's pixels); an input without a link
to the sharded dim is needed whole (a weight).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from .sizes import Size, divides, equal, less, product, quotient, size_of

__all__ = ["OUT", "Concat", "Link", "Op", "Part", "Position", "Relation", "Reshape", "Same", "Slot", "Spread"]

Slot = str | tuple[str, int]
"""An input of an op by its schema's argument name, with an index where the argument is a list; or ``OUT``."""

OUT: Slot = "<out>"


class Position(NamedTuple):
    """Where an axis lies in a value: dim ``dim`` runs over ``outer * length * inner`` indices, the axis in the middle.

    ``outer`` and ``inner`` are 1 unless views have merged the axis with a batch or head dim.
    """

    dim: int
    outer: Size = 1
    inner: Size = 1


@dataclass(frozen=True)
class Same:
    """Dims that run over the same index: ``(slot, dim)`` of inputs and of the output."""

    ends: tuple[tuple[Slot, int], ...]


@dataclass(frozen=True)
class Reshape:
    """The output holds the input's elements in the same order under another shape."""

    slot: Slot


@dataclass(frozen=True)
class Concat:
    """Dim ``dim`` of the output is the concatenation of the pieces' dims."""

    dim: int
    pieces: tuple[tuple[Slot, int], ...]


@dataclass(frozen=True)
class Part:
    """Dim ``whole`` contains dim ``part`` as its rows from ``start`` to ``stop``; each is ``(slot, dim)``."""

    whole: tuple[Slot, int]
    part: tuple[Slot, int]
    start: Size
    stop: Size


@dataclass(frozen=True)
class Spread:
    """Each index of dim ``dim`` of the input stands ``times`` times in a row in dim ``out`` of the output."""

    slot: Slot
    dim: int
    out: int
    times: Size


Link = Same | Reshape | Concat | Part | Spread


@dataclass(frozen=True)
class Relation:
    """A rule's answer for one node.

    Attributes:
        links: how dims correspond.
        free: dims of the output that the op makes at any length (of ``full``, or expanded from one).
        sums: groups of input dims that the op sums over together, linearly: partial sums may be added.
        ignored: inputs of which only dtype or device matters.
        reason: why dims without a link are needed whole, as one would say it to a user.
    """

    links: tuple[Link, ...] = ()
    free: frozenset[int] = frozenset()
    sums: tuple[tuple[tuple[Slot, int], ...], ...] = ()
    ignored: frozenset[Slot] = frozenset()
    reason: str = "it mixes tokens"


@dataclass(frozen=True)
class Op:
    """A node with its arguments bound by name and its shapes as sizes."""

    node: fx.Node
    args: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, node: fx.Node) -> Op:
        """Bind the arguments of a call of an ATen op by its schema, defaults included."""
        args: dict[str, Any] = {}
        for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
            if i < len(node.args):
                args[argument.name] = node.args[i]
            elif argument.name in node.kwargs:
                args[argument.name] = node.kwargs[argument.name]
            elif argument.has_default_value():
                args[argument.name] = argument.default_value
        return cls(node, args)

    def inputs(self) -> Iterator[tuple[Slot, fx.Node]]:
        """Every tensor input, list members included."""
        for name, value in self.args.items():
            if is_tensor(value):
                yield name, value
            elif isinstance(value, (list, tuple)):
                for i, member in enumerate(value):
                    if is_tensor(member):
                        yield (name, i), member

    def value(self, slot: Slot) -> fx.Node | None:
        """The node in a slot, or None if the argument is not a tensor."""
        if slot == OUT:
            return self.node
        value = self.args[slot[0]][slot[1]] if isinstance(slot, tuple) else self.args[slot]
        return value if is_tensor(value) else None

    def shape(self, slot: Slot = OUT) -> tuple[Size, ...]:
        """Global shape of a tensor input or of the output."""
        value = self.value(slot)
        if value is None:
            raise ValueError(f"argument {slot!r} of {self.node} is not a tensor")
        return shape_of(value)

    def dim(self, name: str, rank: int) -> int:
        """A dim argument, counted from the front."""
        return self.args[name] % rank if rank else 0


def is_tensor(value: Any) -> bool:
    """Whether a node's value is one tensor."""
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def shape_of(node: fx.Node) -> tuple[Size, ...]:
    """Global shape of a node's tensor."""
    return tuple(size_of(s) for s in node.meta["val"].shape)


def through_reshape(at: Position, before: tuple[Size, ...], after: tuple[Size, ...]) -> Position | None:
    """Where an axis lies after a view, or None if the view cuts the axis itself.

    An axis is a run of strides: index ``i`` of it moves ``inner`` elements of the flat tensor. The view keeps the flat
    order, so the axis lies in the dim whose strides contain that run.
    """
    length = quotient(before[at.dim], at.outer * at.inner)
    if length is None:
        return None
    low = product((at.inner, *before[at.dim + 1 :]))
    high = product((low, length))
    stride: Size = 1
    for d in reversed(range(len(after))):
        top = product((stride, after[d]))
        if equal(length, 1):
            # An axis of one row lies in the dim of size 1 that stands where it stood.
            if equal(after[d], 1) and equal(stride, low):
                return Position(d)
        elif divides(stride, low) and divides(high, top) and not equal(after[d], 1):
            inner, outer = quotient(low, stride), quotient(top, high)
            if inner is not None and outer is not None:
                return Position(d, outer, inner)
        if less(low, top):
            return None
        stride = top
    return None
