"""Text whole on every rank beside sharded images, cross-attention of equal lengths, other shapes that SDPA takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cp_compile.attention import AttentionSpec, attention, variant
from cp_compile.mesh import Mesh
from cp_compile.placement import Placement
from tests.attention.cases import Case, check, reference
from tests.emulate import emulate, meshes, stats

pytestmark = pytest.mark.fast

DEGREES = pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2), (4, 2)])


@DEGREES
def test_keys_that_every_rank_has_count_once_and_cost_no_communication(ring: int, ulysses: int) -> None:
    case = Case(ring, ulysses, (13,), (7,), replicated=True)
    assert all(variant(case.spec_of(m)) == "local" for m in meshes(ring, ulysses))
    check(case)
    check(replace(case, q_heads=8, kv_heads=2, causal=True))


@DEGREES
@pytest.mark.parametrize("replicated", [False, True])
def test_cross_attention_of_equal_lengths(ring: int, ulysses: int, replicated: bool) -> None:
    check(Case(ring, ulysses, (9,), (9,), replicated=replicated))


@DEGREES
def test_queries_of_two_segments_against_keys_of_one(ring: int, ulysses: int) -> None:
    check(Case(ring, ulysses, (5, 8), (11,)))
    check(Case(ring, ulysses, (6,), (3, 9, 2), causal=True))


def _sharded(ring: int, ulysses: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> list[Tensor]:
    """Rows of every rank, compared along dim -2 with SDPA of the whole."""
    placement = Placement((q.shape[-2],), ring, ulysses)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)

    def rank(mesh: Mesh) -> Tensor:
        rows = placement.rows(mesh.rank, "cpu")
        spec = AttentionSpec(mesh, placement, placement)
        return attention(q[..., rows, :], k[..., rows, :], v[..., rows, :], mask, spec)

    results = emulate(ring, ulysses, rank)
    for r, out in enumerate(results):
        torch.testing.assert_close(out, want[..., placement.rows(r, "cpu"), :])
    return results


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 3, 4), (2, 1, 3, 4)])
def test_inputs_of_two_to_six_dims(ring: int, ulysses: int, lead: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(*lead, 7, 8, dtype=torch.float64) for _ in range(3))
    _sharded(ring, ulysses, q, k, v)
    _sharded(ring, ulysses, q, k, v, torch.rand(7, 7) < 0.7)
    _sharded(ring, ulysses, q, k, v, torch.randn(*lead, 7, 7, dtype=torch.float64))
    if lead:
        _sharded(ring, ulysses, q, k, v, torch.randn(*lead[1:], 1, 7, dtype=torch.float64))


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2)])
def test_batch_and_heads_broadcast_as_in_sdpa(ring: int, ulysses: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 7, 8, dtype=torch.float64)
    k, v = torch.randn(1, 4, 7, 8, dtype=torch.float64), torch.randn(1, 1, 7, 8, dtype=torch.float64)
    _sharded(ring, ulysses, q, k, v)
    _sharded(ring, ulysses, q[:, :1], k, v)


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2)])
def test_under_autocast_less_is_sent(ring: int, ulysses: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 8, 8) for _ in range(3))
    placement = Placement((8,), ring, ulysses)
    want = reference(q.double(), k.double(), v.double(), None, False, None)

    def rank(mesh: Mesh) -> Tensor:
        rows = placement.rows(mesh.rank, "cpu")
        with torch.autocast("cpu", torch.bfloat16):
            out = attention(*(x[:, :, rows] for x in (q, k, v)), None, AttentionSpec(mesh, placement, placement))
        assert stats().dtypes <= {torch.bfloat16}
        return out

    for r, out in enumerate(emulate(ring, ulysses, rank)):
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), want[:, :, placement.rows(r, "cpu")], atol=3e-2, rtol=0)


def test_rows_that_do_not_fit_the_placement_are_an_error() -> None:
    placement = Placement((8,), 1, 2)
    x = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match="has 5 rows; its placement has 4"):
        attention(x, x, x, None, AttentionSpec(meshes(1, 2)[0], placement, placement))
