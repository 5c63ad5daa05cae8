"""Gradient accumulation: one sum over the ranks for several backwards.

The gradients of most parameters are partial on each rank (see docs/training.md), and a compiled backward ends by
summing them. Under :meth:`Accumulation.no_sync` a variant of the program runs that leaves them partial: they wait here,
and the next backward outside of it sums what waits together with its own. That is ``no_sync`` of
DistributedDataParallel, but for ``p.grad``, which holds nothing of the waiting steps until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from . import collectives

__all__ = ["Accumulation", "Partial"]

Compiled = Callable[..., Any]
Partial = tuple[Compiled, Sequence[int]]
"""A program that leaves gradients partial, and which of its arguments these are the gradients of."""


class Accumulation:
    """Partial gradients that wait to be summed over the ranks."""

    def __init__(self) -> None:
        self._deferring = False
        self._waiting: dict[int, tuple[Tensor, Tensor]] = {}  # by id of the parameter, which is kept

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Calls in here leave the gradients of parameters for the first backward of a call outside to sum."""
        before, self._deferring = self._deferring, True
        try:
            yield
        finally:
            self._deferring = before

    def drop(self) -> None:
        """Forget the gradients that wait, as when a step is skipped."""
        self._waiting.clear()

    def choose(self, summing: Compiled, build: Callable[[], Partial], group: str) -> Compiled:
        """A function that runs ``summing`` or, while gradients wait or are to, a program that leaves them partial.

        Args:
            summing: the program that sums its gradients itself.
            build: compiles the other one, when it is first needed.
            group: name of the group of all ranks.
        """
        build = cache(build)

        def run(*args: Any) -> Any:
            if not self._deferring and not self._waiting:
                return summing(*args)
            partial, parameters = build()
            mine = list(args)
            held = cast(Sequence[Tensor], _Hold.apply(self, self._deferring, group, *(args[i] for i in parameters)))
            for i, parameter in zip(parameters, held):
                mine[i] = parameter
            return partial(*mine)

        return run

    def add(self, parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Let partial gradients wait."""
        for parameter, grad in zip(parameters, grads):
            if grad is not None:
                before = self._waiting.get(id(parameter))
                self._waiting[id(parameter)] = parameter, grad if before is None else before[1] + grad

    def take(self, parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Partial gradients, with those that waited added."""
        waited = [self._waiting.pop(id(parameter), None) for parameter in parameters]
        return [a if b is None else b[1] if a is None else a + b[1] for a, b in zip(grads, waited)]


class _Hold(torch.autograd.Function):
    """Parameters on their way into a program that leaves their gradients partial."""

    @staticmethod
    def forward(ctx: Any, waiting: Accumulation, defer: bool, group: str, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.waiting, ctx.defer, ctx.group, ctx.parameters = waiting, defer, group, parameters
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if ctx.defer:
            ctx.waiting.add(ctx.parameters, grads)
            return None, None, None, *(None for _ in grads)
        whole = collectives.sum_in_buckets(ctx.waiting.take(ctx.parameters, grads), ctx.group)
        return None, None, None, *whole
