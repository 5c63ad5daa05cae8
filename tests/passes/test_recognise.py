"""Attention written by hand is found where it is attention, and left alone where it is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cp_compile.passes.capture import capture

pytestmark = pytest.mark.fast

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def _attentions(function: Callable[..., object], *args: Tensor) -> int:
    """Attentions in the captured graph, which must give what the function gives."""
    found = []

    def backend(gm, example_inputs):
        captured = capture(gm, example_inputs)
        found.append(sum(n.target is ATTENTION for n in captured.module.graph.nodes))
        wanted = gm(*example_inputs)
        for a, b in zip(captured.module(*captured.prefix, *example_inputs), wanted, strict=True):
            torch.testing.assert_close(a, b)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend)(*args)
    return found[0]


def _qkv(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 4, n, 8, dtype=dtype) for n in (5, 7, 7)]


def test_matmul_softmax_matmul_is_attention():
    assert _attentions(lambda q, k, v: (q @ k.transpose(-1, -2) * 0.3).softmax(-1) @ v, *_qkv()) == 1


def test_a_mask_added_after_scaling_is_its_mask():
    mask = torch.randn(2, 1, 5, 7, dtype=torch.float64)
    assert _attentions(lambda q, k, v, m: (q @ k.mT / 2.0 + m).softmax(-1) @ v, *_qkv(), mask) == 1
    assert _attentions(lambda q, k, v, m: (m + q @ k.mT / 2.0).softmax(-1) @ v, *_qkv(), mask) == 1


def test_a_mask_that_is_scaled_too_is_left_alone():
    mask = torch.randn(2, 1, 5, 7, dtype=torch.float64)
    assert _attentions(lambda q, k, v, m: ((q @ k.mT + m) / 2.0).softmax(-1) @ v, *_qkv(), mask) == 0


def test_einsum_is_attention():
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.einsum("bhqd,bhkd->bhqk", q, k).mul(0.3).softmax(-1)
        return torch.einsum("bhqk,bhkd->bhqd", weights, v)

    assert _attentions(function, *_qkv()) == 1


def test_baddbmm_is_attention():
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        scores = torch.baddbmm(q.new_zeros(8, 5, 7), q, k.mT, beta=0, alpha=0.3)
        return torch.bmm(nn.functional.dropout(scores.softmax(-1), 0.5, training=False), v)

    assert _attentions(function, *_qkv()) == 1


def test_baddbmm_onto_a_mask_is_attention():
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        mask = q.new_zeros(8, 1, 7).masked_fill(torch.arange(7) > 4, -torch.inf)
        return torch.bmm(torch.baddbmm(mask, q, k.mT, alpha=0.3).softmax(-1), v)

    assert _attentions(function, *_qkv()) == 1


def test_weights_that_are_wanted_too_are_computed_beside_attention():
    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = (q @ k.mT).softmax(-1)
        return weights @ v, weights

    assert _attentions(function, *_qkv()) == 1


def test_a_softmax_in_fp32_between_half_precision_products_is_attention():
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * 0.3).float().softmax(-1).to(v.dtype) @ v

    found = []

    def backend(gm, example_inputs):
        found.append(sum(n.target is ATTENTION for n in capture(gm, example_inputs).module.graph.nodes))
        return gm.forward

    with torch.no_grad():
        torch.compile(function, backend=backend)(*_qkv(torch.bfloat16))
    assert found == [1]


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
        lambda q, k, v: (q @ k.mT).masked_fill(torch.ones(5, 7, dtype=torch.bool).tril(), -torch.inf).softmax(-1) @ v,
        lambda q, k, v: v.mT @ (q @ k.mT).softmax(-1).mT,
    ],
    ids=["softmax over rows", "rows masked everywhere are NaN", "weights on the right"],
)
def test_what_is_not_quite_attention_is_left_alone(function: Callable[..., object]):
    q, k, v = _qkv()
    torch._dynamo.reset()
    found = []

    def backend(gm, example_inputs):
        found.append(sum(n.target is ATTENTION for n in capture(gm, example_inputs).module.graph.nodes))
        return gm.forward

    with torch.no_grad():
        torch.compile(function, backend=backend)(q, k, v)
    assert found == [0]
