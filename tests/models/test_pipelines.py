"""Whole pipelines on real ranks: the image of N ranks is the image of one process, whatever the pipeline does on the way.

The reference is the same pipeline, never parallelized, run by each rank for itself. Both the latents after every step
and the image are compared, since pixels are clamped.
"""

from __future__ import annotations

from collections.abc import Callable
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


@pytest.mark.parametrize("name", list(SIZES))
def test_the_picture_of_two_ranks_is_that_of_one_process(ranks: Callable[[int], Any], name: str) -> None:
    _check(ranks(2).run(_pictures, name, {"ulysses": 2}, [(SIZES[name], 3)], timeout=300), "ulysses")


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


def test_several_sizes_and_step_counts_follow_each_other(ranks: Callable[[int], Any]) -> None:
    calls = [((36, 44), 1), ((52, 28), 2), ((44, 60), 4)]
    answers = ranks(2).run(_pictures, "stable_diffusion_3", {"ring": 2}, calls, timeout=300)
    _check(answers, "ring")
    assert answers[0]["graphs"] <= 2, "one graph for the first size and one for all others"


def test_two_transformers_of_one_structure_are_compiled_once(ranks: Callable[[int], Any]) -> None:
    for graphs in ranks(2).run(_graphs_of_wan, timeout=300):
        assert graphs == 1


def _graphs_of_wan() -> int:
    pipeline = cp_compile.parallelize(_pipeline("wan"), ulysses=2, inner="aot_eager")
    _picture(pipeline, "wan", (32, 48), 3)
    return len(cp_compile.report_of(pipeline).graphs)
