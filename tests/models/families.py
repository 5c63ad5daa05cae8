"""Public model classes other than diffusion transformers: language models, vision, UNets, autoencoders.

Each case is a function that builds a tiny module and one that draws its inputs, registered under a name. A case serves
:func:`tests.compare.compare` as a case of the zoo does:

    compare_family(pool, "llama", ulysses=2, ring=2).check()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cp_compile.zoo import randomise
from tests.compare import Comparison, compare
from tests.ranks import Pool

__all__ = ["Draw", "Family", "compare_family", "family", "names", "register"]


class Draw:
    """Inputs from a seed.

    Args:
        seed: the same seed gives the same numbers.
        dtype: of floating inputs.
    """

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def numbers(self, *shape: int) -> Tensor:
        """Normal floating numbers."""
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def ids(self, *shape: int, below: int = 96) -> Tensor:
        """Whole numbers from 1."""
        return torch.randint(1, below, shape, generator=self.generator)


@dataclass(frozen=True)
class Family:
    """One model and its inputs.

    Attributes:
        name: of the case.
        build: makes the module.
        inputs: draws the arguments of ``forward``.
        training: the module is in training mode.
        tolerance: largest relative error in fp32; more than usual only where the model itself amplifies rounding.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[Draw], dict[str, Any]]
    training: bool = False
    tolerance: float = 1e-5

    def __reduce__(self) -> Any:
        return family, (self.name,)  # functions made in place cannot be pickled; a rank looks the case up

    def model(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The module on CPU, every parameter drawn at random from ``seed``."""
        torch.manual_seed(seed)  # buffers that are drawn
        model = self.build()
        randomise(model, seed)
        return model.to(dtype).train(self.training)

    def kwargs(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """Fresh arguments of ``forward``."""
        return self.inputs(Draw(seed, dtype))


_FAMILIES: dict[str, Family] = {}


def register(
    name: str, build: Callable[[], nn.Module], inputs: Callable[[Draw], dict[str, Any]], **options: Any
) -> None:
    """Adds a case; ``options`` are further fields of :class:`Family`."""
    assert name not in _FAMILIES, name
    _FAMILIES[name] = Family(name, build, inputs, **options)


def _registered() -> dict[str, Family]:
    # Here, not at the top: these modules register their cases with this one.
    from tests.models import family_autoencoders, family_language, family_unets, family_vision  # noqa: F401

    return _FAMILIES


def names() -> list[str]:
    """Names of all cases."""
    return list(_registered())


def family(name: str) -> Family:
    """The case called ``name``."""
    return _registered()[name]


def compare_family(pool: Pool, name: str, *, ulysses: int = 1, ring: int = 1, **options: Any) -> Comparison:
    """Runs one case on every rank of ``pool``: see :func:`tests.compare.compare`."""
    return compare(pool, family(name), ulysses=ulysses, ring=ring, **options)
