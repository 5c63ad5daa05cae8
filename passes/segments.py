"""Segments: the pieces of a token axis, shared by every value that carries them.

Concatenating text and image tokens makes an axis of two segments; slicing them apart gives each one back. A slice at a
boundary that is not there yet cuts a segment in two, everywhere at once. Two values that meet in one op share their
axis: their segments are united under the coarsest cut that refines both. So a segment is a node of a union-find whose
sets can also be split.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .sizes import Size, at_most, equal

__all__ = ["Segment", "Word", "between", "cut", "leaves", "total", "unify"]


class Segment:
    """A run of rows. After :func:`unify` and :func:`cut` it may stand for another segment, or for several."""

    __slots__ = ("_stands_for", "length", "number")
    _count = 0

    def __init__(self, length: Size):
        self.length = length
        self._stands_for: tuple[Segment, ...] | None = None
        Segment._count += 1
        self.number = Segment._count

    def leaves(self) -> tuple[Segment, ...]:
        """What the segment stands for now: segments that stand for themselves."""
        if self._stands_for is None:
            return (self,)
        flat = tuple(leaf for part in self._stands_for for leaf in part.leaves())
        self._stands_for = flat  # path compression: the next question is answered at once
        return flat

    def __repr__(self) -> str:
        return f"s{self.number}[{self.length}]"


Word = tuple[Segment, ...]
"""An axis: segments in order."""


def leaves(word: Iterable[Segment]) -> Word:
    """The word with every segment replaced by what it stands for."""
    return tuple(leaf for segment in word for leaf in segment.leaves())


def total(word: Sequence[Segment]) -> Size:
    """Rows of the whole word."""
    return sum(s.length for s in word)


def _split(segment: Segment, at: Size) -> tuple[Segment, Segment]:
    left, right = Segment(at), Segment(segment.length - at)
    segment._stands_for = (left, right)
    return left, right


def cut(word: Word, at: Size) -> tuple[Word, Word] | None:
    """The word in two parts, the first of ``at`` rows, cutting a segment if no boundary is there.

    Returns:
        None, with nothing changed, if it is not known where the boundary lies.
    """
    rest = list(leaves(word))
    left: list[Segment] = []
    while rest and not equal(at, 0):
        head = rest[0]
        if at_most(head.length, at):
            left.append(rest.pop(0))
            at = at - head.length
        elif at_most(at, head.length):
            a, b = _split(head, at)
            left.append(a)
            rest[0] = b
            at = 0
        else:
            return None
    return (tuple(left), tuple(rest)) if equal(at, 0) else None


def between(word: Word, start: Size, stop: Size) -> Word | None:
    """The segments from row ``start`` to row ``stop``, or None if a boundary is missing. Cuts nothing."""
    found: list[Segment] = []
    at: Size = 0
    begun = equal(start, 0)
    for segment in leaves(word):
        if begun and equal(at, stop):
            break
        if begun:
            found.append(segment)
        at = at + segment.length
        begun = begun or equal(at, start)
    return tuple(found) if begun and equal(at, stop) else None


def unify(a: Word, b: Word) -> bool:
    """Make two words of equal length one, segment by segment, under their common refinement.

    Returns:
        False, with nothing changed, if the lengths are not known to be equal, a boundary cannot be placed, or one word
        is the other shifted (a segment would have to equal its own neighbour).
    """
    a, b = leaves(a), leaves(b)
    if a == b:
        return True
    if not equal(total(a), total(b)):
        return False
    pairs = _align(a, b)
    if pairs is None:
        return False
    # A segment may be paired with itself or with segments of the other word only: any other pairing (a row with its
    # neighbour) would cut the axis row by row.
    of_a, of_b = set(a), set(b)
    for x, y in pairs:
        if x is not y and (x in of_b or y in of_a):
            return False
    rest_a, rest_b = list(a), list(b)
    while rest_a and rest_b:
        rest_a[:1], rest_b[:1] = rest_a[0].leaves(), rest_b[0].leaves()  # an earlier turn may have cut this one too
        x, y = rest_a.pop(0), rest_b.pop(0)
        if not equal(x.length, y.length):
            if at_most(x.length, y.length):
                y, tail = _split(y, x.length)
                rest_b.insert(0, tail)
            else:
                x, tail = _split(x, y.length)
                rest_a.insert(0, tail)
        if x is not y:
            y._stands_for = (x,)
    return True


def _align(a: Word, b: Word) -> list[tuple[Segment, Segment]] | None:
    """Which segments overlap when the words are laid side by side; None if a boundary cannot be placed."""
    pairs = []
    i = j = 0
    left, right = a[0].length, b[0].length
    while True:
        pairs.append((a[i], b[j]))
        if equal(left, right):
            i, j = i + 1, j + 1
            if i == len(a) or j == len(b):
                return pairs
            left, right = a[i].length, b[j].length
        elif at_most(left, right):
            right, i = right - left, i + 1
            left = a[i].length
        elif at_most(right, left):
            left, j = left - right, j + 1
            right = b[j].length
        else:
            return None
