"""Attention to one block of keys: ATen ops that also return the logsumexp, and plain math where none serves.

The ring needs the logsumexp to merge blocks, and a backward that takes the *global* output and logsumexp. Each
:class:`Kernel` has both. :func:`choose` picks one by device, dtype, head dims and what the attention asks for, and
respects ``torch.nn.attention.sdpa_kernel``. The CUDA kernels are written from their meta kernels in torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from cp_compile.passes._torch import statically_known_true

__all__ = ["Kernel", "accumulation_dtype", "choose"]

Forward = Callable[[Tensor, Tensor, Tensor, "Tensor | None", bool, float, "Tensor | None"], tuple[Tensor, Tensor]]
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, "Tensor | None", Tensor, Tensor, bool, float, "Tensor | None"],
    tuple[Tensor, Tensor, Tensor, "Tensor | None"],
]

_F = TypeVar("_F", bound=Callable[..., Any])

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Kernel:
    """Attention to a block of keys.

    Shapes: q ``[B, H, Lq, D]``, k ``[B, Hkv, Lk, D]``, v ``[B, Hkv, Lk, Dv]``; ``bias`` is None or additive,
    broadcastable to ``[B, H, Lq, Lk]``; ``causal`` masks above the diagonal of the *block*; ``weights`` is None or
    multiplies the attention weights (dropout). No length may be 0.

    Attributes:
        name: for the report.
        grouped: whether ``Hkv`` may be less than ``H``; query head ``i`` then reads kv head ``i // (H // Hkv)``.
        forward: ``(q, k, v, bias, causal, scale, weights)`` to the output ``[B, H, Lq, Dv]`` and the logsumexp
            ``[B, H, Lq]`` in :func:`accumulation_dtype`. The logsumexp of a row without any key is undefined.
        backward: ``(grad, q, k, v, bias, out, logsumexp, causal, scale, weights)`` to gradients of q, k, v and, of
            ``math`` alone, of the scores ``[B, H, Lq, Lk]``. The logsumexp of a row without any key must be finite.
    """

    name: str
    grouped: bool
    forward: Forward
    backward: Backward


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What scores are summed in: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def choose(
    device: str, dtype: torch.dtype, head_dim: int, v_head_dim: int, *, bias: bool, weights: bool, scores_grad: bool
) -> Kernel:
    """The kernel for a block.

    Args:
        device: its type, ``"cpu"`` or ``"cuda"``; any other gets plain math.
        dtype: of q, k and v.
        head_dim: of q and k.
        v_head_dim: of v.
        bias: whether blocks come with a mask of any kind.
        weights: whether attention weights are dropped.
        scores_grad: whether the gradient of the scores is asked for (a learned bias).
    """
    if weights or scores_grad:
        return MATH
    flash, same = torch.backends.cuda.flash_sdp_enabled(), head_dim == v_head_dim
    if device == "cpu":
        return CPU_FLASH if flash and same and dtype in (*_HALF, torch.float32, torch.float64) else MATH
    if device == "cuda" and dtype in (*_HALF, torch.float32):
        half = dtype in _HALF
        aligned = head_dim % (8 if half else 4) == 0 and v_head_dim % (8 if half else 4) == 0
        if flash and half and same and aligned and head_dim <= 256 and not bias:
            return CUDA_FLASH
        if torch.backends.cuda.mem_efficient_sdp_enabled() and aligned:
            return CUDA_EFFICIENT
        if torch.backends.cuda.cudnn_sdp_enabled() and half and aligned and max(head_dim, v_head_dim) <= 128:
            return CUDA_CUDNN
    return MATH


def _dense(function: _F) -> _F:
    """Fused kernels step through head dims one by one: CPU flash reads other memory where a view has another stride."""

    @wraps(function)
    def call(*args: Any) -> Any:
        return function(*(_last_dim_dense(x) if isinstance(x, Tensor) and x.dim() == 4 else x for x in args))

    return cast(_F, call)


def _last_dim_dense(x: Tensor) -> Tensor:
    return x if statically_known_true(x.stride(3) == 1) else x.contiguous()


# CPU flash takes a mask (fp32 or of q's dtype) together with `is_causal`, and grouped heads. A row without any key gets
# output 0 and logsumexp 0.


@_dense
def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)


@_dense
def _cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, None]:
    op = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    return *op(grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale), None


# CUDA flash takes no mask. Without dropout its backward reads no random state, but wants the tensors.


@_dense
def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return out, lse


@_dense
def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, None]:
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    offset = torch.zeros((), dtype=torch.uint64, device=q.device)
    op = _aten._scaled_dot_product_flash_attention_backward
    rows, columns = q.shape[2], k.shape[2]
    grads = op(grad, q, k, v, out, lse.contiguous(), None, None, rows, columns, 0.0, causal, seed, offset, scale=scale)
    return *grads, None


# CUDA efficient pads the rows of its logsumexp to a multiple of 32, and wants a bias of q's dtype, expanded, whose rows
# start at multiples of 16 elements.


def _aligned(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    if bias is None:
        return None
    columns = k.shape[2]
    bias = _zeros_after(bias.to(q.dtype).expand(-1, -1, -1, columns), -columns % 16).narrow(3, 0, columns)
    return bias.expand(q.shape[0], q.shape[1], q.shape[2], columns)


def _zeros_after(x: Tensor, extra: int) -> Tensor:
    return torch.cat([x, x.new_zeros(*x.shape[:-1], extra)], -1)


@_dense
def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    op = _aten._scaled_dot_product_efficient_attention
    out, lse, *_ = op(q, k, v, _aligned(bias, q, k), True, 0.0, causal, scale=scale)
    return out, lse.narrow(2, 0, q.shape[2])


@_dense
def _efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, None]:
    zero = torch.zeros((), dtype=torch.int64, device=q.device)
    lse = _zeros_after(lse, -q.shape[2] % 32)
    op = _aten._scaled_dot_product_efficient_attention_backward
    wanted, bias = [True, True, True, False], _aligned(bias, q, k)
    dq, dk, dv, _ = op(grad, q, k, v, bias, out, lse, zero, zero, 0.0, wanted, causal, scale=scale)
    return dq, dk, dv, None


# cuDNN gives its logsumexp a last dim of 1.


@_dense
def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    op = _aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = op(q, k, v, _aligned(bias, q, k), True, 0.0, causal, False, scale=scale)
    return out, lse.squeeze(3)


@_dense
def _cudnn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, None]:
    zero = torch.zeros((), dtype=torch.int64, device=q.device)
    op = _aten._scaled_dot_product_cudnn_attention_backward
    lse, bias, rows, columns = lse.contiguous().unsqueeze(3), _aligned(bias, q, k), q.shape[2], k.shape[2]
    grads = op(grad, q, k, v, out, lse, zero, zero, bias, None, None, rows, columns, 0.0, causal, scale=scale)
    return *grads, None


# Plain math. Heads of one group are folded into rows, so that no key is copied.


def _times(x: Tensor, y: Tensor) -> Tensor:
    """``[B, H, L, a] @ [B, Hkv, a, b]``, heads in groups."""
    return (x.reshape(x.shape[0], y.shape[1], -1, x.shape[3]) @ y).view(*x.shape[:3], y.shape[3])


def _transposed_times(x: Tensor, y: Tensor, heads: int) -> Tensor:
    """``[B, H, L, a]^T @ [B, H, L, b]``, summed over the heads of each of ``heads`` groups: ``[B, heads, a, b]``."""
    folded = (z.reshape(z.shape[0], heads, -1, z.shape[3]) for z in (x, y))
    return next(folded).transpose(2, 3) @ next(folded)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = _times(q * scale, k.transpose(2, 3))
    if bias is not None:
        scores = scores + bias
    if causal:
        row, column = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
        scores = torch.where(row.unsqueeze(1) >= column, scores, -torch.inf)
    return scores


def _math_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(q.dtype)
    scores = _scores(q.to(dtype), k.to(dtype), bias, causal, scale)
    lse = scores.logsumexp(3)
    p = (scores - torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(3)).exp()
    return _times(p if weights is None else p * weights, v.to(dtype)), lse


def _math_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = accumulation_dtype(q.dtype)
    q, k, v, grad = q.to(dtype), k.to(dtype), v.to(dtype), grad.to(dtype)
    p = (_scores(q, k, bias, causal, scale) - lse.unsqueeze(3)).exp()
    dp = _times(grad, v.transpose(2, 3))
    dv = _transposed_times(p if weights is None else p * weights, grad, k.shape[1])
    ds = p * ((dp if weights is None else dp * weights) - (grad * out).sum(3, keepdim=True))
    return _times(ds, k) * scale, _transposed_times(ds, q, k.shape[1]) * scale, dv, ds


CPU_FLASH = Kernel("cpu_flash", True, _cpu_forward, _cpu_backward)
CUDA_FLASH = Kernel("cuda_flash", True, _flash_forward, _flash_backward)
CUDA_EFFICIENT = Kernel("cuda_efficient", False, _efficient_forward, _efficient_backward)
CUDA_CUDNN = Kernel("cuda_cudnn", False, _cudnn_forward, _cudnn_backward)
MATH = Kernel("math", True, _math_forward, _math_backward)
