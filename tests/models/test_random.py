"""Random numbers: what one process draws for a token is what the rank that has the token uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.ranks


class Noisy(nn.Module):
    """Draws of each kind, on values that are sharded."""

    def __init__(self, again: bool = False):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.again = again

    def block(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(2, (4, 4)).transpose(1, 2) for y in self.qkv(F.dropout(x, 0.3)).chunk(3, 2))
        return F.dropout(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)), 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.randn_like(x) * torch.rand_like(x[..., :1]) + torch.empty_like(x).bernoulli_(0.5)
        for _ in range(2):
            x = x + (checkpoint(self.block, x, use_reentrant=False) if self.again else self.block(x))
        return x


@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize(("world", "degrees"), [(2, {"ulysses": 2}), (3, {"ring": 3})], ids=str)
def test_each_token_gets_the_draws_of_one_process(ranks, world, degrees, again):
    answers = ranks(world).run(_against_one_process, degrees, again)
    assert len({digest for _, digest, _ in answers}) == 1
    for error, _, sharded in answers:
        assert error <= 1e-11
        assert sharded == 2


def _against_one_process(degrees: dict[str, int], again: bool) -> tuple[float, str, int]:
    from cp_compile import cp_backend
    from cp_compile.agreement import digest, relative_error

    torch.manual_seed(1)
    model = Noisy(again).double()
    x = torch.randn(2, 13, 16, dtype=torch.float64)
    backend = cp_backend(**degrees, inner="aot_eager")
    found: list[Any] = []
    for run in (model, torch.compile(model, backend=backend)):
        torch.manual_seed(2)
        leaf = x.clone().requires_grad_()
        out = run(leaf)
        grads = torch.autograd.grad(out.square().sum(), [leaf, *model.parameters()])
        found.append([out.detach(), *grads, torch.rand(3)])  # and the generator is where it was
    sharded = sum(a.variant != "whole" for a in backend.report.graphs[0].attentions)
    return relative_error(found[1], found[0]), digest(found[1]), sharded


def test_dropped_attention_weights_are_right_on_average(ranks):
    """The mean over many draws, in every variant, is attention without dropout; no two tokens share their draws."""
    for degrees in ({"ulysses": 2}, {"ring": 2}):
        for mean_error, shared in ranks(2).run(_attention_dropout, degrees):
            assert mean_error < 0.05
            assert abs(shared - 0.25) < 0.02  # two independent draws with p=0.5 both drop


def _attention_dropout(degrees: dict[str, int]) -> tuple[float, float]:
    from cp_compile import cp_backend

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    torch.manual_seed(3)
    batch, heads, rows = 4000, 2, 6
    q = torch.zeros(batch, heads, rows, 4)
    v = torch.eye(rows).expand(batch, heads, rows, rows)  # each output is its row of dropped weights
    out = torch.compile(Attention(), backend=cp_backend(**degrees, inner="aot_eager"))(q, q, v)
    dropped = (out == 0).double().flatten(1, 2)  # [batch, heads * rows, columns]
    pairs = torch.einsum("bic,bjc->ij", dropped, dropped) / (batch * rows)
    others = pairs[~torch.eye(len(pairs), dtype=torch.bool)]
    worst = max(others.min().item(), others.max().item(), key=lambda x: abs(x - 0.25))
    return (out.mean(0) - 1 / rows).abs().max().item(), worst
