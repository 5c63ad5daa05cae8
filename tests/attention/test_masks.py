"""Masks of every kind and shape: whole masks, whose rows follow q and whose columns follow the keys in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cp_compile.attention import AttentionSpec, attention
from cp_compile.mesh import Mesh
from tests.attention.cases import Case, Mask, check, reference
from tests.emulate import emulate

pytestmark = pytest.mark.fast

MESHES = pytest.mark.parametrize(
    ("ring", "ulysses", "rotate"),
    [(1, 4, "alltoall"), (4, 1, "alltoall"), (4, 1, "allgather"), (2, 2, "alltoall"), (2, 2, "allgather")],
)
DIMS = ["B11S", "BHSS", "1HSS", "11SS", "BH1S", "1H11", "111S", "B1S1", "..SS", "...S", ".HSS"]


@MESHES
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("kind", ["bool", "bias"])
def test_a_mask_broadcast_in_any_dim(ring: int, ulysses: int, rotate: str, dims: str, kind: str) -> None:
    check(Case(ring, ulysses, (7, 6), rotate=rotate, mask=Mask(kind, dims)))


@MESHES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_float_masks_of_any_dtype(ring: int, ulysses: int, rotate: str, dtype: torch.dtype) -> None:
    check(Case(ring, ulysses, (13,), rotate=rotate, mask=Mask("bias", "BHSS", dtype), dtype=torch.float32))


@MESHES
@pytest.mark.parametrize("kind", ["bool", "inf", "min"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_that_are_masked_everywhere(ring: int, ulysses: int, rotate: str, kind: str, dtype: torch.dtype) -> None:
    check(Case(ring, ulysses, (7, 7), rotate=rotate, mask=Mask(kind, "B1SS", torch.float32, dead=0.4), dtype=dtype))


@MESHES
def test_key_masks_with_uneven_shards(ring: int, ulysses: int, rotate: str) -> None:
    for rows in (14, 13):
        check(Case(ring, ulysses, (rows,), rotate=rotate, mask=Mask("bool", "B11S")))


@MESHES
def test_cross_attention_with_a_text_mask(ring: int, ulysses: int, rotate: str) -> None:
    case = Case(ring, ulysses, (14,), (9,), rotate=rotate, mask=Mask("bool", "B11S"))
    check(case)
    check(replace(case, replicated=True))


@MESHES
@pytest.mark.parametrize("dims", ["BHSS", "1H11", "11SS", "B1S1", ".HSS"])
@pytest.mark.parametrize("replicated", [False, True])
def test_a_learned_bias_gets_its_gradient(ring: int, ulysses: int, rotate: str, dims: str, replicated: bool) -> None:
    check(
        Case(
            ring,
            ulysses,
            (9, 4),
            rotate=rotate,
            mask=Mask("bias", dims, torch.float64),
            learned=True,
            replicated=replicated,
            q_heads=6,
            kv_heads=3,
        )
    )


def _masked(case: Case, mask: Tensor) -> None:
    """Every rank's output under a given mask."""
    q, k, v, _, _ = case.inputs()
    wide = mask if mask.dtype == torch.bool else mask.double()
    want = reference(q.double(), k.double(), v.double(), wide, False, None)
    placement, _ = case.placements()

    def rank(mesh: Mesh) -> Tensor:
        rows = placement.rows(mesh.rank, "cpu")
        spec: AttentionSpec = case.spec_of(mesh)
        return attention(q[:, :, rows], k[:, :, rows], v[:, :, rows], mask, spec)

    for r, out in enumerate(emulate(case.ring, case.ulysses, rank)):
        torch.testing.assert_close(out.double(), want[:, :, placement.rows(r, "cpu")], atol=2e-6, rtol=1e-5)


@MESHES
def test_the_mask_follows_the_order_of_text_and_image(ring: int, ulysses: int, rotate: str) -> None:
    mask = torch.ones(1, 1, 1, 16, dtype=torch.bool)
    mask[..., 2:8] = False
    _masked(Case(ring, ulysses, (8, 8), batch=1, rotate=rotate), mask)


@pytest.mark.parametrize("masked", [[0], [0, 1], [1, 2], [0, 2, 3], [1, 2, 3]])
@pytest.mark.parametrize("kind", ["bool", "inf"])
def test_blocks_that_are_masked_everywhere_in_any_order(masked: list[int], kind: str) -> None:
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool)
    for block in masked:
        mask[..., 4 * block : 4 * block + 4] = False
    _masked(Case(4, 1, (16,)), mask if kind == "bool" else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf))


@pytest.mark.parametrize("value", [-1e4, -1e9, -3e38])
@pytest.mark.parametrize("rotate", ["alltoall", "allgather"])
def test_rows_of_one_large_negative_value_weigh_their_keys_as_sdpa_does(value: float, rotate: str) -> None:
    case = Case(4, 1, (13,), rotate=rotate, dtype=torch.float32)
    q, k, v, _, _ = case.inputs()
    mask = torch.zeros(1, 1, 13, 13)
    mask[:, :, 3:5] = value
    mask[:, :, 6, 4:] = value
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    placement, _ = case.placements()

    def rank(mesh: Mesh) -> Tensor:
        rows = placement.rows(mesh.rank, "cpu")
        return attention(q[:, :, rows], k[:, :, rows], v[:, :, rows], mask, case.spec_of(mesh))

    limit = 2e-3 if value > -1e8 else 2e-6  # at -1e4 SDPA itself is that far from the truth
    for r, out in enumerate(emulate(4, 1, rank)):
        torch.testing.assert_close(out, want[:, :, placement.rows(r, "cpu")], atol=limit, rtol=0)


def test_a_mask_beside_causal_is_an_error_as_in_sdpa() -> None:
    case = Case(1, 1, (8,), causal=True)
    q, k, v, _, _ = case.inputs()
    with pytest.raises(ValueError, match="mask and is causal"):
        emulate(1, 1, lambda mesh: attention(q, k, v, torch.ones(8, 8, dtype=torch.bool), case.spec_of(mesh)))
