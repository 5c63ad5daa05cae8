"""The graph that a rank traces for one attention, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cp_compile.attention import AttentionSpec, attention

__all__ = ["structure", "trace"]


def trace(spec: AttentionSpec, inputs: list[Tensor | None], backward: bool = True) -> torch.fx.GraphModule:
    """Traces attention of this rank's ``q, k, v, mask`` with fake tensors; the gradients too."""

    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, grad: Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, mask, spec)
        return (out, *torch.autograd.grad(out, leaves, grad)) if backward else out

    q, _, v = inputs[:3]
    assert q is not None and v is not None
    grad = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fakes = [None if x is None else mode.from_tensor(x, static_shapes=True) for x in (*inputs, grad)]
        return make_fx(fn, tracing_mode="real")(*fakes)


def structure(graph: torch.fx.GraphModule) -> list[tuple[str, Any]]:
    """Ops in order with the shapes and strides of what they give, and who reads whom; no constants."""
    place = {n: i for i, n in enumerate(graph.graph.nodes)}
    out = []
    for n in graph.graph.nodes:
        values = [v for v in torch.utils._pytree.tree_leaves(n.meta.get("val")) if isinstance(v, Tensor)]
        sizes = [(tuple(v.shape), v.stride(), v.dtype) for v in values]
        out.append((str(n.target), (sizes, [place[i] for i in n.all_input_nodes])))
    return out
