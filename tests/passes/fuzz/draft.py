"""A forward pass that is drawn while it first runs, and does the same in every later run.

The code of a random model is plain torch code that asks its :class:`Forward` for choices and tensors. In the first run
choices come from outside (hypothesis) and tensors from a generator, and both are kept; later runs (the reference, the
capture) replay them, so that the model is a function of its tensors and of nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["Forward", "Model", "Pick", "draw_model"]

T = TypeVar("T")
Pick = Callable[[Sequence[Any]], Any]
Program = Callable[["Forward"], list[Tensor]]


class Forward:
    """One run of a model: with ``pick``, which draws one of several, choices and inputs are made, else replayed."""

    def __init__(self, pick: Pick | None, choices: list[Any], inputs: list[Tensor]):
        self.pick, self.choices, self.inputs = pick, choices, inputs
        self._choice: Iterator[Any] = iter(choices)
        self._input: Iterator[Tensor] = iter(inputs)
        self.kinds: Counter[str] = Counter()

    def of(self, *choices: T) -> T:
        """One of these."""
        if self.pick is None:
            return next(self._choice)
        self.choices.append(self.pick(choices))
        return self.choices[-1]

    def upto(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return self.of(*range(low, high + 1))

    def one(self, values: Sequence[T]) -> T:
        """One of some tensors, say, that a run makes itself."""
        return values[self.upto(0, len(values) - 1)]

    def chance(self, one_in: int = 2) -> bool:
        """True at times; a small example has it false."""
        return self.of(*[False] * (one_in - 1), True)

    def note(self, kind: str) -> None:
        """Count something that the model has."""
        self.kinds[kind] += 1

    def _tensor(self, make: Callable[[torch.Generator], Tensor]) -> Tensor:
        if self.pick is None:
            return next(self._input)
        generator = torch.Generator().manual_seed(len(self.inputs))
        self.inputs.append(make(generator))
        return self.inputs[-1].detach().clone()  # the model may write to it

    def tensor(self, *shape: int, scale: float = 1.0, trained: bool = True) -> Tensor:
        """An input of normal numbers."""

        def make(generator: torch.Generator) -> Tensor:
            x = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
            return x.requires_grad_(trained)

        return self._tensor(make)

    def weight(self, out: int, inner: int) -> Tensor:
        """A weight that keeps the size of values."""
        return self.tensor(out, inner, scale=inner**-0.5)

    def index(self, *shape: int, below: int) -> Tensor:
        """An input of whole numbers."""
        return self._tensor(lambda g: torch.randint(0, below, shape, generator=g))

    def order(self, n: int) -> Tensor:
        """An input that is a permutation."""
        return self._tensor(lambda g: torch.randperm(n, generator=g))

    def mask(self, *shape: int) -> Tensor:
        """A boolean input, mostly true."""
        return self._tensor(lambda g: torch.rand(shape, generator=g) < 0.7)


@dataclass
class Model:
    """A drawn model: call it with its inputs, as often as you like.

    Attributes:
        program: the code that drew it.
        choices: what was chosen.
        inputs: its tensors, parameters included.
        kinds: what it has, counted.
    """

    program: Program
    choices: list[Any] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        return self.program(Forward(None, self.choices, list(inputs)))


def draw_model(pick: Pick, program: Program) -> Model:
    """Run a program once with choices of its own."""
    model = Model(program)
    with torch.no_grad():
        first = Forward(pick, model.choices, model.inputs)
        program(first)
    model.kinds = first.kinds
    return model
