"""Gradients of every parameter and input, on every rank, compared with the unmodified model on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("degrees", [{"ulysses": 2}, {"ring": 2}, {"ulysses": 2, "ring": 2}], ids=str)
@pytest.mark.parametrize(
    "model",
    ["FluxTransformer2DModel", "SD3Transformer2DModel", "WanTransformer3DModel", "LatteTransformer3DModel"],
)
def test_gradients_are_those_of_one_process(ranks, model, degrees):
    world = degrees.get("ulysses", 1) * degrees.get("ring", 1)
    answers = ranks(world).run(gradients, model, degrees, timeout=300.0)
    for rank, answer in enumerate(answers):
        assert answer["missing"] == [], rank
        assert answer["worst"] <= 1e-5, (rank, answer["where"], answer["worst"])
    assert len({a["digest"] for a in answers}) == 1, "ranks hold different gradients"


def test_uneven_lengths_have_exact_gradients_too(ranks):
    for answer in ranks(3).run(gradients, "FluxTransformer2DModel", {"ring": 3}, timeout=300.0):
        assert answer["missing"] == [] and answer["worst"] <= 1e-5, answer


def gradients(name: str, degrees: dict[str, Any]) -> dict[str, Any]:
    """Worst error of any gradient of one zoo case, run on each rank."""
    from cp_compile import cp_backend
    from cp_compile.agreement import digest
    from cp_compile.zoo import case

    wanted = _grads(case(name).model(), case(name).kwargs())
    backend = cp_backend(**{"inner": "aot_eager", **degrees})
    model = case(name).model()
    found = _grads(model, case(name).kwargs(), torch.compile(model, backend=backend))
    # Some gradients are zero but for rounding (a softmax does not feel a key's bias): relative to the largest of all.
    scale = max(g.abs().max().item() for g in wanted.values() if g is not None)
    errors = {
        k: ((found[k] - g).abs().max() / max(g.abs().max().item(), 1e-3 * scale)).item()  # type: ignore[operator]
        for k, g in wanted.items()
        if g is not None and found[k] is not None
    }
    worst = max(errors, key=lambda k: errors[k])
    return {
        "missing": [k for k, g in wanted.items() if (g is None) != (found[k] is None)],
        "worst": errors[worst],
        "where": worst,
        "digest": digest(found),
    }


def _grads(model: torch.nn.Module, inputs: dict[str, Any], run: Any = None) -> dict[str, torch.Tensor | None]:
    leaves = [x for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    for x in leaves:
        x.requires_grad_(x.dim() > 1)
    outputs = [x for x in pytree.tree_leaves((run or model)(**inputs)) if isinstance(x, torch.Tensor)]
    loss = torch.zeros(())
    for i, out in enumerate(outputs):
        loss = loss + (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(i))).sum()
    loss.backward()
    named = {k: p.grad for k, p in model.named_parameters()}
    return {**named, **{f"input {i}": x.grad for i, x in enumerate(leaves)}}
