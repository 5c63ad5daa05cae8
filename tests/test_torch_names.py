"""Private names of torch that we use: when a release moves one, this fails first, and says which."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.fast


def test_every_private_name_is_where_we_take_it_from():
    from cp_compile.passes import _torch

    for name in _torch.__all__:
        assert getattr(_torch, name, None) is not None, name


def test_the_capture_keeps_attention_and_linear_whole():
    """What :func:`aot_export_module` promises nowhere, and the whole compiler rests on."""
    import torch
    from torch import nn

    from cp_compile.passes import _torch

    class Model(nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
            return (nn.functional.scaled_dot_product_attention(x, x, x) + nn.functional.linear(x, w),)

    args = (torch.randn(1, 2, 4, 8), torch.randn(8, 8))
    module, _ = _torch.aot_export_module(Model(), args, trace_joint=False, pre_dispatch=True)
    targets = [n.target for n in module.graph.nodes if n.op == "call_function"]
    assert torch.ops.aten.scaled_dot_product_attention.default in targets
    assert torch.ops.aten.linear.default in targets
