"""``parallelize`` and its relatives: what they choose, what they refuse, what they leave alone, and the way back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import cp_compile
from cp_compile import CPError, MeshError, zoo
from cp_compile.agreement import relative_error
from cp_compile.integrations.diffusers import backend_arguments, denoisers
from examples import tiny

CASE = "WanTransformer3DModel"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("flux", {"transformer"}),
        ("wan", {"transformer", "transformer_2"}),
        ("qwen_image", {"transformer"}),
        ("stable_diffusion_3", {"transformer"}),
        ("cogvideox", {"transformer"}),
    ],
)
def test_what_the_denoising_loop_calls_is_chosen(name: str, chosen: set[str]) -> None:
    assert set(denoisers(getattr(tiny, name)())) == chosen


@pytest.mark.fast
@pytest.mark.parametrize(
    ("cls", "is_denoiser"),
    [
        ("FluxControlNetModel", True),
        ("ControlNetModel", True),
        ("MultiControlNetModel", True),
        ("UNet2DConditionModel", True),
        ("UNetSpatioTemporalConditionModel", True),
        ("PriorTransformer", True),
        ("ZImageTransformer2DModel", True),
        ("HiDreamImageTransformer2DModel", True),
        ("AutoencoderKL", False),
        ("AutoencoderKLLTXVideo", False),
        ("T2IAdapter", False),
        ("MotionAdapter", False),
    ],
)
def test_classes_of_denoisers_are_told_from_the_rest(cls: str, is_denoiser: bool) -> None:
    named = getattr(diffusers, cls)
    module = nn.Module.__new__(named)
    nn.Module.__init__(module)
    pipeline = SimpleNamespace(components={"part": module, "unet": _TakesTime()})
    assert ("part" in denoisers(pipeline)) == is_denoiser


class Block(nn.Module):
    """One self-attention of 4 heads, which only its own forward knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def _block() -> Block:
    model = Block()
    zoo.randomise(model)
    return model


def _x(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(seed))


class _TakesTime(nn.Module):
    def forward(self, sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return sample * timestep


class _Encoder(nn.Module):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids


class _Autoencoder(_Encoder):
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return latents


@pytest.mark.fast
def test_components_can_be_named_and_names_are_checked() -> None:
    parts = {"unet": _TakesTime(), "text_encoder": _Encoder(), "vae": _Autoencoder(), "scheduler": object()}
    pipeline = SimpleNamespace(components=parts)
    assert set(denoisers(pipeline, ["text_encoder"])) == {"text_encoder"}
    assert set(denoisers(pipeline, "unet")) == {"unet"}
    with pytest.raises(ValueError, match=r"no 'transformer'.*unet, text_encoder, vae"):
        denoisers(pipeline, ["transformer"])
    with pytest.raises(ValueError, match=r"vae\.decode"):
        denoisers(pipeline, ["vae"])
    with pytest.raises(ValueError, match=r"no component .* takes a timestep.*components="):
        denoisers(SimpleNamespace(components={"text_encoder": _Encoder()}))
    with pytest.raises(ValueError, match="are for a pipeline"):
        denoisers(_TakesTime(), ["unet"])
    with pytest.raises(TypeError, match="got dict"):
        denoisers({})


@pytest.mark.fast
def test_every_field_of_the_incumbents_configuration_has_its_place() -> None:
    from dataclasses import fields

    config = diffusers.ContextParallelConfig(ring_degree=2, ulysses_degree=4, convert_to_fp32=False)
    assert backend_arguments(config, None) == {
        "ulysses": 4, "ring": 2, "convert_to_fp32": False, "rotate": "allgather", "mesh": None,
    }  # fmt: skip
    assert backend_arguments(config, "alltoall")["rotate"] == "alltoall"
    anything = diffusers.ContextParallelConfig(ulysses_degree=2, ulysses_anything=True)
    assert backend_arguments(diffusers.ParallelConfig(context_parallel_config=anything), None)["ulysses"] == 2
    known = {"ring_degree", "ulysses_degree", "convert_to_fp32", "rotate_method", "mesh"}
    always = {"ulysses_anything", "ring_anything"}
    assert {f.name for f in fields(config) if not f.name.startswith("_")} == known | always
    with pytest.raises(ValueError, match="tensor parallelism"):
        backend_arguments(diffusers.TensorParallelConfig(tp_degree=2), None)
    with pytest.raises(TypeError, match=r"dict without ulysses_degree"):
        backend_arguments({}, None)


@pytest.mark.fast
def test_without_a_process_group_nothing_is_changed_and_nothing_is_read() -> None:
    model = zoo.case(CASE).model()
    with pytest.raises(MeshError, match="init_process_group"):
        cp_compile.parallelize(model, ulysses=2)
    assert model._compiled_call_impl is None

    class Never:
        @staticmethod
        def from_pretrained(path: str) -> nn.Module:
            raise AssertionError("read before the ranks were checked")

    with pytest.raises(MeshError, match="init_process_group"):
        cp_compile.from_pretrained(Never, "nowhere", parallel={"ulysses": 2})
    with pytest.raises(CPError, match="parallel_config"):
        cp_compile.from_pretrained(Never, "nowhere", parallel={"ulysses": 2}, parallel_config=object())
    with pytest.raises(ValueError, match="nothing in this"):
        cp_compile.report_of(model)
    assert cp_compile.unparallelize(model) is model


@pytest.mark.ranks
def test_what_makes_no_sense_is_refused_and_nothing_is_changed(ranks: Callable[[int], Any]) -> None:
    for said, untouched in ranks(2).run(_refused):
        assert untouched
        expected = {
            "world": ("MeshError", "ulysses=4", "2 ranks"),
            "none": ("ValueError", "nothing to do in parallel"),
            "twice said": ("ValueError", "ulysses=2 beside config", "Say it once"),
            "unknown": ("TypeError", "ulyses"),
            "incumbent": ("CPError", "enable_parallelism"),
            "compiled": ("CPError", "compiled already"),
            "block compiled": ("CPError", ".blocks.0 is compiled already"),
            "second half": ("CPError", "transformer_2 is parallel already, by enable_parallelism"),
        }
        assert set(said) == set(expected)
        for name, parts in expected.items():
            assert all(part in said[name] for part in parts), (name, said[name])


def _refused() -> tuple[dict[str, str], bool]:
    case = zoo.case(CASE)
    model = case.model()
    config = diffusers.ContextParallelConfig(ulysses_degree=2)
    incumbent, compiled, block = case.model(), case.model(), case.model()
    incumbent._parallel_config = diffusers.ParallelConfig(context_parallel_config=config)
    compiled.compile(backend="eager")
    block.blocks[0].compile(backend="eager")
    pipeline = tiny.wan()
    pipeline.transformer_2._parallel_config = incumbent._parallel_config
    calls: dict[str, Callable[[], Any]] = {
        "world": lambda: cp_compile.parallelize(model, ulysses=4),
        "none": lambda: cp_compile.parallelize(model),
        "twice said": lambda: cp_compile.parallelize(model, ulysses=2, config=config),
        "unknown": lambda: cp_compile.parallelize(model, ulyses=2),
        "incumbent": lambda: cp_compile.parallelize(incumbent, ulysses=2),
        "compiled": lambda: cp_compile.parallelize(compiled, ulysses=2),
        "block compiled": lambda: cp_compile.parallelize(block, ulysses=2),
        "second half": lambda: cp_compile.parallelize(pipeline, ulysses=2),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    untouched = [model, incumbent, block, pipeline.transformer, pipeline.transformer_2]
    return said, all(m._compiled_call_impl is None for m in untouched)


@pytest.mark.ranks
def test_a_model_stays_what_it_is_and_the_way_back_is_open(ranks: Callable[[int], Any]) -> None:
    for answer in ranks(2).run(_there_and_back):
        assert answer["error"] <= 1e-5
        assert answer["same object"] and answer["same class"] and answer["same state"]
        assert answer["copies"] == [True, True]
        assert "parallel already" in answer["again"] and "unparallelize" in answer["again"]
        assert answer["attentions"] > 0
        assert answer["undone"] == 0
        assert answer["no new graph"]
        assert answer["ring after"] == {"ring"}


def _there_and_back() -> dict[str, Any]:
    model, x = _block(), _x()
    cls, names = type(model), list(model.state_dict())
    with torch.no_grad():
        expected = model(x)
        parallel = cp_compile.parallelize(model, ulysses=2, inner="aot_eager")
        error = relative_error(parallel(x), expected)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        plain = [c._compiled_call_impl is None and relative_error(c(x), expected) == 0 for c in copies]
        again = ""
        try:
            cp_compile.parallelize(model, ring=2)
        except CPError as refusal:
            again = str(refusal)
        report = cp_compile.report_of(model)
        before = len(report.graphs)
        undone = relative_error(cp_compile.unparallelize(model)(x), expected)
        cp_compile.parallelize(model, ring=2, inner="aot_eager")(x)
        variants = {a.variant for g in cp_compile.report_of(model).graphs for a in g.attentions}
    return {
        "error": error,
        "same object": parallel is model,
        "same class": type(model) is cls,
        "same state": list(model.state_dict()) == names,
        "copies": plain,
        "again": again,
        "attentions": sum(len(g.attentions) for g in report.graphs),
        "undone": undone,
        "no new graph": len(report.graphs) == before,
        "ring after": variants,
    }


@pytest.mark.ranks
def test_a_users_mesh_and_the_incumbents_configuration_are_taken(ranks: Callable[[int], Any]) -> None:
    for errors, degrees in ranks(4).run(_meshes, timeout=300):
        assert max(errors) <= 1e-5
        assert degrees == [(2, 1, "alltoall"), (2, 2, "allgather"), (1, 4, "alltoall")]


def _meshes() -> tuple[list[float], list[tuple[int, int, str]]]:
    # Each row of the mesh has a sample of its own.
    data = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ulysses"))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    ways: list[tuple[dict[str, Any], int]] = [
        ({"ulysses": 2, "mesh": data}, dist.get_rank() // 2),
        ({"config": diffusers.ContextParallelConfig(ulysses_degree=2, ring_degree=2, mesh=both)}, 0),
        ({"config": diffusers.ContextParallelConfig(ring_degree=4), "rotate": "alltoall"}, 0),
    ]
    errors, degrees = [], []
    for way, seed in ways:
        model, x = _block(), _x(seed)
        with torch.no_grad():
            expected = model(x)
            cp_compile.parallelize(model, inner="aot_eager", **way)
            errors.append(relative_error(model(x), expected))
        report = cp_compile.report_of(model)
        degrees.append((report.ulysses, report.ring, model._compiled_call_impl.backend.options.rotate))
    return errors, degrees


@pytest.mark.ranks
def test_a_saved_checkpoint_is_loaded_parallel(ranks: Callable[[int], Any], tmp_path: Path) -> None:
    zoo.case(CASE).model(seed=3).save_pretrained(tmp_path / "model")
    tiny.wan().save_pretrained(tmp_path / "pipeline")
    for error, parallel, dtype in ranks(2).run(_loaded, str(tmp_path), timeout=300):
        assert error <= 1e-5
        assert parallel == {"transformer", "transformer_2"}
        assert dtype == torch.bfloat16


def _loaded(folder: str) -> tuple[float, set[str], torch.dtype]:
    case = zoo.case(CASE)
    arguments = {"ulysses": 2, "inner": "aot_eager"}
    model = cp_compile.from_pretrained(diffusers.AutoModel, f"{folder}/model", parallel=arguments)
    with torch.no_grad():
        error = relative_error(model(**case.kwargs()), case.model(seed=3)(**case.kwargs()))
    config = diffusers.ContextParallelConfig(ulysses_degree=2)
    pipeline = cp_compile.from_pretrained(
        diffusers.WanPipeline, f"{folder}/pipeline", parallel=config, torch_dtype=torch.bfloat16
    )
    parts = {n: p for n, p in pipeline.components.items() if isinstance(p, nn.Module)}
    parallel = {n for n, p in parts.items() if p._compiled_call_impl is not None}
    return error, parallel, pipeline.transformer.dtype
