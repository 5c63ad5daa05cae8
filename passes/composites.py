"""Ops that torch itself defines by other ops, and that we have no rule for, as those others.

``a & b`` is one (of ``bitwise_and``), ``torch.multiply`` and ``torch.linalg.norm`` are; there are some five hundred.
The capture stops above the place where torch opens them, so it is told to. Kernels with two results, which no rule
covers, are opened too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from . import _torch
from .rules import find_rule

__all__ = ["composites"]

aten = torch.ops.aten


def _std_mean(self: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return self.std(dim, correction=correction, keepdim=keepdim), self.mean(dim, keepdim=keepdim)


def _var_mean(self: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return self.var(dim, correction=correction, keepdim=keepdim), self.mean(dim, keepdim=keepdim)


def _log_sigmoid(self: Tensor) -> Tensor:
    return -torch.logaddexp(-self, self.new_zeros(()))


_TWO_RESULTS: dict[Any, Callable[..., Any]] = {
    aten.std_mean.correction: _std_mean,
    aten.var_mean.correction: _var_mean,
    aten.log_sigmoid.default: _log_sigmoid,
}


def composites() -> dict[Any, Callable[..., Any]]:
    """What each composite op without a rule is made of, as decompositions: rules of users are asked too."""
    functional = _torch.FunctionalTensorMode(pre_dispatch=True)  # some write to what they have made
    opened = {op: op.decompose for op in _defined_by_others()} | _TWO_RESULTS
    return {
        op: _torch.dispatch_functionalize(function, functional)
        for op, function in opened.items()
        if find_rule(op) is None
    }


@cache
def _defined_by_others() -> tuple[OpOverload, ...]:
    return tuple(
        op
        for op in torch.export.default_decompositions()
        if op.has_kernel_for_dispatch_key(_torch.COMPOSITE) and all(_is_tensor(r.type) for r in op._schema.returns)
    )


def _is_tensor(kind: Any) -> bool:
    return kind.isSubtypeOf(torch._C.TensorType.get()) or kind.isSubtypeOf(torch._C.ListType.ofTensors())
