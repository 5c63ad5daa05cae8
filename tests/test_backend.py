"""The backend's own surface: what it refuses and how, what it leaves alone, what it hands on."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cp_compile import MeshError, ScheduleError, cp_backend


class Block(nn.Module):
    """One self-attention of 4 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "nothing to do in parallel.*ulysses=2"),
        ({"ulysses": 0}, "ulysses=0"),
        ({"ring": -2}, "ring=-2"),
        ({"ulysses": 2.0}, r"ulysses=2\.0"),
        ({"ulysses": True, "ring": 2}, "ulysses=True"),
        ({"ulysses": 2, "inner": "eager"}, "inner='eager'.*'inductor'"),
        ({"ulysses": 2, "rotate": "ring"}, "rotate='ring'.*'alltoall'"),
        ({"ulysses": 2, "inner": "aot_eager", "options": {"max_autotune": True}}, "options=.*inner='aot_eager'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_at_once(arguments: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=re.compile(said, re.DOTALL)):
        cp_backend(**arguments)


@pytest.mark.fast
def test_without_a_process_group_the_error_says_what_to_do():
    with pytest.raises(Exception, match="init_process_group"):
        torch.compile(Block(), backend=cp_backend(ulysses=2, inner="aot_eager"))(torch.randn(1, 6, 16))


@pytest.mark.ranks
def test_degrees_that_do_not_fit_are_refused_on_every_rank_and_the_model_stays_usable(ranks):
    for said, still in ranks(2).run(_misfit):
        assert "MeshError" in said[0] and "ulysses=3" in said[0] and "2 ranks" in said[0]
        assert "'ring'" in said[1] and "mesh dim" in said[1]
        assert "has 2 ranks" in said[2]
        assert still


def _misfit() -> tuple[list[str], bool]:
    wrong = [
        cp_backend(ulysses=3, inner="aot_eager"),
        cp_backend(ring=2, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), inner="aot_eager"),
        cp_backend(ulysses=4, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("ulysses",)), inner="aot_eager"),
    ]
    x, model, said = torch.randn(1, 6, 16), Block(), []
    for backend in wrong:
        torch._dynamo.reset()
        try:
            torch.compile(model, backend=backend)(x)
        except Exception as error:
            cause = error.__cause__ if isinstance(error.__cause__, MeshError) else error
            said.append(f"{type(cause).__name__}: {error}")
    return said, bool(torch.isfinite(model(x)).all())


@pytest.mark.ranks
def test_a_graph_without_attention_is_compiled_unchanged_and_says_so(ranks):
    for same, note in ranks(2).run(_no_attention):
        assert same and "no attention" in note


def _no_attention() -> tuple[bool, str]:
    model, backend = nn.Linear(4, 4), cp_backend(ulysses=2, inner="aot_eager")
    x = torch.ones(3, 4)
    return torch.equal(torch.compile(model, backend=backend)(x), model(x)), backend.report.graphs[0].note


@pytest.mark.ranks
def test_the_inner_compiler_sees_plain_collectives(ranks):
    for names in ranks(2).run(_seen_by_inner):
        assert [n for n in names if "all_to_all" in n] == ["_c10d_functional.all_to_all_single.default"] * 2
        assert [n for n in names if "all_gather" in n] == ["_c10d_functional.all_gather_into_tensor.default"]
        assert not [n for n in names if n.startswith("cp_compile")]


def _seen_by_inner() -> list[str]:
    seen: list[str] = []

    def inner(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        seen.extend(str(n.target) for n in gm.graph.nodes if n.op == "call_function")
        return gm.forward

    with torch.no_grad():
        torch.compile(Block(), backend=cp_backend(ulysses=2, inner=inner))(torch.randn(1, 6, 16))
    return seen


@pytest.mark.ranks
def test_two_backends_of_other_degrees_live_in_one_process(ranks):
    for errors in ranks(4).run(_two_backends):
        assert max(errors) <= 1e-6


def _two_backends() -> list[float]:
    errors = []
    torch.manual_seed(0)
    model, x = Block(), torch.randn(2, 7, 16)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ulysses"))
    for backend in (
        cp_backend(ulysses=4, inner="aot_eager"),
        cp_backend(ulysses=2, ring=2, inner="aot_eager"),
        cp_backend(ulysses=2, mesh=mesh, inner="aot_eager"),
    ):
        torch._dynamo.reset()
        with torch.no_grad():
            errors.append((torch.compile(model, backend=backend)(x) - model(x)).abs().max().item())
    return errors


@pytest.mark.ranks
def test_ranks_with_other_shapes_are_told_before_any_collective(ranks):
    answers = ranks(2).run(_other_shape)
    for rank, said in enumerate(answers):
        assert "ScheduleError" in said and "different" in said and f"rank {1 - rank}" in said


def _other_shape() -> str:
    x = torch.randn(1, 6 + dist.get_rank(), 16)
    return _error_of(cp_backend(ulysses=2, inner="aot_eager"), x)


def _error_of(backend: Any, x: torch.Tensor) -> str:
    try:
        with torch.no_grad():
            torch.compile(Block(), backend=backend)(x)
    except Exception as error:
        cause = error.__cause__ if isinstance(error.__cause__, ScheduleError) else error
        return f"{type(cause).__name__}: {error}"
    return "no error"
