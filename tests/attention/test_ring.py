"""What is particular to the ring: overlap, memory, kernels, precision, its own backward."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from cp_compile.attention import AttentionSpec, attention
from cp_compile.attention.heads import plan_heads
from cp_compile.attention.kernel import choose
from cp_compile.attention.ring import plan_ring
from cp_compile.mesh import Mesh
from tests.attention.cases import Case, Mask, check, reference
from tests.attention.trace import trace
from tests.emulate import emulate, meshes

pytestmark = pytest.mark.fast


def _graph(case: Case, backward: bool) -> torch.fx.Graph:
    q, k, v, mask, _ = case.inputs()
    mesh = meshes(case.ring, case.ulysses)[0]
    rows = case.placements()[0].rows(0, "cpu")
    return trace(case.spec_of(mesh), [q[:, :, rows], k[:, :, rows], v[:, :, rows], mask], backward).graph


def _story(graph: torch.fx.Graph) -> str:
    """The order of sends (s), waits (w), attentions (a) and their backwards (b)."""
    letters = {
        "all_to_all_single": "s",
        "wait_tensor": "w",
        "_scaled_dot_product_flash_attention_for_cpu": "a",
        "_scaled_dot_product_flash_attention_for_cpu_backward": "b",
    }
    names = [str(n.target).split(".")[1] for n in graph.nodes if n.op == "call_function" and "." in str(n.target)]
    return "".join(letters.get(n, "") for n in names)


def test_a_block_is_on_its_way_while_the_one_before_is_computed() -> None:
    assert _story(_graph(Case(4, 1, (16,)), backward=False)) == "saw" * 3 + "a"


def test_gradients_of_keys_travel_with_them_and_one_hop_more() -> None:
    story = _story(_graph(Case(4, 1, (16,)), backward=True)).removeprefix("saw" * 3 + "a")
    # Keys leave, a block is computed, its gradients join those that have come and leave too, the next keys are there.
    assert story == "sbsw" + "sbwsw" * 2 + "bwsw"


class _Buffers(TorchDispatchMode):
    """Most storages of at least a size that are alive at once, of those made in this mode."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.alive, self.most = size, set(), 0  # type: ignore[var-annotated]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name == "_c10d_functional::all_to_all_single" or func._schema.name == "aten::cat":
            storage = out.untyped_storage()
            if storage.nbytes() == self.size:
                self.alive.add(storage._cdata)
                weakref.finalize(storage, self.alive.discard, storage._cdata)
        self.most = max(self.most, len(self.alive))
        return out


@pytest.mark.parametrize("ring", [3, 5])
def test_no_more_than_two_blocks_of_keys_are_alive(ring: int) -> None:
    case = Case(ring, 1, (8 * ring,))
    q, k, v, _, _ = case.inputs()
    placement, _ = case.placements()

    def rank(mesh: Mesh) -> int:
        rows = placement.rows(mesh.rank, "cpu")
        mine = [x[:, :, rows] for x in (q, k, v)]
        size = 8 * (mine[1].numel() + mine[2].numel())
        gc.disable()
        with _Buffers(size) as buffers:
            attention(*mine, None, case.spec_of(mesh))
        gc.enable()
        return buffers.most

    assert max(emulate(ring, 1, rank)) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rotate", ["alltoall", "allgather"])
@pytest.mark.parametrize("fp32", [False, True])
def test_every_dtype(dtype: torch.dtype, rotate: str, fp32: bool) -> None:
    check(Case(4, 1, (21,), dtype=dtype, rotate=rotate, fp32=fp32))
    check(Case(2, 2, (21,), dtype=dtype, rotate=rotate, fp32=fp32, mask=Mask("bool", "B11S")))


@pytest.mark.parametrize("scale", [None, 0.1, 1.0])
def test_scale(scale: float | None) -> None:
    check(Case(2, 2, (9,), scale=scale))


@pytest.mark.parametrize(("dim", "v_dim"), [(1, 1), (3, 3), (8, 5), (5, 8), (80, 80), (24, 16)])
def test_any_head_dims(dim: int, v_dim: int) -> None:
    for mesh in ((3, 1), (1, 3), (2, 2)):
        check(Case(*mesh, (10,), dim=dim, v_dim=v_dim))


def test_plain_math_serves_everything() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        for mask in (None, Mask("bool", "BHSS"), Mask("bias", "B1SS")):
            check(Case(3, 1, (10,), mask=mask, q_heads=6, kv_heads=3))
        check(Case(3, 1, (7, 9), causal=True, zigzag=True))


def _errors(ring: int, ulysses: int, rotate: str) -> tuple[list[float], list[float]]:
    """Root mean square errors against float64 of output, dq, dk and dv: of all ranks, and of SDPA in the same dtype."""
    case = Case(
        ring, ulysses, (512,), batch=1, q_heads=8, kv_heads=8, dim=64, v_dim=64, dtype=torch.bfloat16, rotate=rotate
    )
    *inputs, _, grad = case.inputs()
    wide = [x.double().requires_grad_() for x in inputs]
    exact = reference(*wide, None, False, None)
    want = [exact, *torch.autograd.grad(exact, wide, grad.double())]
    leaves = [x.clone().requires_grad_() for x in inputs]
    plain = torch.nn.functional.scaled_dot_product_attention(*leaves)
    placement, _ = case.placements()

    def rank(mesh: Mesh) -> list[Tensor]:
        rows = placement.rows(mesh.rank, "cpu")
        mine = [x[:, :, rows].requires_grad_() for x in inputs]
        out = attention(*mine, None, case.spec_of(mesh))
        return [out, *torch.autograd.grad(out, mine, grad[:, :, rows])]

    def rms(xs: list[Tensor]) -> list[float]:
        return [(x.double() - y).square().mean().sqrt().item() for x, y in zip(xs, want)]

    ours = [placement.merge(torch.stack(x, 2), 2) for x in zip(*emulate(ring, ulysses, rank))]
    return rms(ours), rms([plain, *torch.autograd.grad(plain, leaves, grad)])


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (4, 1), (8, 1), (4, 2)])
@pytest.mark.parametrize("rotate", ["alltoall", "allgather"])
def test_errors_of_bf16_do_not_grow_with_the_ring(ring: int, ulysses: int, rotate: str) -> None:
    ours, plain = _errors(ring, ulysses, rotate)
    for name, a, b in zip(("out", "dq", "dk", "dv"), ours, plain):
        assert a <= 1.5 * b, (name, a, b)


def test_the_report_can_name_the_kernel() -> None:
    case = Case(2, 1, (8,), dtype=torch.float32)
    q, _, v, _, _ = case.inputs()
    plan = plan_ring(q, v, None, plan_heads(4, 4, 1), case.spec_of(meshes(2, 1)[0]))
    assert plan.kernel.name == "cpu_flash"


@pytest.mark.parametrize(
    ("device", "dtype", "dims", "flags", "name"),
    [
        ("cpu", torch.float32, (8, 8), {}, "cpu_flash"),
        ("cpu", torch.float64, (8, 8), {"bias": True}, "cpu_flash"),
        ("cpu", torch.float32, (8, 5), {}, "math"),
        ("cpu", torch.float32, (8, 8), {"weights": True}, "math"),
        ("cpu", torch.float32, (8, 8), {"scores_grad": True}, "math"),
        ("cuda", torch.bfloat16, (64, 64), {}, "cuda_flash"),
        ("cuda", torch.bfloat16, (64, 64), {"bias": True}, "cuda_efficient"),
        ("cuda", torch.float32, (64, 64), {}, "cuda_efficient"),
        ("cuda", torch.bfloat16, (64, 128), {}, "cuda_efficient"),
        ("cuda", torch.bfloat16, (63, 63), {}, "math"),
        ("cuda", torch.float64, (64, 64), {}, "math"),
        ("xpu", torch.float32, (8, 8), {}, "math"),
    ],
)
def test_kernels_by_device_dtype_and_need(
    device: str, dtype: torch.dtype, dims: tuple[int, int], flags: dict[str, bool], name: str
) -> None:
    need = {"bias": False, "weights": False, "scores_grad": False, **flags}
    assert choose(device, dtype, *dims, **need).name == name


def test_the_users_choice_of_kernels_is_respected() -> None:
    need = {"bias": False, "weights": False, "scores_grad": False}
    with sdpa_kernel(SDPBackend.MATH):
        assert choose("cuda", torch.bfloat16, 64, 64, **need).name == "math"
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert choose("cuda", torch.bfloat16, 64, 64, **need).name == "cuda_cudnn"
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert choose("cuda", torch.bfloat16, 64, 64, **need).name == "cuda_efficient"


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_head_dims_that_are_not_dense_in_memory(ring: int, ulysses: int, dtype: torch.dtype) -> None:
    """CPU flash, forward and backward, steps through a head dim by one whatever its stride."""

    def by_columns(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
        return attention(*(x.mT.contiguous().mT for x in (q, k, v)), mask, spec)

    case = Case(ring, ulysses, (9, 5), dtype=dtype)
    check(case, by_columns)
    check(replace(case, mask=Mask("bias", "BHSS")), by_columns)
