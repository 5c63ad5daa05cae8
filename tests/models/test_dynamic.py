"""Lengths that change from call to call: right on every call, and how often each rank compiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.ranks

MESHES = [(2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (1, 4), (2, 2)]

# Height and width of a picture in tokens; the text has seven.
RESOLUTIONS = [(7, (4, 4)), (7, (6, 4)), (7, (5, 5)), (7, (3, 7)), (7, (8, 8))]
PROMPTS = [(7, (4, 5)), (8, (4, 5)), (7, (4, 5)), (9, (4, 5))]
BOTH = [(7, (4, 4)), (8, (5, 5)), (7, (3, 7)), (9, (4, 4)), (16, (8, 4)), (5, (2, 3)), (12, (6, 6))]


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (1, 3), (2, 2)])
def test_prompts_of_alternating_length_are_right_on_every_call(ranks, ulysses, ring):
    _check(ranks, "flux", PROMPTS, ulysses, ring, dynamic=None, compiles=2)


@pytest.mark.sweep
@pytest.mark.parametrize("model", ["flux", "llama"])
@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
def test_prompts_of_alternating_length_are_right_on_every_mesh(ranks, model, ulysses, ring):
    _check(ranks, model, PROMPTS, ulysses, ring, dynamic=None, compiles=2)


def test_five_resolutions_compile_at_most_twice(ranks):
    _check(ranks, "flux", RESOLUTIONS, 2, 1, dynamic=None, compiles=2)


@pytest.mark.sweep
@pytest.mark.parametrize(("ulysses", "ring"), MESHES[1:])
def test_five_resolutions_compile_at_most_twice_on_every_mesh(ranks, ulysses, ring):
    _check(ranks, "flux", RESOLUTIONS, ulysses, ring, dynamic=None, compiles=2)


@pytest.mark.parametrize(("model", "ulysses", "ring"), [("flux", 1, 2), ("llama", 2, 1), ("flux", 2, 2)])
def test_one_dynamic_compile_serves_all_lengths(ranks, model, ulysses, ring):
    _check(ranks, model, BOTH, ulysses, ring, dynamic=True, compiles=1)


@pytest.mark.sweep
@pytest.mark.parametrize("model", ["flux", "llama"])
@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
def test_one_dynamic_compile_serves_all_lengths_on_every_mesh(ranks, model, ulysses, ring):
    _check(ranks, model, BOTH, ulysses, ring, dynamic=True, compiles=1)


def test_without_dynamic_shapes_each_length_is_compiled_and_right(ranks):
    _check(ranks, "llama", PROMPTS, 2, 1, dynamic=False, compiles=3)


def test_the_report_gives_lengths_that_vary_as_expressions(ranks):
    for answer in ranks(2).run(_run, "flux", PROMPTS[:1], 2, 1, True):
        assert "ceil" in answer["text"] and "/2)" in answer["text"]


def _check(
    ranks: Any,
    model: str,
    lengths: list[tuple[int, tuple[int, int]]],
    ulysses: int,
    ring: int,
    dynamic: bool | None,
    compiles: int,
) -> None:
    answers = ranks(ulysses * ring).run(_run, model, lengths, ulysses, ring, dynamic, timeout=300.0)
    for answer in answers:
        assert max(answer["errors"]) <= 1e-5, answer["errors"]
        assert answer["compiles"] <= compiles, answer["reasons"]
    assert len({a["compiles"] for a in answers}) == 1, "a rank recompiled alone"
    assert len({a["digests"] for a in answers}) == 1, "ranks differ from each other"


def _run(
    model: str, lengths: list[tuple[int, tuple[int, int]]], ulysses: int, ring: int, dynamic: bool | None
) -> dict[str, Any]:
    from cp_compile import cp_backend
    from cp_compile.agreement import digest, relative_error

    backend = cp_backend(ulysses=ulysses, ring=ring, inner="aot_eager", timeout=120.0)
    plain, other = _model(model), _model(model)
    compiled = torch.compile(other, backend=backend, dynamic=dynamic)
    errors, digests = [], []
    with torch.no_grad():
        for text, picture in lengths:
            expected, actual = plain(**_inputs(model, text, picture)), compiled(**_inputs(model, text, picture))
            errors.append(relative_error(actual, expected))
            digests.append(digest(actual))
    return {
        "errors": errors,
        "digests": tuple(digests),
        "compiles": len([g for g in backend.report.graphs if g.attentions]),
        "reasons": [g.where for g in backend.report.graphs],
        "text": str(backend.report),
    }


def _model(name: str) -> torch.nn.Module:
    from cp_compile.zoo import case
    from tests.models.families import family

    return case("FluxTransformer2DModel").model() if name == "flux" else family(name).model()


def _inputs(name: str, text: int, picture: tuple[int, int]) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(text)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    if name == "llama":
        return {"input_ids": torch.randint(1, 96, (2, text), generator=draw)}
    height, width = picture
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(1.0 * height), torch.arange(1.0 * width))
    return {
        "hidden_states": numbers(1, height * width, 4),
        "encoder_hidden_states": numbers(1, text, 32),
        "pooled_projections": numbers(1, 32),
        "timestep": torch.tensor([0.7]),
        "img_ids": places,
        "txt_ids": torch.zeros(text, 3),
        "return_dict": False,
    }
