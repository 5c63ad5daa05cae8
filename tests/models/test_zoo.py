"""Unmodified diffusers transformers on real ranks, each compared with itself on one process.

A part of the zoo; ``make sweep`` runs all of it on every mesh.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.ranks

MODELS = [
    "FluxTransformer2DModel",
    "Flux2Transformer2DModel",
    "SD3Transformer2DModel",
    "QwenImageTransformer2DModel",
    "WanTransformer3DModel",
    "CogVideoXTransformer3DModel",
    "CogVideoXTransformer3DModel-2",
    "PixArtTransformer2DModel",
    "DiTTransformer2DModel",
    "HunyuanVideoTransformer3DModel",
    "LTXVideoTransformer3DModel",
    "AuraFlowTransformer2DModel",
    "ChromaTransformer2DModel",
    "LatteTransformer3DModel",
    "MochiTransformer3DModel",
    "StableAudioDiTModel",
    "SanaTransformer2DModel",
]

TRUNKS = ["FluxTransformer2DModel", "SD3Transformer2DModel", "QwenImageTransformer2DModel", "WanTransformer3DModel"]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_ulysses_gives_the_answer_of_one_process(compare, model, world):
    compare(model, world, ulysses=world).check()


@pytest.mark.parametrize("model", MODELS[:6] + MODELS[9:12])
def test_a_ring_gives_the_answer_of_one_process(compare, model):
    compare(model, 2, ring=2).check()


@pytest.mark.parametrize("rotate", ["alltoall", "allgather"])
def test_a_ring_of_three_takes_lengths_that_do_not_divide(compare, rotate):
    found = compare("FluxTransformer2DModel", 3, ring=3, rotate=rotate).check()
    (graph,) = found.report["graphs"]
    assert {a["variant"] for a in graph["attentions"]} == {"ring"}
    assert {a["collectives"] for a in graph["attentions"]} == {2 if rotate == "alltoall" else 1}


@pytest.mark.parametrize("model", [*TRUNKS, "HunyuanVideoTransformer3DModel", "LTXVideoTransformer3DModel"])
def test_ring_and_ulysses_together_give_the_answer_of_one_process(compare, model):
    compare(model, 4, ulysses=2, ring=2).check()


@pytest.mark.parametrize("model", TRUNKS)
def test_nothing_is_gathered_between_the_first_and_the_last_attention(compare, model):
    (graph,) = compare(model, 2, ulysses=2).check().report["graphs"]
    assert not [g for g in graph["gathers"] if g["inside"]]
    for attention in graph["attentions"]:
        crosses = attention["query"][-2] != attention["key"][-2]
        assert attention["collectives"] == (0 if crosses else 2), attention
    assert graph["collectives"] == sum(a["collectives"] for a in graph["attentions"]) + len(graph["gathers"])


def test_space_is_sharded_through_temporal_attention_without_communication(compare):
    (graph,) = compare("LatteTransformer3DModel", 2, ulysses=2).check().report["graphs"]
    assert [a["collectives"] for a in graph["attentions"] if a["variant"] == "batch"] == [0]


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "grad"])
def test_every_grad_mode_gives_the_answer(compare, mode):
    compare("FluxTransformer2DModel", 2, ulysses=2, mode=mode).check()


def test_one_graph_stays_one_graph(compare):
    compare("WanTransformer3DModel", 2, ulysses=2, compile_options={"fullgraph": True}).check()


def test_bf16_is_as_far_from_fp32_as_the_model_itself(ranks):
    for ours, plain in ranks(2).run(_bf16_errors, "FluxTransformer2DModel", timeout=300.0):
        assert ours <= 1.5 * plain


def _bf16_errors(name: str) -> tuple[float, float]:
    from cp_compile import cp_backend
    from cp_compile.agreement import relative_error
    from cp_compile.zoo import case

    half = torch.bfloat16
    wanted, plain = case(name).model(), case(name).model(dtype=half)
    compiled = torch.compile(case(name).model(dtype=half), backend=cp_backend(ring=2, inner="aot_eager"))
    with torch.no_grad():
        # The inputs of the wide model are the rounded ones, so that only the arithmetic differs.
        inputs = case(name).kwargs(dtype=half)
        wide = {k: v.float() if isinstance(v, torch.Tensor) and v.dtype == half else v for k, v in inputs.items()}
        reference = [x.to(half) for x in wanted(**wide)]
        return relative_error(list(compiled(**inputs)), reference), relative_error(list(plain(**inputs)), reference)
