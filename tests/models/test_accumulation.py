"""Gradient accumulation: the ranks' gradients are summed once for several backwards, and are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.test_variants import Decoder

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("degrees", [{"ulysses": 2}, {"ring": 2}], ids=str)
def test_accumulated_gradients_are_those_of_one_process(ranks, degrees):
    answers = ranks(2).run(_accumulate, _flux, degrees, "aot_eager", timeout=300.0)
    for error, early, _, reduces in answers:
        assert error <= 1e-11
        assert early <= 1e-11, "a parameter had a part of its gradient before the sum"
        # A step that sums its own, two that wait, and one that sums three.
        assert reduces == [1, 0, 0, 1]
    assert len({digest for _, _, digest, _ in answers}) == 1


def test_dropped_gradients_are_gone(ranks):
    for error in ranks(2).run(_dropped, timeout=300.0):
        assert error <= 1e-11


@pytest.mark.inductor
def test_accumulation_through_inductor(ranks):
    for error, _, _, reduces in ranks(2).run(_accumulate, _decoder, {"ulysses": 2}, "inductor", timeout=600.0):
        assert error <= 1e-11
        assert reduces == [1, 0, 0, 1]


class _Reduces(TorchDispatchMode):
    """Counts all-reduces."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "all_reduce" in str(func)
        return func(*args, **(kwargs or {}))


Make = Callable[[], tuple[torch.nn.Module, Callable[[int], dict[str, Any]]]]


def _flux() -> tuple[torch.nn.Module, Callable[[int], dict[str, Any]]]:
    from cp_compile import zoo

    case = zoo.case("FluxTransformer2DModel")
    return case.model(dtype=torch.float64), lambda seed: case.kwargs(seed, torch.float64)


def _decoder() -> tuple[torch.nn.Module, Callable[[int], dict[str, Any]]]:
    torch.manual_seed(0)

    def inputs(seed: int) -> dict[str, Any]:
        return {"x": torch.randn(2, 13, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))}

    return Decoder().double(), inputs


def _step(run: Any, inputs: dict[str, Any]) -> int:
    """One forward and backward; returns how often it reduced."""
    out = run(**inputs)[0]
    loss = (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(5))).sum()
    with _Reduces() as seen:
        loss.backward()
    return seen.count


def _grads(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


def _accumulate(make: Make, degrees: dict[str, int], inner: str) -> tuple[float, float, str, list[int]]:
    from cp_compile import cp_backend
    from cp_compile.agreement import digest, relative_error

    (plain, inputs), (model, _) = make(), make()
    backend = cp_backend(**degrees, inner=inner)
    compiled = torch.compile(model, backend=backend)
    reduces, wanted = [], []
    for step in range(4):
        _step(plain, inputs(step))
        wanted.append(_grads(plain))
        with backend.no_sync() if step in (1, 2) else nullcontext():
            reduces.append(_step(compiled, inputs(step)))
        if step == 2:  # a gradient misses both steps, or none: nothing of a part is there
            early = max(min(relative_error([g], [wanted[s][k]]) for s in (0, 2)) for k, g in _grads(model).items())
    found = _grads(model)
    assert found.keys() == wanted[-1].keys()
    return relative_error(found, wanted[-1]), early, digest(found), reduces


def _dropped() -> float:
    from cp_compile import cp_backend
    from cp_compile.agreement import relative_error

    (plain, inputs), (model, _) = _decoder(), _decoder()
    backend = cp_backend(ulysses=2, inner="aot_eager")
    compiled = torch.compile(model, backend=backend)
    with backend.no_sync():
        _step(compiled, inputs(0))
    backend.drop_gradients()
    model.zero_grad()  # the gradients of parameters that need no sum are in ``p.grad`` at once
    _step(compiled, inputs(1))
    _step(plain, inputs(1))
    return relative_error(_grads(model), _grads(plain))
