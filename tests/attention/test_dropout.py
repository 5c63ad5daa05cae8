"""Dropout: statistically that of SDPA in every variant, a draw for each weight wherever it is, the same both ways."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cp_compile.attention import attention, dropout, ring
from cp_compile.attention.dropout import keep_weights
from cp_compile.mesh import Mesh
from tests.attention.cases import Case
from tests.emulate import emulate

pytestmark = pytest.mark.fast


def test_weights_are_kept_with_the_right_probability_and_independently() -> None:
    index = [torch.arange(n) for n in (3, 4, 64, 64)]
    for seed in (0, 1, 2**32 - 1):
        kept = keep_weights(torch.tensor(seed), *index, 0.3)
        assert kept.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
        assert kept.mean().item() == pytest.approx(1, abs=0.02)
        zero = (kept == 0).double().view(-1)
        for shift in (1, 63, 64, 65, 64 * 64, 64 * 64 * 4):  # neighbours in every dim
            both = (zero[shift:] * zero[:-shift]).mean().item()
            assert both == pytest.approx(0.09, abs=0.01)
    assert not torch.equal(keep_weights(torch.tensor(1), *index, 0.3), keep_weights(torch.tensor(2), *index, 0.3))


@pytest.mark.parametrize(("n", "u"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("replicated", [False, True])
def test_the_mean_of_many_draws_is_attention_without_dropout(n: int, u: int, replicated: bool) -> None:
    case = Case(n, u, (7,), batch=1, replicated=replicated, dtype=torch.float32, spec={"dropout_p": 0.25})
    q, k, v, _, _ = case.inputs()
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    many = [x.expand(3000, -1, -1, -1) for x in (q, k, v)]
    placement, _ = case.placements()

    def rank(mesh: Mesh) -> Tensor:
        rows = placement.rows(mesh.rank, "cpu")
        keys = slice(None) if replicated else rows
        return attention(many[0][:, :, rows], many[1][:, :, keys], many[2][:, :, keys], None, case.spec_of(mesh))

    for r, out in enumerate(emulate(n, u, rank)):
        torch.testing.assert_close(out.mean(0), want[0, :, placement.rows(r, "cpu")], atol=0.06, rtol=0)
        assert out.std(0).min() > 0.01


@pytest.mark.parametrize("rotate", ["alltoall", "allgather"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "u"), [(3, 1), (2, 2)])
def test_forward_and_backward_of_the_ring_drop_the_same_weights(
    n: int, u: int, rotate: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check_against_the_whole(Case(n, u, (7, 6), rotate=rotate, causal=causal, zigzag=causal), monkeypatch)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("u", "replicated"), [(2, False), (4, False), (3, True)])
def test_each_weight_has_a_draw_of_its_own_on_whatever_rank(
    u: int, replicated: bool, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check_against_the_whole(Case(1, u, (7, 6), causal=causal, replicated=replicated), monkeypatch)


def _check_against_the_whole(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients are those of one attention whose weights are dropped by the same hash."""
    for module in (ring, dropout):
        monkeypatch.setattr(module, "draw_seed", lambda device: torch.tensor(7))
    case = replace(case, q_heads=6, kv_heads=3, spec={"dropout_p": 0.5})
    q, k, v, _, grad = case.inputs()
    placement, _ = case.placements()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    kept = keep_weights(torch.tensor(7), *(torch.arange(m) for m in (2, 6, 13, 13)), 0.5).double()
    scores = leaves[0] @ leaves[1].repeat_interleave(2, 1).transpose(2, 3) / 8**0.5
    if case.causal:
        scores = scores.masked_fill(~torch.ones(13, 13, dtype=torch.bool).tril(), -torch.inf)
    want = (scores.softmax(-1) * kept) @ leaves[2].repeat_interleave(2, 1)
    want_grads = torch.autograd.grad(want, leaves, grad)

    def rank(mesh: Mesh) -> tuple[Tensor, list[Tensor]]:
        rows = placement.rows(mesh.rank, "cpu")
        keys = torch.arange(13) if case.replicated else rows
        mine = [x[:, :, at].clone().requires_grad_() for x, at in ((q, rows), (k, keys), (v, keys))]
        out = attention(*mine, None, case.spec_of(mesh))
        real = placement.valid(mesh.rank, "cpu").view(1, 1, -1, 1)
        return out.detach(), list(torch.autograd.grad(out, mine, grad[:, :, rows] * real))

    sums = [torch.zeros_like(x) for x in (q, k, v)]
    for r, (out, grads) in enumerate(emulate(case.ring, case.ulysses, rank)):
        rows = placement.rows(r, "cpu")
        keys = torch.arange(13) if case.replicated else rows
        torch.testing.assert_close(out, want[:, :, rows].detach())
        for total, g, at in zip(sums, grads, (rows, keys, keys)):
            total.index_add_(2, at, g)
    torch.testing.assert_close(sums, list(want_grads))
