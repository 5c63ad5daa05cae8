"""The cross entropy as we take it apart is torch's, and its logits stay on their ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cp_compile.passes.costs import CostModel
from cp_compile.passes.losses import LOSSES
from tests.passes.harness import attention_over, check, tensor

pytestmark = pytest.mark.fast

SHAPES = [(7,), (5, 7), (2, 7, 4), (2, 7, 3, 4)]
REDUCTIONS = ["none", "mean", "sum"]
ALWAYS_SHARD = CostModel(peak=1e3, memory=1e3, bandwidth=1e30, latency=0.0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ignored", [-100, 2])
def test_values_and_gradients(shape: tuple[int, ...], ignored: int) -> None:
    torch.manual_seed(0)
    ours = next(iter(LOSSES.values()))
    classes = 0 if len(shape) == 1 else 1
    target = torch.randint(0, 7, [n for d, n in enumerate(shape) if d != classes])
    logits = tensor(*shape)
    if target.dim():
        target.view(-1)[0] = ignored
        logits.movedim(classes, -1).reshape(-1, 7)[0, 3] = -torch.inf
    for weight, reduction, smoothing in itertools.product((None, tensor(7).abs()), REDUCTIONS, (0.0, 0.1)):
        if smoothing and logits.isinf().any():
            continue  # torch's own is not a number then
        results = []
        for function, how in ((F.cross_entropy, reduction), (ours, REDUCTIONS.index(reduction))):
            x = logits.clone().requires_grad_()
            out = function(x, target, weight, ignore_index=ignored, reduction=how, label_smoothing=smoothing)
            results.append((out, torch.autograd.grad(out.sum(), x)[0]))
        torch.testing.assert_close(results[1], results[0])


def test_probabilities_for_a_target() -> None:
    x, target = tensor(5, 7), tensor(5, 7, seed=1).softmax(-1)
    ours = next(iter(LOSSES.values()))
    torch.testing.assert_close(ours(x, target, None, 1, -100, 0.1), F.cross_entropy(x, target, label_smoothing=0.1))


def test_a_mean_over_many_rows_of_half_precision() -> None:
    torch.manual_seed(0)
    x, target = torch.randn(4097, 7), torch.randint(0, 7, (4097,))
    found = next(iter(LOSSES.values()))(x.bfloat16(), target)
    torch.testing.assert_close(found, F.cross_entropy(x.bfloat16().float(), target).bfloat16())


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_logits_of_tokens_are_not_gathered(ring: int, ulysses: int, reduction: str) -> None:
    target = torch.tensor([3, -100, 5, 1, 0, 6, 2, -100, 4, 4, 1])

    def step(x: Tensor, head: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(attention_over(x), head)
        shifted = F.pad(target, (0, 1), value=-100)[1:]
        return F.cross_entropy(logits.view(-1, 7), shifted, reduction=reduction)

    inputs = [tensor(1, 11, 8).requires_grad_(), tensor(7, 8).requires_grad_(), target]
    compiled = check(step, inputs, ring, ulysses, training=True, costs=ALWAYS_SHARD)
    assert reduction == "none" or not compiled.programs[0].gathers
