"""Lengths in the rewritten graph: a number where it is known, a node where it is not."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import sympy
import torch
from torch import fx

from . import _torch
from .segments import Word
from .sizes import Size, size_of

__all__ = ["Lengths", "known_symbols"]


def known_symbols(placeholders: Iterable[fx.Node]) -> dict[sympy.Symbol, fx.Node]:
    """The symbols that are inputs of a graph: Dynamo passes each length that varies as an input of its own."""
    found: dict[sympy.Symbol, fx.Node] = {}
    for node in placeholders:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            expression = value.node.expr
            if isinstance(expression, sympy.Symbol):
                found.setdefault(expression, node)
    return found


class Lengths:
    """Turns sizes into what a graph holds, each once.

    Nodes stand as early as can be, before any use: right after the placeholders, or after the value whose length only
    the data told (the rows that a mask selects).
    """

    def __init__(self, graph: fx.Graph, symbols: dict[sympy.Symbol, fx.Node], last_placeholder: fx.Node | None):
        """``symbols`` are the placeholders of ``graph`` itself."""
        self.graph = graph
        self.symbols = symbols
        self.last = [last_placeholder]
        self.place: dict[fx.Node, int] = {}
        self.known: dict[Any, fx.Node] = {}

    def learn(self, value: Any, node: fx.Node) -> None:
        """Take note of lengths that ``value``, which ``node`` of this graph computes, is the first to have."""
        if isinstance(value, torch.SymInt):
            self._bind(size_of(value), node)
        elif isinstance(value, torch.Tensor):
            for d, size in enumerate(value.shape):
                size = size_of(size)
                if isinstance(size, sympy.Symbol) and size not in self.symbols:
                    with self.graph.inserting_after(node):
                        self._bind(size, self.graph.call_function(torch.ops.aten.sym_size.int, (node, d)))

    def _bind(self, size: Size, node: fx.Node) -> None:
        if isinstance(size, sympy.Symbol) and size not in self.symbols:
            self.symbols[size] = node
            self.place[node] = len(self.last)
            self.last.append(node)

    def of(self, size: Size) -> int | fx.Node:
        """A size of the analysis as the graph holds it."""
        size = size_of(size)
        if isinstance(size, int):
            return size
        if size not in self.known:
            proxies = {s: fx.Proxy(n, _Tracer(self)) for s, n in self.symbols.items()}
            out = _torch.sympy_interp(_torch.PythonReferenceAnalysis, proxies, size)
            self.known[size] = out.node
        return self.known[size]

    def knows(self, size: Size) -> bool:
        """Whether a size can be computed from the graph's inputs, and from what was learnt."""
        return isinstance(size, int) or size.free_symbols <= self.symbols.keys()

    def depends_on_data(self, word: Word) -> bool:
        """Whether a segment's length was learnt in the midst of the graph."""
        nodes = (self.of(segment.length) for segment in word)
        return any(isinstance(n, fx.Node) and self.place.get(n, 0) > 0 for n in nodes)

    def add(self, a: Any, b: Any) -> Any:
        """``a + b``."""
        return self._call(operator.add, a, b)

    def times(self, a: Any, b: Any) -> Any:
        """``a * b``."""
        if isinstance(a, int) and a == 1:
            return b
        return a if isinstance(b, int) and b == 1 else self._call(operator.mul, a, b)

    def ceildiv(self, size: Size, parts: int) -> Any:
        """``size / parts`` rounded up."""
        return self._call(operator.floordiv, self._call(operator.add, self.of(size), parts - 1), parts)

    def _call(self, function: Callable[..., Any], a: Any, b: Any) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return function(a, b)
        key = (function, a, b)
        if key not in self.known:
            self.known[key] = self.create(function, (a, b), {})
        return self.known[key]

    def create(self, function: Any, args: Any, kwargs: Any) -> fx.Node:
        """A node after the last one made for the lengths that it is made of."""
        place = max((self.place.get(a, 0) for a in args if isinstance(a, fx.Node)), default=0)
        last = self.last[place]
        assert last is not None, "a length that varies without an input that says so"
        with self.graph.inserting_after(last):
            node = self.graph.call_function(function, args, kwargs)
        self.last[place], self.place[node] = node, place
        return node


class _Tracer(fx.Tracer):
    """Writes the nodes of an expression where lengths belong."""

    def __init__(self, lengths: Lengths):
        super().__init__()
        self.graph = lengths.graph
        self.lengths = lengths

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> fx.Node:
        return self.lengths.create(target, args, kwargs)
