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
    """In fp64, where an error of the compiler cannot hide behind the rounding of sums over tokens."""
    # Wan's norms compute in fp32 whatever the dtype of the model.
    tolerance = 1e-6 if model.startswith("Wan") else 1e-11
    world = degrees.get("ulysses", 1) * degrees.get("ring", 1)
    answers = ranks(world).run(gradients, model, degrees, False, False, torch.float64, timeout=300.0)
    for rank, answer in enumerate(answers):
        assert answer["missing"] == [], rank
        assert answer["worst"] <= tolerance, (rank, answer["where"], answer["worst"])
    assert len({a["digest"] for a in answers}) == 1, "ranks hold different gradients"


@pytest.mark.parametrize("degrees", [{"ulysses": 2}, {"ring": 2}], ids=str)
def test_gradients_in_fp32_are_those_of_one_process(ranks, degrees):
    for answer in ranks(2).run(gradients, "FluxTransformer2DModel", degrees, timeout=300.0):
        assert answer["missing"] == [] and answer["worst"] <= 1e-5, answer


def test_uneven_lengths_have_exact_gradients_too(ranks):
    for answer in ranks(3).run(gradients, "FluxTransformer2DModel", {"ring": 3}, timeout=300.0):
        assert answer["missing"] == [] and answer["worst"] <= 1e-5, answer


def test_checkpointed_blocks_recompute_their_collectives(ranks):
    """The tag reaches the partitioner: the all-to-alls of the forward run again in the backward."""
    for (kept, again), answer in ranks(2).run(_checkpointed, timeout=300.0):
        assert answer["missing"] == [] and answer["worst"] <= 1e-5, answer
        # Two blocks, two all-to-alls each, and their two gradients; checkpointed, those of the forward once more.
        assert kept == 8 and kept < again <= 12


def _checkpointed() -> tuple[tuple[int, int], dict[str, Any]]:
    counts = []
    for enabled in (False, True):
        seen: list[str] = []

        def inner(gm: torch.fx.GraphModule, example_inputs: list[Any], seen: list[str] = seen) -> Any:
            seen += [str(n.target) for n in gm.graph.nodes if "all_to_all" in str(n.target)]
            return gm.forward

        torch._dynamo.reset()
        answer = gradients("FluxTransformer2DModel", {"ulysses": 2, "inner": inner}, checkpoint=enabled)
        counts.append(len(seen))
    return (counts[0], counts[1]), answer


def test_only_adapters_are_trained_when_only_they_want_gradients(ranks):
    for answer in ranks(2).run(gradients, "FluxTransformer2DModel", {"ring": 2}, False, True, timeout=300.0):
        assert answer["missing"] == [] and answer["worst"] <= 1e-5, answer


@pytest.mark.parametrize("degrees", [{"ulysses": 2}, {"ring": 2}], ids=str)
def test_fifty_steps_of_adamw_keep_ranks_equal_to_the_bit(ranks, degrees):
    answers = ranks(2).run(_fifty_steps, degrees, timeout=300.0)
    assert len({digest for digest, _ in answers}) == 1
    assert max(error for _, error in answers) <= 1e-4


def _fifty_steps(degrees: dict[str, int]) -> tuple[str, float]:
    """In fp64: AdamW turns the rounding of a gradient that is zero in truth (a key's bias) into a step of full size."""
    from cp_compile import cp_backend
    from cp_compile.agreement import digest, relative_error
    from cp_compile.zoo import case

    name, wide = "DiTTransformer2DModel", torch.float64
    models = [case(name).model(dtype=wide) for _ in range(2)]
    runs = [torch.compile(models[0], backend=cp_backend(**degrees, inner="aot_eager")), models[1]]
    for model, run in zip(models, runs, strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(50):
            (out,) = run(**case(name).kwargs(step, wide))
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
    parameters = [[p.detach() for p in m.parameters()] for m in models]
    return digest(parameters[0]), relative_error(*parameters)


def gradients(
    name: str,
    degrees: dict[str, Any],
    checkpoint: bool = False,
    adapters: bool = False,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Worst error of any gradient of one zoo case, run on each rank.

    Args:
        name: of the case.
        degrees: arguments of ``cp_backend``.
        checkpoint: recompute the blocks' activations in the backward.
        adapters: freeze the model and train LoRA adapters.
        dtype: of parameters and inputs.
    """
    from cp_compile import cp_backend
    from cp_compile.agreement import digest
    from cp_compile.zoo import case

    plain, model = (_prepared(case(name).model(dtype=dtype), checkpoint, adapters) for _ in range(2))
    wanted = _grads(plain, case(name).kwargs(dtype=dtype))
    backend = cp_backend(**{"inner": "aot_eager", **degrees})
    found = _grads(model, case(name).kwargs(dtype=dtype), torch.compile(model, backend=backend))
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


def _prepared(model: Any, checkpoint: bool, adapters: bool) -> Any:
    if checkpoint:
        model.enable_gradient_checkpointing()
        model.train()
    if adapters:
        from peft import LoraConfig

        torch.manual_seed(0)
        model.requires_grad_(False)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        model.add_adapter(LoraConfig(r=4, lora_alpha=4, init_lora_weights=False, target_modules=targets))
    return model


def _grads(model: torch.nn.Module, inputs: dict[str, Any], run: Any = None) -> dict[str, torch.Tensor | None]:
    leaves = [x for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    for x in leaves:
        x.requires_grad_(x.dim() > 1)
    run = model if run is None else run
    outputs = [x for x in pytree.tree_leaves(run(**inputs)) if isinstance(x, torch.Tensor)]
    loss = torch.zeros(())
    for i, out in enumerate(outputs):
        loss = loss + (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(i))).sum()
    loss.backward()
    named = {k: p.grad for k, p in model.named_parameters()}
    return {**named, **{f"input {i}": x.grad for i, x in enumerate(leaves)}}
