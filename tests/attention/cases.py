"""One attention as data, and its check: every rank against explicit float64 math on the whole tensors.

The reference is written out here, not taken from SDPA: the product calls SDPA and its kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cp_compile.attention import AttentionSpec, attention, collectives, elements_sent
from cp_compile.mesh import Mesh
from cp_compile.placement import Placement
from tests.emulate import emulate, stats

Attend = Callable[[Tensor, Tensor, Tensor, "Tensor | None", AttentionSpec], Tensor]

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}


@dataclass(frozen=True)
class Mask:
    """A random mask.

    Attributes:
        kind: ``bool``, ``bias`` (any values), ``inf`` (0 and -inf), ``min`` (0 and the dtype's most negative number).
        dims: sizes of the four dims, each 1 or the full one, as a string: ``"B11S"``, ``"1HSS"``...; a ``.`` leaves a
            leading dim out.
        dtype: of a float mask.
        dead: share of rows that are masked everywhere.
    """

    kind: str = "bool"
    dims: str = "B11S"
    dtype: torch.dtype = torch.float32
    dead: float = 0.0

    def make(self, full: tuple[int, ...]) -> Tensor:
        shape = [1 if c == "1" else n for c, n in zip(self.dims, full) if c != "."]
        if self.kind == "bias":
            return torch.randn(shape).to(self.dtype)
        seen = torch.rand(shape) < 0.6
        seen[..., 0] |= ~seen.any(-1)
        seen &= torch.rand(shape[:-1]).unsqueeze(-1) >= self.dead
        if self.kind == "bool":
            return seen
        low = -torch.inf if self.kind == "inf" else torch.finfo(self.dtype).min
        return torch.zeros(shape, dtype=self.dtype).masked_fill(~seen, low)


@dataclass(frozen=True)
class Case:
    """Everything about one attention. ``kv_lengths`` None: self-attention, one placement for both."""

    ring: int
    ulysses: int
    q_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...] | None = None
    batch: int = 2
    q_heads: int = 4
    kv_heads: int = 4
    dim: int = 8
    v_dim: int = 8
    mask: Mask | None = None
    learned: bool = False
    causal: bool = False
    zigzag: bool = False
    replicated: bool = False
    rotate: str = "alltoall"
    dtype: torch.dtype = torch.float64
    scale: float | None = None
    fp32: bool = True
    seed: int = 0
    spec: dict[str, Any] = field(default_factory=dict)

    def placements(self) -> tuple[Placement, Placement]:
        q = Placement(self.q_lengths, self.ring, self.ulysses, self.zigzag)
        kv = q if self.kv_lengths is None else Placement(self.kv_lengths, self.ring, self.ulysses, self.zigzag)
        return q, kv

    def spec_of(self, mesh: Mesh) -> AttentionSpec:
        q, kv = self.placements()
        return AttentionSpec(
            mesh,
            q,
            None if self.replicated else kv,
            causal=self.causal,
            scale=self.scale,
            enable_gqa=self.q_heads != self.kv_heads,
            rotate=self.rotate,
            convert_to_fp32=self.fp32,
            **self.spec,
        )

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """q, k, v, mask and the gradient of the output, whole."""
        torch.manual_seed(self.seed)
        q_placement, kv_placement = self.placements()
        sq, sk = int(q_placement.total), int(kv_placement.total)
        q = torch.randn(self.batch, self.q_heads, sq, self.dim).to(self.dtype)
        k = torch.randn(self.batch, self.kv_heads, sk, self.dim).to(self.dtype)
        v = torch.randn(self.batch, self.kv_heads, sk, self.v_dim).to(self.dtype)
        grad = torch.randn(self.batch, self.q_heads, sq, self.v_dim).to(self.dtype)
        mask = None if self.mask is None else self.mask.make((self.batch, self.q_heads, sq, sk))
        if mask is not None and self.mask is not None and self.mask.kind == "min":
            # Nobody learns from a row that is masked everywhere; the kernels' own gradients there are arbitrary.
            grad = grad * (mask != torch.finfo(mask.dtype).min).any(-1, keepdim=True)
        return q, k, v, mask, grad.to(self.dtype)


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    """Attention in float64; a row that sees no key is zero."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0) @ v


def check(case: Case, attend: Attend = attention) -> None:
    """Compares forward, gradients, padding and communication of every rank with the reference."""
    q, k, v, mask, grad = case.inputs()
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    wide_mask = mask if mask is None or mask.dtype == torch.bool else mask.double().requires_grad_(case.learned)
    want = reference(*wide, wide_mask, case.causal, case.scale)
    leaves = [*wide, *([wide_mask] if case.learned else [])]
    want_grads = torch.autograd.grad(want, leaves, grad.double())
    q_placement, kv_placement = case.placements()

    def rank(mesh: Mesh) -> tuple[Tensor, list[Tensor]]:
        spec = case.spec_of(mesh)
        rows = q_placement.rows(mesh.rank, "cpu")
        mine = q[:, :, rows].requires_grad_()
        if case.replicated:
            keys, values = k.clone().requires_grad_(), v.clone().requires_grad_()
        else:
            columns = kv_placement.rows(mesh.rank, "cpu")
            keys, values = k[:, :, columns].requires_grad_(), v[:, :, columns].requires_grad_()
        bias = mask if mask is None else mask.clone().requires_grad_(case.learned)
        out = attend(mine, keys, values, bias, spec)
        assert out.dtype == case.dtype
        assert stats().collectives == collectives(spec), (stats().calls, collectives(spec))
        assert stats().elements == elements_sent(spec, q.shape, k.shape, v.shape)
        wanted = [mine, keys, values, *([bias] if case.learned else [])]
        real = q_placement.valid(mesh.rank, "cpu").view(1, 1, -1, 1)
        return out.detach(), list(torch.autograd.grad(out, wanted, grad[:, :, rows] * real))

    results = emulate(case.ring, case.ulysses, rank)
    q_grad, k_grad, v_grad = (torch.zeros_like(x) for x in wide)
    mask_grad = torch.zeros(())
    for r, (out, grads) in enumerate(results):
        rows, columns = q_placement.rows(r, "cpu"), kv_placement.rows(r, "cpu")
        _close(f"output of rank {r}", out, want[:, :, rows], case.dtype, want)
        assert not grads[0][:, :, ~q_placement.valid(r, "cpu")].any(), f"gradient of padded queries of rank {r}"
        q_grad.index_add_(2, rows, grads[0].double())
        if case.replicated:
            k_grad += grads[1]
            v_grad += grads[2]
        else:
            padding = ~kv_placement.valid(r, "cpu")
            assert not grads[1][:, :, padding].any(), f"gradient of padded keys of rank {r}"
            assert not grads[2][:, :, padding].any(), f"gradient of padded values of rank {r}"
            k_grad.index_add_(2, columns, grads[1].double())
            v_grad.index_add_(2, columns, grads[2].double())
        if case.learned:
            mask_grad = mask_grad + grads[3].double()
    for name, got, expected in zip(("dq", "dk", "dv", "dmask"), (q_grad, k_grad, v_grad, mask_grad), want_grads):
        coarse = case.mask.dtype if name == "dmask" and case.mask is not None else case.dtype
        _close(name, got, expected, max(case.dtype, coarse, key=TOLERANCE.__getitem__), expected)


def _close(name: str, got: Tensor, want: Tensor, dtype: torch.dtype, scale: Tensor) -> None:
    assert got.shape == want.shape, (name, got.shape, want.shape)
    error = (got.double() - want.double()).abs().max().item()
    limit = TOLERANCE[dtype] * max(1.0, scale.abs().max().item())
    assert error <= limit, f"{name}: off by {error:.2e}, {limit:.2e} allowed"
