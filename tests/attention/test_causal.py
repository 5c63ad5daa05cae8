"""Causal attention in every variant: right for any placement, balanced for zigzag."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cp_compile.attention import attention
from cp_compile.mesh import Mesh
from tests.attention.cases import Case, check
from tests.emulate import emulate

pytestmark = pytest.mark.fast

MESHES = pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (2, 3), (4, 2)])


@MESHES
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("rotate", ["alltoall", "allgather"])
@pytest.mark.parametrize("lengths", [(24,), (13,), (1,), (7, 9), (3, 1, 12)])
def test_causal_by_global_rows(ring: int, ulysses: int, zigzag: bool, rotate: str, lengths: tuple[int, ...]) -> None:
    check(Case(ring, ulysses, lengths, causal=True, zigzag=zigzag, rotate=rotate))


@MESHES
@pytest.mark.parametrize("zigzag", [False, True])
def test_causal_is_aligned_to_the_top_left(ring: int, ulysses: int, zigzag: bool) -> None:
    check(Case(ring, ulysses, (11,), (5,), causal=True, zigzag=zigzag))
    check(Case(ring, ulysses, (5,), (11,), causal=True, zigzag=zigzag))


class _Work(TorchDispatchMode):
    """Counts pairs of rows and columns that attention kernels compute."""

    def __init__(self) -> None:
        super().__init__()
        self.forward, self.backward = 0.0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::_scaled_dot_product_flash_attention_for_cpu":
            self.forward += self._pairs(args[0], args[1], len(args) > 4 and args[4])
        if func._schema.name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward":
            self.backward += self._pairs(args[1], args[2], args[7])
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _pairs(q: torch.Tensor, k: torch.Tensor, causal: bool) -> float:
        return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (0.5 if causal else 1.0)


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (4, 1), (8, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("rotate", ["alltoall", "allgather"])
@pytest.mark.parametrize("lengths", [(256,), (64, 192)])
def test_zigzag_leaves_out_blocks_above_the_diagonal_and_is_balanced(
    ring: int, ulysses: int, rotate: str, lengths: tuple[int, ...]
) -> None:
    case = Case(ring, ulysses, lengths, batch=1, causal=True, zigzag=True, rotate=rotate)
    q, k, v, _, grad = case.inputs()
    placement, _ = case.placements()

    def rank(mesh: Mesh) -> tuple[float, float]:
        rows = placement.rows(mesh.rank, "cpu")
        leaves = [x[:, :, rows].requires_grad_() for x in (q, k, v)]
        with _Work() as work:
            attention(*leaves, None, case.spec_of(mesh)).backward(grad[:, :, rows])
        return work.forward, work.backward

    work = torch.tensor(emulate(ring, ulysses, rank))
    assert (work.amax(0) <= 1.1 * work.mean(0)).all()
    rows = sum(lengths)
    assert (work.sum(0) <= 0.5 * case.q_heads * rows * rows).all()
