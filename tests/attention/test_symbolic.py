"""Lengths that are not known when the graph is made: one graph serves them all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from cp_compile.attention import AttentionSpec, attention
from cp_compile.mesh import Mesh
from cp_compile.placement import Placement
from tests.attention.cases import reference
from tests.emulate import emulate, meshes

pytestmark = pytest.mark.fast


def _trace(mesh: Mesh, options: dict[str, Any], heads: int, masked: bool, zigzag: bool, text: int) -> Any:
    """A graph from whole ``x`` and its mask, of 37 rows for now, to this rank's rows of its self-attention."""

    def fn(x: Tensor, mask: Tensor) -> Tensor:
        rows = x.shape[2]
        placement = Placement((text, rows - text) if text else (rows,), mesh.ring, mesh.ulysses, zigzag)
        mine = x.index_select(2, placement.rows(mesh.rank, "cpu"))
        return attention(
            mine, mine, mine, mask if masked else None, AttentionSpec(mesh, placement, placement, **options)
        )

    return make_fx(fn, tracing_mode="symbolic")(torch.randn(2, heads, 37, 8), torch.randn(37))


@pytest.mark.parametrize(
    ("ring", "ulysses", "text", "options"),
    [
        (1, 3, 5, {}),
        (1, 2, 0, {"causal": True}),
        (2, 1, 5, {}),
        (2, 1, 5, {"causal": True}),
        (3, 1, 5, {"rotate": "allgather"}),
        (2, 2, 0, {}),
    ],
)
def test_a_graph_of_one_length_serves_others(ring: int, ulysses: int, text: int, options: dict[str, Any]) -> None:
    masked, heads, zigzag = "causal" not in options, 5, "causal" in options
    graphs = [_trace(mesh, options, heads, masked, zigzag, text) for mesh in meshes(ring, ulysses)]
    for rows in (38, 61, 50):
        torch.manual_seed(rows)
        x, mask = torch.randn(2, heads, rows, 8), torch.randn(rows)
        wide = x.double()
        want = reference(wide, wide, wide, mask.double() if masked else None, not masked, None)
        placement = Placement((text, rows - text) if text else (rows,), ring, ulysses, zigzag)
        outs = emulate(ring, ulysses, lambda mesh, x=x, mask=mask: graphs[mesh.rank](x, mask))  # type: ignore[misc]
        for r, out in enumerate(outs):
            torch.testing.assert_close(out.double(), want[:, :, placement.rows(r, "cpu")], atol=2e-5, rtol=0)
