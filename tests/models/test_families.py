"""Public models other than diffusion transformers on real ranks, each compared with itself on one process.

A plain run takes one or two of each kind; ``-m sweep`` takes every one on every mesh.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.models import families
from tests.models.families import compare_family

pytestmark = pytest.mark.ranks

MESHES = [(2, 1), (1, 2), (4, 1), (1, 4), (2, 2)]
PART = [
    ("llama, padded on the left", 2, 2),
    ("mistral, packed", 1, 2),
    ("qwen3, with a loss", 4, 1),
    ("gemma2, eager attention", 1, 2),
    ("gpt2, padded on the right", 1, 4),
    ("vit, 197 tokens", 2, 2),
    ("swin", 2, 1),
    ("t5 encoder", 1, 2),
    ("nn.MultiheadAttention, train, with weights", 1, 2),
    ("UNet2DConditionModel", 1, 2),
    ("SD3ControlNetModel", 2, 1),
    ("AutoencoderKL", 2, 1),
]


@pytest.mark.parametrize(("name", "ulysses", "ring"), PART)
def test_models_of_each_kind_give_the_answer_of_one_process(ranks, name, ulysses, ring):
    compare_family(ranks(ulysses * ring), name, ulysses=ulysses, ring=ring).check(families.family(name).tolerance)


@pytest.mark.sweep
@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
@pytest.mark.parametrize("name", families.names())
def test_every_model_gives_the_answer_of_one_process_on_every_mesh(ranks, name, ulysses, ring):
    compare_family(ranks(ulysses * ring), name, ulysses=ulysses, ring=ring).check(families.family(name).tolerance)


TRAINED = ["llama, with a loss", "gpt2, with a loss, in training"]


@pytest.mark.parametrize(("name", "ulysses", "ring"), [(TRAINED[0], 2, 1), (TRAINED[1], 1, 2)])
def test_a_loss_inside_the_model_has_the_gradients_of_one_process(ranks, name, ulysses, ring):
    _check_gradients(ranks, name, ulysses, ring)


@pytest.mark.sweep
@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
@pytest.mark.parametrize(
    "name", [*TRAINED, "mistral, with a loss", "gemma, with a loss", "vit, 197 tokens", "nn.TransformerEncoder, train"]
)
def test_gradients_are_those_of_one_process_on_every_mesh(ranks, name, ulysses, ring):
    _check_gradients(ranks, name, ulysses, ring)


def _check_gradients(ranks: Any, name: str, ulysses: int, ring: int) -> None:
    answers = ranks(ulysses * ring).run(gradient_errors, name, {"ulysses": ulysses, "ring": ring}, timeout=300.0)
    for answer in answers:
        # Rotary tables and some norms compute in fp32 whatever the dtype of the model.
        assert max(answer["loss"], answer["gradients"]) <= 1e-6, answer
    assert len({a["digest"] for a in answers}) == 1, "ranks hold different gradients"


def gradient_errors(name: str, degrees: dict[str, int]) -> dict[str, Any]:
    """Relative errors of the loss and of all gradients together, in fp64, on each rank.

    Args:
        name: of the case; its loss is its first output if that is one number, else a random sum of its outputs.
        degrees: arguments of ``cp_backend``.
    """
    from cp_compile import cp_backend
    from cp_compile.agreement import digest, relative_error

    case, wide = families.family(name), torch.float64
    results = []
    for compiled in (False, True):
        model = case.model(dtype=wide)
        run = torch.compile(model, backend=cp_backend(**degrees, inner="aot_eager")) if compiled else model
        outputs = [x for x in pytree.tree_leaves(run(**case.kwargs(dtype=wide))) if isinstance(x, torch.Tensor)]
        loss = outputs[0] if outputs[0].dim() == 0 else sum(_mixed(x, i) for i, x in enumerate(outputs))
        loss.backward()
        results.append((loss.detach(), [p.grad for p in model.parameters()]))
    (expected, wanted), (actual, found) = results
    assert [g is None for g in wanted] == [g is None for g in found]
    flat = [torch.cat([g.flatten() for g in gs if g is not None]) for gs in (found, wanted)]
    return {
        "loss": relative_error(actual, expected),
        "gradients": relative_error(*flat),
        "digest": digest(found),
    }


def _mixed(x: torch.Tensor, seed: int) -> torch.Tensor:
    return (x * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))).sum()


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1)])
def test_a_static_cache_is_filled_and_decoded_from_as_on_one_process(ranks, ulysses, ring):
    _check_decoding(ranks, ulysses, ring)


@pytest.mark.sweep
@pytest.mark.parametrize(("ulysses", "ring"), MESHES[1:])
def test_a_static_cache_is_right_on_every_mesh(ranks, ulysses, ring):
    _check_decoding(ranks, ulysses, ring)


def _check_decoding(ranks: Any, ulysses: int, ring: int) -> None:
    answers = ranks(ulysses * ring).run(_decoded, {"ulysses": ulysses, "ring": ring}, timeout=300.0)
    for answer in answers:
        assert answer["error"] <= 1e-5, answer
        prefill = answer["variants"][0]
        assert prefill and "whole" not in prefill, "the prompt's attentions are to be sharded, and the report to say so"
    assert len({a["digest"] for a in answers}) == 1


def _decoded(degrees: dict[str, int]) -> dict[str, Any]:
    """A prompt of 13 tokens and three more, one by one: logits of each call and the cache at the end."""
    import transformers

    from cp_compile import cp_backend
    from cp_compile.agreement import digest, relative_error
    from cp_compile.zoo import randomise
    from tests.models.family_language import decoder

    backend = cp_backend(**degrees, inner="aot_eager")
    results = []
    for compiled in (False, True):
        model = decoder("llama").eval()
        randomise(model)
        run = torch.compile(model, backend=backend) if compiled else model
        cache = transformers.StaticCache(config=model.config, max_cache_len=24)
        ids = torch.randint(1, 96, (2, 16), generator=torch.Generator().manual_seed(0))
        out = []
        with torch.no_grad():
            for start, stop in ((0, 13), (13, 14), (14, 15), (15, 16)):
                logits = run(
                    input_ids=ids[:, start:stop],
                    position_ids=torch.arange(start, stop)[None],
                    past_key_values=cache,
                    use_cache=True,
                ).logits
                out.append(logits.clone())
        results.append([*out, *(x for layer in cache.layers for x in (layer.keys, layer.values))])
    graphs = [g for g in backend.report.graphs if g.attentions]
    return {
        "error": relative_error(results[1], results[0]),
        "digest": digest(results[1]),
        "variants": [[a.variant for a in g.attentions] for g in graphs],
    }


@pytest.mark.parametrize(
    "name", ["nn.TransformerEncoder, eval, padded", "nn.MultiheadAttention, eval, with weights, padded"]
)
def test_modules_that_torch_runs_as_one_kernel_are_sharded(ranks, name):
    (graph,) = compare_family(ranks(2), name, ulysses=2).check().report["graphs"]
    assert {a["variant"] for a in graph["attentions"]} == {"ulysses"}


@pytest.mark.parametrize("kind", ["documents", "window", "bias"])
def test_flex_attention_sees_global_indices_and_the_report_names_it(ranks, kind):
    found = compare_family(ranks(2), f"flex attention, {kind}", ulysses=2).check()
    assert "flex_attention" in found.texts[0]
