"""Ops that torch defines by other ops run on shards as those do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cp_compile.passes.composites import composites
from cp_compile.passes.costs import CostModel
from tests.passes.harness import attention_over, check, tensor

pytestmark = pytest.mark.fast

ALWAYS_SHARD = CostModel(peak=1e3, memory=1e3, bandwidth=1e30, latency=0.0)

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "and": lambda x: x.masked_fill((x > 0) & (x < 1), 0.0),
    "or": lambda x: x.masked_fill((x > 1) | (x < 0), 0.0),
    "multiply": lambda x: torch.multiply(x, 2.0),
    "true_divide": lambda x: torch.true_divide(x, x.abs() + 1),
    "subtract": lambda x: torch.subtract(x, x.sin()),
    "greater": lambda x: torch.greater(x, 0.5).to(x.dtype),
    "where": lambda x: torch.where(x > 0, 1.0, 0.0).to(x.dtype) * x,
    "isclose": lambda x: torch.isclose(x, x.round(), atol=0.2).to(x.dtype),
    "special.expit": torch.special.expit,
    "special.softmax": lambda x: torch.special.softmax(x, -1),
    "logsigmoid": F.logsigmoid,
    "linalg.norm": lambda x: x / torch.linalg.norm(x, dim=-1, keepdim=True),
    "linalg.vecdot": lambda x: x * torch.linalg.vecdot(x, x.cos()).unsqueeze(-1),
    "cosine_similarity": lambda x: x * F.cosine_similarity(x, x.cos(), dim=-1).unsqueeze(-1),
    "hstack of channels": lambda x: torch.hstack([x.transpose(0, 1), x.transpose(0, 1)])[:, :1].transpose(0, 1),
    "column_stack": lambda x: torch.column_stack([x[0, :, :2], x[0, :, 2:]]).unsqueeze(0),
    "tensordot": lambda x: torch.tensordot(x, torch.ones(8, 8, dtype=x.dtype), dims=1),
    "take_along_dim": lambda x: torch.take_along_dim(x, x.argsort(-1), -1),
    "trapezoid": lambda x: x * torch.trapezoid(x, dim=-1).unsqueeze(-1),
    "adaptive_avg_pool1d": lambda x: x + F.adaptive_avg_pool1d(x, 1),
    "diff": lambda x: torch.diff(x, dim=-1, append=x[..., :1]),
    "one_hot": lambda x: F.one_hot((x[..., 0] > 0).long(), 8).to(x.dtype) + x,
    "poisson_nll_loss": lambda x: F.poisson_nll_loss(x, x.abs(), reduction="none"),
    "kl_div": lambda x: F.kl_div(x, x.abs(), reduction="none"),
    "l1_loss": lambda x: x * F.l1_loss(x, x.sin()),
    "var_mean": lambda x: torch.var_mean(x, (0, 2), keepdim=True, correction=0)[0] * x,
    "std_mean": lambda x: torch.std_mean(x, -1, keepdim=True)[0] * x,
}


@pytest.mark.parametrize("name", OPS)
def test_between_two_attentions(name: str) -> None:
    compiled = check(
        lambda x: (attention_over(OPS[name](attention_over(x))),), [tensor(1, 7, 8)], 1, 2, costs=ALWAYS_SHARD
    )
    program = compiled.programs[0]
    assert len(program.attentions) == 2
    assert tuple(g.value for g in program.gathers) == next(iter(compiled.graph.find_nodes(op="output"))).args[0]


def test_ops_that_give_no_tensor_stay() -> None:
    assert torch.ops.aten.item.default not in composites()
    assert torch.ops.aten.sym_size.int not in composites()


def test_the_gradient_of_logsigmoid_at_zero() -> None:
    x = tensor(1, 7, 8)
    x[:, ::2] = 0.0
    check(lambda x: (attention_over(F.logsigmoid(x)),), [x.requires_grad_()], 2, 1, training=True, costs=ALWAYS_SHARD)
