"""What people do around a model at inference: grad modes, autocast, modes of the compiler, quantisation, adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cp_compile import cp_backend
from cp_compile.agreement import digest, relative_error
from cp_compile.zoo import case
from tests.models.families import compare_family, family

pytestmark = pytest.mark.ranks

MESHES = [(2, 1), (1, 2), (4, 1), (1, 4), (2, 2)]
FLUX = "FluxTransformer2DModel"


def _source(name: str) -> Any:
    """A case of the zoo, or of the families."""
    return case(name) if name == FLUX else family(name)


def _check(answers: list[tuple[float, str]], tolerance: float = 1e-5) -> None:
    assert max(error for error, _ in answers) <= tolerance, answers
    assert len({found for _, found in answers}) == 1, "ranks differ from each other"


# Inference mode


def test_inference_mode_gives_the_answer(ranks):
    compare_family(ranks(2), "llama, padded on the left", ring=2, mode="inference_mode", calls=2).check()


@pytest.mark.sweep
@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
@pytest.mark.parametrize("name", ["llama, static cache", "vit, 197 tokens", "UNet2DConditionModel", "clip"])
def test_inference_mode_gives_the_answer_on_every_mesh(ranks, name, ulysses, ring):
    compare_family(ranks(ulysses * ring), name, ulysses=ulysses, ring=ring, mode="inference_mode").check()


# Autocast


@pytest.mark.parametrize(("name", "ulysses", "ring"), [(FLUX, 1, 2), ("llama", 2, 1)])
def test_autocast_is_as_far_from_fp32_as_without_us(ranks, name, ulysses, ring):
    _check_autocast(ranks, name, ulysses, ring)


@pytest.mark.sweep
@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
@pytest.mark.parametrize("name", [FLUX, "llama", "gpt2", "vit, 197 tokens", "UNet2DConditionModel", "t5 encoder"])
def test_autocast_is_as_far_from_fp32_as_without_us_on_every_mesh(ranks, name, ulysses, ring):
    _check_autocast(ranks, name, ulysses, ring)


def _check_autocast(ranks: Any, name: str, ulysses: int, ring: int) -> None:
    answers = ranks(ulysses * ring).run(_autocast, name, ulysses, ring, timeout=300.0)
    for ours, plain, _ in answers:
        assert plain > 0, "autocast changed nothing"
        assert ours <= 1.5 * plain, (ours, plain)
    assert len({found for *_, found in answers}) == 1


def _autocast(name: str, ulysses: int, ring: int) -> tuple[float, float, str]:
    """Errors of the compiled model and of the unmodified one under autocast, against fp32; root of the mean square."""
    source = _source(name)
    model, backend = source.model(), cp_backend(ulysses=ulysses, ring=ring, inner="aot_eager")
    compiled = torch.compile(source.model(), backend=backend)
    with torch.no_grad():
        exact = _flat(model(**source.kwargs()))
        with torch.autocast("cpu", torch.bfloat16):
            plain, ours = model(**source.kwargs()), compiled(**source.kwargs())
    error = [((_flat(x) - exact).square().mean().sqrt()).item() for x in (ours, plain)]
    return error[0], error[1], digest(ours)


def _flat(out: Any) -> Tensor:
    return torch.cat([x.float().flatten() for x in pytree.tree_leaves(out) if isinstance(x, Tensor)])


# The mode and the options of torch.compile


def test_mode_and_options_of_torch_compile_reach_inductor(ranks):
    for by_mode, by_options, both in ranks(2).run(_handed_on):
        assert by_mode == {"max_autotune": True, "coordinate_descent_tuning": True}
        assert by_options == {"epilogue_fusion": False}
        assert both == {"epilogue_fusion": True, "max_fusion_size": 8}, "torch.compile's own win over the backend's"


def _handed_on() -> list[dict[str, Any]]:
    from unittest import mock

    from cp_compile.passes import _torch

    seen: list[dict[str, Any]] = []

    def compile_fx(gm: Any, example_inputs: Any, config_patches: Any) -> Any:
        seen.append(config_patches)
        return _torch.aot_autograd(fw_compiler=lambda g, x: _torch.make_boxed_func(g.forward))(gm, example_inputs)

    source, given = _source(FLUX), {"epilogue_fusion": False, "max_fusion_size": 8}
    with mock.patch.object(_torch, "compile_fx", compile_fx), torch.no_grad():
        for backend, how in (
            (cp_backend(ulysses=2), {"mode": "max-autotune-no-cudagraphs"}),
            (cp_backend(ulysses=2), {"options": {"epilogue_fusion": False}}),
            (cp_backend(ulysses=2, options=given), {"options": {"epilogue-fusion": True}}),
        ):
            torch._dynamo.reset()
            torch.compile(source.model(), backend=backend, **how)(**source.kwargs())
    return seen


def test_a_mode_for_another_compiler_than_inductor_is_refused_with_a_reason(ranks):
    for of_mode, of_name in ranks(2).run(_refused):
        assert "mode='max-autotune'" in of_mode and "inner='aot_eager'" in of_mode and "cp_compile:" in of_mode
        assert "mode='fastest'" in of_name and "'max-autotune'" in of_name and "cp_compile:" in of_name


def _refused() -> list[str]:
    source, said = _source(FLUX), []
    for inner, mode in (("aot_eager", "max-autotune"), ("inductor", "fastest")):
        torch._dynamo.reset()
        try:
            torch.compile(source.model(), backend=cp_backend(ulysses=2, inner=inner), mode=mode)(**source.kwargs())
        except Exception as error:
            said.append(str(error))
    return said


# Quantised weights


@pytest.mark.parametrize(("name", "ulysses", "ring"), [(FLUX, 2, 1), ("llama", 1, 2)])
def test_int8_weights_give_the_answer_of_the_quantised_model(ranks, name, ulysses, ring):
    _check(ranks(ulysses * ring).run(_quantised, name, ulysses, ring, timeout=300.0))


@pytest.mark.sweep
@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
@pytest.mark.parametrize("name", [FLUX, "llama", "vit, 197 tokens"])
def test_int8_weights_give_the_answer_on_every_mesh(ranks, name, ulysses, ring):
    _check(ranks(ulysses * ring).run(_quantised, name, ulysses, ring, timeout=300.0))


def _quantised(name: str, ulysses: int, ring: int) -> tuple[float, str]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def prepare(model: nn.Module) -> nn.Module:
        quantize_(model, Int8WeightOnlyConfig())
        assert any("Int8" in type(p).__name__ for p in model.parameters()), "nothing was quantised"
        return model

    return _prepared(name, ulysses, ring, prepare)


def _prepared(name: str, ulysses: int, ring: int, prepare: Callable[[nn.Module], nn.Module]) -> tuple[float, str]:
    """Error and digest of a case whose model is changed before it is compiled; all attentions are to be sharded."""
    source, backend = _source(name), cp_backend(ulysses=ulysses, ring=ring, inner="aot_eager")
    plain, model = prepare(source.model()), prepare(source.model())
    with torch.no_grad():
        expected = plain(**source.kwargs())
        actual = torch.compile(model, backend=backend)(**source.kwargs())
    variants = [a.variant for g in backend.report.graphs for a in g.attentions]
    assert variants and "whole" not in variants, variants
    return relative_error(actual, expected), digest(actual)


# Adapters


@pytest.mark.parametrize("merged", [False, True], ids=["active", "merged"])
def test_adapters_give_the_answer(ranks, merged):
    _check(ranks(2).run(_adapted, FLUX, 2, 1, merged))


@pytest.mark.sweep
@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
@pytest.mark.parametrize("merged", [False, True], ids=["active", "merged"])
@pytest.mark.parametrize("name", [FLUX, "llama"])
def test_adapters_give_the_answer_on_every_mesh(ranks, name, merged, ulysses, ring):
    _check(ranks(ulysses * ring).run(_adapted, name, ulysses, ring, merged, timeout=300.0))


def _adapted(name: str, ulysses: int, ring: int, merged: bool) -> tuple[float, str]:
    from peft import LoraConfig, get_peft_model

    def prepare(model: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        before = copy.deepcopy(model.state_dict())
        if name == FLUX:
            targets = ["to_q", "to_k", "to_v", "to_out.0"]
            model.add_adapter(LoraConfig(r=4, lora_alpha=4, init_lora_weights=False, target_modules=targets))
            if merged:
                model.fuse_lora()
        else:
            config = LoraConfig(r=4, lora_alpha=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
            adapted = get_peft_model(model.model, config)
            model.model = adapted.merge_and_unload() if merged else adapted
        after = model.state_dict()
        assert not merged or any(k not in before or not torch.equal(before[k], v) for k, v in after.items())
        return model

    return _prepared(name, ulysses, ring, prepare)


# Memory formats and batches


@pytest.mark.parametrize(("name", "ulysses", "ring"), [("UNet2DConditionModel", 2, 1)])
def test_channels_last_gives_the_answer(ranks, name, ulysses, ring):
    _check(ranks(ulysses * ring).run(_channels_last, name, ulysses, ring, timeout=300.0))


@pytest.mark.sweep
@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
@pytest.mark.parametrize("name", ["UNet2DConditionModel", "AutoencoderKL", "vit, 197 tokens", "swin"])
def test_channels_last_gives_the_answer_on_every_mesh(ranks, name, ulysses, ring):
    _check(ranks(ulysses * ring).run(_channels_last, name, ulysses, ring, timeout=300.0))


def _channels_last(name: str, ulysses: int, ring: int) -> tuple[float, str]:
    source, backend = _source(name), cp_backend(ulysses=ulysses, ring=ring, inner="aot_eager")
    plain, model = source.model(), source.model().to(memory_format=torch.channels_last)
    inputs = {
        k: x.to(memory_format=torch.channels_last) if isinstance(x, Tensor) and x.dim() == 4 else x
        for k, x in source.kwargs().items()
    }
    with torch.no_grad():
        actual = torch.compile(model, backend=backend)(**inputs)
        return relative_error(actual, plain(**source.kwargs())), digest(actual)


@pytest.mark.parametrize(("ulysses", "ring"), [(1, 2)])
def test_batches_of_one_to_four_are_right_one_after_another(ranks, ulysses, ring):
    _check(ranks(ulysses * ring).run(_batches, ulysses, ring, timeout=300.0))


@pytest.mark.sweep
@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
def test_batches_of_one_to_four_are_right_on_every_mesh(ranks, ulysses, ring):
    _check(ranks(ulysses * ring).run(_batches, ulysses, ring, timeout=300.0))


def _batches(ulysses: int, ring: int) -> tuple[float, str]:
    source, backend = case(FLUX), cp_backend(ulysses=ulysses, ring=ring, inner="aot_eager")
    plain, compiled = source.model(), torch.compile(source.model(), backend=backend)
    one, answers, errors = source.kwargs(), [], []
    with torch.no_grad():
        for size in (1, 2, 3, 4):
            inputs = {k: _repeated(x, size, k) if isinstance(x, Tensor) else x for k, x in one.items()}
            answers.append(compiled(**inputs))
            errors.append(relative_error(answers[-1], plain(**inputs)))
    return max(errors), digest(answers)


def _repeated(x: Tensor, size: int, name: str) -> Tensor:
    """A batch whose members differ; places of tokens have no batch."""
    if name.endswith("_ids"):
        return x
    return torch.cat([x * (1 + 0.1 * i) for i in range(size)])
