"""Whole pipelines on real ranks: the picture of N ranks is that of one process, whatever the pipeline does on the way.

The reference is the same pipeline, never parallelized, run by each rank for itself. Both the latents after every step
and the image are compared, since pixels are clamped.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cp_compile
from cp_compile.agreement import digest, relative_error
from examples import tiny

pytestmark = pytest.mark.ranks

TOLERANCE = 2e-5


def _embeds(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


_PROMPTS = {"prompt": "a photo of the red cat", "negative_prompt": "rain", "max_sequence_length": 16}

# Arguments of each pipeline, guidance by a negative prompt always on.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "flux": {**_PROMPTS, "true_cfg_scale": 2.0},
    "wan": {**_PROMPTS, "num_frames": 9},
    "qwen_image": {
        "prompt_embeds": _embeds(1, 7, 32),
        "prompt_embeds_mask": torch.ones(1, 7, dtype=torch.int64),
        "negative_prompt_embeds": _embeds(1, 5, 32),
        "negative_prompt_embeds_mask": torch.ones(1, 5, dtype=torch.int64),
        "true_cfg_scale": 2.0,
    },
    "stable_diffusion_3": _PROMPTS,
    "cogvideox": {**_PROMPTS, "num_frames": 9},
}


def _pipeline(name: str) -> Any:
    pipeline = getattr(tiny, name)()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _picture(pipeline: Any, name: str, size: tuple[int, int], steps: int, **more: Any) -> list[torch.Tensor]:
    """The latents after each step, and the picture or film."""
    seen = []

    def keep(_pipeline: Any, _step: int, _time: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        seen.append(tensors["latents"].clone())
        return {"latents": tensors["latents"] * 0.99}

    output = pipeline(
        **_ARGUMENTS[name],
        height=size[0],
        width=size[1],
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(0),
        callback_on_step_end=keep,
        output_type="pt",
        **more,
    )[0]
    assert len(seen) == steps
    return [*seen, torch.stack(list(output))]


def _pictures(name: str, degrees: dict[str, Any], calls: list[tuple[tuple[int, int], int]]) -> dict[str, Any]:
    plain = _pipeline(name)
    pipeline = cp_compile.parallelize(_pipeline(name), inner="aot_eager", **degrees)
    errors, digests = [], []
    for size, steps in calls:
        actual = _picture(pipeline, name, size, steps)
        errors.append(relative_error(actual, _picture(plain, name, size, steps)))
        digests.append(digest(actual))
    report = cp_compile.report_of(pipeline)
    return {
        "error": max(errors),
        "digests": digests,
        "variants": {a.variant for g in report.graphs for a in g.attentions},
        "graphs": len(report.graphs),
    }


def _check(answers: list[dict[str, Any]], variant: str) -> None:
    for answer in answers:
        assert answer["error"] <= TOLERANCE
        assert variant in answer["variants"]
    assert all(answer["digests"] == answers[0]["digests"] for answer in answers)


SIZES = {
    "flux": (36, 44),
    "wan": (32, 48),
    "qwen_image": (40, 48),
    "stable_diffusion_3": (36, 44),
    "cogvideox": (32, 48),
}


@pytest.mark.parametrize(
    "name",
    [
        "flux",
        "wan",
        "cogvideox",
        pytest.param("qwen_image", marks=pytest.mark.sweep),
        pytest.param("stable_diffusion_3", marks=pytest.mark.sweep),
    ],
)
def test_the_picture_of_two_ranks_is_that_of_one_process(ranks: Callable[[int], Any], name: str) -> None:
    answers = ranks(2).run(_pictures, name, {"ulysses": 2}, [(SIZES[name], 3)], timeout=300)
    _check(answers, "ulysses")
    if name == "wan":
        assert answers[0]["graphs"] == 1, "two transformers of one structure are compiled once"


@pytest.mark.sweep
@pytest.mark.parametrize("degrees", [{"ring": 2}, {"ulysses": 2, "ring": 2}], ids=["ring", "unified"])
@pytest.mark.parametrize("name", list(SIZES))
def test_the_picture_is_the_same_on_a_ring_and_on_both(
    ranks: Callable[[int], Any], name: str, degrees: dict[str, int]
) -> None:
    world = 2 if len(degrees) == 1 else 4
    variant = "ring" if len(degrees) == 1 else "unified"
    calls = [(SIZES[name], 2), ((48, 32), 4)]
    _check(ranks(world).run(_pictures, name, degrees, calls, timeout=600), variant)


@pytest.mark.sweep
def test_several_sizes_and_step_counts_follow_each_other(ranks: Callable[[int], Any]) -> None:
    calls = [((36, 44), 1), ((52, 28), 2), ((44, 60), 4)]
    answers = ranks(2).run(_pictures, "stable_diffusion_3", {"ring": 2}, calls, timeout=300)
    _check(answers, "ring")
    assert answers[0]["graphs"] <= 2, "one graph for the first size and one for all others"


def test_adapters_come_and_go(ranks: Callable[[int], Any], tmp_path: Path) -> None:
    _save_adapter(tmp_path)
    for answer in ranks(2).run(_with_adapter, str(tmp_path), timeout=300):
        assert max(answer["errors"]) <= TOLERANCE
        assert answer["changed"] > 1e-3, "the adapter changes nothing, so that losing it would not be seen"
        assert answer["restored"]


def _save_adapter(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model_state_dict

    pipeline = _pipeline("stable_diffusion_3")
    pipeline.transformer.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    weights = get_peft_model_state_dict(pipeline.transformer)
    generator = torch.Generator().manual_seed(2)
    weights = {name: torch.randn(w.shape, generator=generator) * 0.2 for name, w in weights.items()}
    pipeline.save_lora_weights(folder, transformer_lora_layers=weights)


def _with_adapter(folder: str) -> dict[str, Any]:
    plain = _pipeline("stable_diffusion_3")
    pipeline = cp_compile.parallelize(_pipeline("stable_diffusion_3"), ulysses=2, inner="aot_eager")
    errors, pictures = [], []
    for change in ("none", "load", "weaken", "unload"):
        for each in (plain, pipeline):
            if change == "load":
                each.load_lora_weights(folder, adapter_name="style")
            elif change == "weaken":
                each.set_adapters(["style"], adapter_weights=[0.5])
            elif change == "unload":
                each.unload_lora_weights()
        pictures.append(_picture(pipeline, "stable_diffusion_3", (36, 44), 2))
        errors.append(relative_error(pictures[-1], _picture(plain, "stable_diffusion_3", (36, 44), 2)))
    return {
        "errors": errors,
        "changed": min(relative_error(a, b) for a, b in zip(pictures[1:], pictures[:-1])),
        "restored": relative_error(pictures[3], pictures[0]) == 0,
    }


@pytest.mark.parametrize("first", ["parallelize", "offload"])
def test_offloading_works_in_either_order(ranks: Callable[[int], Any], first: str) -> None:
    for answer in ranks(2).run(_offloaded, first, timeout=300):
        assert answer["error"] <= TOLERANCE
        assert answer["variants"] == {"ulysses"}
        assert answer["hooked"]
        assert answer["graphs"][0] == answer["graphs"][1], "a hook put anew by the pipeline must not compile anew"


def _offloaded(first: str) -> dict[str, Any]:
    plain, pipeline = _pipeline("stable_diffusion_3"), _pipeline("stable_diffusion_3")
    if first == "offload":
        pipeline.enable_model_cpu_offload(device="cpu")
    cp_compile.parallelize(pipeline, ulysses=2, inner="aot_eager")
    if first == "parallelize":
        pipeline.enable_model_cpu_offload(device="cpu")
    errors, graphs = [], []
    for _ in range(2):
        actual = _picture(pipeline, "stable_diffusion_3", (36, 44), 2)
        errors.append(relative_error(actual, _picture(plain, "stable_diffusion_3", (36, 44), 2)))
        graphs.append(len(cp_compile.report_of(pipeline).graphs))
    return {
        "error": max(errors),
        "graphs": graphs,
        "hooked": hasattr(pipeline.transformer, "_hf_hook"),
        "variants": {a.variant for g in cp_compile.report_of(pipeline).graphs for a in g.attentions},
    }


@pytest.mark.sweep
def test_blocks_offloaded_in_groups_are_still_sharded(ranks: Callable[[int], Any]) -> None:
    for error, variants in ranks(2).run(_group_offloaded, timeout=300):
        assert error <= TOLERANCE
        assert variants == {"ulysses"}


def _group_offloaded() -> tuple[float, set[str]]:
    plain, pipeline = _pipeline("stable_diffusion_3"), _pipeline("stable_diffusion_3")
    cp_compile.parallelize(pipeline, ulysses=2, inner="aot_eager")
    pipeline.transformer.enable_group_offload(
        onload_device=torch.device("cpu"),
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
    )
    actual = _picture(pipeline, "stable_diffusion_3", (36, 44), 2)
    error = relative_error(actual, _picture(plain, "stable_diffusion_3", (36, 44), 2))
    return error, {a.variant for g in cp_compile.report_of(pipeline).graphs for a in g.attentions}
