"""Ring attention: queries stay, keys and values go round (arXiv 2310.01889; with ulysses inside, arXiv 2405.07719).

::

    rank i, step t:   start sending kv to i+1 | attend to the kv of rank i-t | merge by logsumexp | wait

The ring owns its backward: the logsumexp of the attention ops has no derivative. Every block's backward is given the
*global* output and logsumexp, and the gradients of keys and values travel with them and take one more hop home,
summed in fp32. The balanced causal pattern is zigzag, as in Megatron-LM and zigzag ring flash attention; see blocks.py.

Dropout is decided by a hash (dropout.py) and applied by the plain math kernel. Double backward is not supported.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from cp_compile.attention.blocks import Block, RingPlan, order_matters
from cp_compile.attention.dropout import draw_seed
from cp_compile.attention.heads import HeadPlan, plan_heads
from cp_compile.attention.kernel import MATH, accumulation_dtype, choose
from cp_compile.attention.spec import AttentionSpec
from cp_compile.attention.travel import KeyGrads, Keys
from cp_compile.attention.ulysses import exchange_heads
from cp_compile.placement import Size

__all__ = ["plan_ring", "ring_attention", "unified_attention"]


def ring_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """Attention by rotation of keys on a mesh without ulysses.

    Args:
        q: ``[B, Hq, spec.q.local, D]``.
        k: ``[B, Hkv, spec.kv.local, D]``.
        v: ``[B, Hkv, spec.kv.local, Dv]``.
        mask: None, or whole, of four dims.
        spec: the attention.

    Returns:
        ``[B, Hq, spec.q.local, Dv]``.
    """
    return _ring(q, k, v, mask, plan_heads(int(q.shape[1]), int(k.shape[1]), 1), spec)


def unified_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """Ulysses inside, ring outside: as :func:`ring_attention`, on a mesh that has both."""
    assert spec.kv is not None

    def inner(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads: HeadPlan) -> Tensor:
        return _ring(q, k, v, mask, heads, spec)

    placements = spec.q.of_ulysses(), spec.kv.of_ulysses()
    return exchange_heads(q, k, v, mask, spec, placements, order_matters(spec, mask is not None), inner)


def plan_ring(q: Tensor, v: Tensor, mask: Tensor | None, heads: HeadPlan, spec: AttentionSpec) -> RingPlan:
    """How the ring serves an attention; its ``kernel.name`` is for the report.

    Args:
        q: ``[B, heads.q_local, rows, D]``.
        v: ``[B, heads.kv_local, rows, Dv]``.
        mask: None, or of four dims.
        heads: the heads of this rank.
        spec: the attention.
    """
    assert spec.kv is not None
    scale = 1.0 / math.sqrt(q.shape[3]) if spec.scale is None else spec.scale
    learned = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    plan = RingPlan(spec, spec.kv, heads, MATH, scale, mask is not None)
    kernel = choose(
        q.device.type,
        q.dtype,
        int(q.shape[3]),
        int(v.shape[3]),
        bias=plan.biased,
        weights=spec.dropout_p > 0,
        scores_grad=learned,
    )
    return replace(plan, kernel=kernel)


def _ring(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads: HeadPlan, spec: AttentionSpec) -> Tensor:
    seed = draw_seed(q.device) if spec.dropout_p > 0 else None
    return cast(Tensor, _RingAttention.apply(q, k, v, mask, seed, plan_ring(q, v, mask, heads, spec)))


def _no_autocast(device: str) -> AbstractContextManager[object]:
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


class _RingAttention(torch.autograd.Function):
    """q ``[B, H, Lq, D]``, k ``[B, n, Lk, D]``, v ``[B, n, Lk, Dv]``: one ring chunk each, this rank's heads."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, plan: RingPlan
    ) -> Tensor:
        with _no_autocast(q.device.type):
            out, lse = _forward(q, k, v, mask, seed, plan)
        ctx.save_for_backward(q, k, v, mask, seed, out, lse)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, mask, seed, out, lse = ctx.saved_tensors
        with _no_autocast(q.device.type):
            return *_backward(grads[0], q, k, v, mask, seed, out, lse, ctx.plan, ctx.needs_input_grad[3]), None, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, plan: RingPlan
) -> tuple[Tensor, Tensor]:
    """This rank's rows of the output, and their logsumexp, 0 for rows that see no key."""
    dtype = accumulation_dtype(q.dtype) if plan.spec.convert_to_fp32 else q.dtype
    rows, bias_rows = _prepare_mask(mask, q, plan)
    keys = Keys(k, v, plan)
    out = lse = None
    for step in range(plan.steps):
        keys.depart(step)
        k_step, v_step = keys.block(step)
        bias = plan.bias(step, bias_rows, q.device, q.dtype)
        weights = plan.weights(step, seed, q)
        for block in plan.blocks(step, q.shape[2], k_step.shape[2]):
            o, o_lse = _attend(rows, k_step, v_step, bias, weights, block, plan)
            if out is None or lse is None:
                out, lse = o.to(dtype), o_lse
            else:
                out, lse = _merge_rows(out, lse, o, o_lse, block)
        del k_step, v_step
        keys.arrive()
    assert out is not None and lse is not None
    return out.to(q.dtype), torch.where(lse == -torch.inf, 0.0, lse)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    plan: RingPlan,
    mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    dtype = accumulation_dtype(q.dtype)
    rows, bias_rows = _prepare_mask(mask, q, plan)
    keys, key_grads = Keys(k, v, plan, after=grad), KeyGrads(k, v, plan)
    dq: Tensor | None = None
    dmask = torch.zeros_like(bias_rows, dtype=dtype) if mask_grad and bias_rows is not None else None
    for step in range(plan.steps):
        keys.depart(step)
        k_step, v_step = keys.block(step)
        dk: Tensor | None = None
        dv: Tensor | None = None
        bias = plan.bias(step, bias_rows, q.device, q.dtype)
        weights = plan.weights(step, seed, q)
        for block in plan.blocks(step, q.shape[2], k_step.shape[2]):
            b_dq, b_dk, b_dv, ds = _attend_backward(grad, rows, k_step, v_step, bias, weights, out, lse, block, plan)
            dq = _add_rows(dq, b_dq, block.q_start, q)
            dk = _add_rows(dk, b_dk, block.k_start, k_step)
            dv = _add_rows(dv, b_dv, block.k_start, v_step)
            if dmask is not None and ds is not None:
                dmask = _add_scores(dmask, ds, plan.column_index(step, q.device))
        del k_step, v_step
        assert dk is not None and dv is not None
        key_grads.add(dk, dv)
        keys.arrive()
    assert dq is not None
    dk, dv = key_grads.home()
    if dmask is not None and mask is not None:
        if mask.shape[2] != 1:
            whole = torch.zeros_like(mask, dtype=dtype)
            dmask = whole.index_add(2, plan.row_index(q.device), dmask)
        dmask = dmask.to(mask.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dmask


# One block


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, weights: Tensor | None, block: Block, plan: RingPlan
) -> tuple[Tensor, Tensor]:
    q, k, v, bias, weights = _cut(q, k, v, bias, weights, block)
    index = plan.kv_index(k)
    if index is not None:
        k, v = k.index_select(1, index), v.index_select(1, index)
    out, lse = plan.kernel.forward(q, k, v, bias, block.causal, plan.scale, weights)
    if bias is not None:  # kernels differ in what they give for a row without any key
        hidden = bias == -torch.inf
        dead = hidden.logical_not().cumsum(3).squeeze(2) == 0 if block.causal else hidden.all(3)
        out, lse = torch.where(dead.unsqueeze(3), 0.0, out), torch.where(dead, -torch.inf, lse)
    return out, lse


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    out: Tensor,
    lse: Tensor,
    block: Block,
    plan: RingPlan,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    grad, out, lse = (_rows(x, 2, block.q_start, block.q_rows) for x in (grad, out, lse))
    q, k, v, bias, weights = _cut(q, k, v, bias, weights, block)
    shapes = k.shape, v.shape
    index = plan.kv_index(k)
    if index is not None:
        k, v = k.index_select(1, index), v.index_select(1, index)
    dq, dk, dv, ds = plan.kernel.backward(grad, q, k, v, bias, out, lse, block.causal, plan.scale, weights)
    if index is not None:
        dtype = accumulation_dtype(q.dtype)
        dk, dv = (g.new_zeros(s, dtype=dtype).index_add(1, index, g.to(dtype)) for g, s in zip((dk, dv), shapes))
    return dq, dk, dv, ds


def _cut(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, weights: Tensor | None, block: Block
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    q = _rows(q, 2, block.q_start, block.q_rows)
    k, v = (_rows(x, 2, block.k_start, block.k_rows) for x in (k, v))
    if weights is not None:
        weights = _rows(_rows(weights, 2, block.q_start, block.q_rows), 3, block.k_start, block.k_rows)
    if bias is not None and bias.shape[2] != 1:
        bias = _rows(bias, 2, block.q_start, block.q_rows)
    if bias is not None and bias.shape[3] != 1:
        bias = _rows(bias, 3, block.k_start, block.k_rows)
    return q, k, v, bias, weights


def _rows(x: Tensor, dim: int, start: Size, rows: Size) -> Tensor:
    return x if _is_whole(rows, x.shape[dim]) else x.narrow(dim, start, rows)


def _prepare_mask(mask: Tensor | None, q: Tensor, plan: RingPlan) -> tuple[Tensor, Tensor | None]:
    """The queries, and the mask as additive ``[.., rows of this rank, all columns]``.

    A mask shifted by a constant in each row is the same mask. Shifting each row's largest value to 0 keeps the
    logsumexp of a row of large negative values exact, so that blocks merge by their true weights. Where a value is so
    large that it absorbs the scores (a row of ``finfo.min``), SDPA gives each key the same weight; zero queries do too.
    The gradient of keys then misses what such rows add to it.
    """
    if mask is None:
        return q, None
    if mask.shape[2] != 1:
        mask = mask.index_select(2, plan.row_index(q.device))
    if mask.dtype == torch.bool:
        return q, torch.where(mask, 0.0, -torch.inf).to(q.dtype)
    dtype = accumulation_dtype(q.dtype)
    mask = mask.to(dtype)
    largest = mask.amax(3, keepdim=True)
    absorbed = (largest < -32 / torch.finfo(dtype).eps) & (largest > -torch.inf)
    return torch.where(absorbed, 0.0, q), mask - torch.where(largest == -torch.inf, 0.0, largest)


# Merging


def _merge_rows(out: Tensor, lse: Tensor, o: Tensor, o_lse: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Merges a block's result into its rows."""
    if _is_whole(block.q_rows, out.shape[2]):
        return _merge(out, lse, o, o_lse)
    start, end = block.q_start, block.q_start + block.q_rows
    o, o_lse = _merge(out.narrow(2, start, block.q_rows), lse.narrow(2, start, block.q_rows), o, o_lse)
    return out.slice_scatter(o, 2, start, end), lse.slice_scatter(o_lse, 2, start, end)


def _merge(out: Tensor, lse: Tensor, o: Tensor, o_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over two sets of keys from the softmax over each, in the dtype of ``out``; a set may be empty."""
    total = torch.logaddexp(lse, o_lse)
    safe = torch.where(total == -torch.inf, 0.0, total)
    a, b = ((x - safe).exp().unsqueeze(3).to(out.dtype) for x in (lse, o_lse))
    return out * a + o.to(out.dtype) * b, total


def _add_rows(total: Tensor | None, part: Tensor, start: Size, like: Tensor) -> Tensor:
    """Adds a block's gradient to its rows, in the accumulation dtype; ``like`` has the shape of the total."""
    part = part.to(accumulation_dtype(like.dtype))
    rows = part.shape[2]
    if _is_whole(rows, like.shape[2]):
        return part if total is None else total + part
    if total is None:
        total = torch.zeros_like(like, dtype=part.dtype)
    return total.slice_scatter(total.narrow(2, start, rows) + part, 2, start, start + rows)


def _add_scores(dmask: Tensor, ds: Tensor, columns: Tensor) -> Tensor:
    """Adds the gradient of scores ``[B, H, Lq, Lk]`` to that of a mask, dims that were broadcast summed."""
    for dim in range(3):
        if dmask.shape[dim] == 1:
            ds = ds.sum(dim, keepdim=True)
    if dmask.shape[3] == 1:
        return dmask + ds.sum(3, keepdim=True)
    return dmask.index_add(3, columns, ds)


def _is_whole(rows: Size, all_rows: Size) -> bool:
    return statically_known_true(rows == all_rows)
