"""What we put in place of torch's fused inference kernels gives what the kernels give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cp_compile.passes.fused import FUSED

pytestmark = pytest.mark.fast

MASKS = {
    "none": (None, None),
    "rows and columns": (torch.ones(5, 5, dtype=torch.bool).triu(1), 0),
    "keys": (torch.arange(5) >= torch.tensor([[3], [5]]), 1),
}


def _layer() -> tuple[nn.TransformerEncoderLayer, Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    for p in layer.parameters():
        nn.init.normal_(p, 0.3, 0.5)
    return layer, torch.randn(2, 5, 16)


def _attention(layer: nn.TransformerEncoderLayer) -> tuple[object, ...]:
    a = layer.self_attn
    return 16, 4, a.in_proj_weight, a.in_proj_bias, a.out_proj.weight, a.out_proj.bias


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("weights", "averaged"), [(False, True), (True, True), (True, False)])
def test_attention(mask: str, weights: bool, averaged: bool):
    layer, x = _layer()
    kernel, (value, kind) = torch.ops.aten._native_multi_head_attention.default, MASKS[mask]
    args = (x, x, x, *_attention(layer), value, weights, averaged, kind)
    with torch.no_grad():
        wanted, found = kernel(*args), FUSED[kernel](*args)
    torch.testing.assert_close(found[0], wanted[0])
    if weights:
        torch.testing.assert_close(found[1], wanted[1])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("gelu", [False, True])
def test_a_layer(mask: str, norm_first: bool, gelu: bool):
    layer, x = _layer()
    kernel, (value, kind) = torch.ops.aten._transformer_encoder_layer_fwd.default, MASKS[mask]
    norms = layer.norm1.weight, layer.norm1.bias, layer.norm2.weight, layer.norm2.bias
    linears = layer.linear1.weight, layer.linear1.bias, layer.linear2.weight, layer.linear2.bias
    args = (x, *_attention(layer), gelu, norm_first, 1e-5, *norms, *linears, value, kind)
    with torch.no_grad():
        torch.testing.assert_close(FUSED[kernel](*args), kernel(*args))
