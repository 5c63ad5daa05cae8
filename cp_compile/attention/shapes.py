"""Inputs of any shape that SDPA takes, as ``[B, H, S, D]`` tensors and a mask of four dims."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cp_compile.attention.spec import AttentionSpec
from cp_compile.placement import Size

__all__ = ["autocast_input", "check_inputs", "restore", "to_4d"]


def autocast_input(x: Tensor) -> Tensor:
    """What autocast does to an argument of SDPA, done before anything is sent."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))


def check_inputs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec) -> None:
    """Errors of SDPA, and rows that do not fit the placement.

    Raises:
        ValueError: naming what was found and what was expected.
    """
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"cp_compile: q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; expected one dtype")
    if min(q.dim(), k.dim(), v.dim()) < 2:
        raise ValueError(f"cp_compile: q, k, v have {q.dim()}, {k.dim()}, {v.dim()} dims; expected 2 or more")
    if mask is not None and spec.causal:
        raise ValueError("cp_compile: attention has a mask and is causal; expected one of the two, as in SDPA")
    if mask is not None and not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(f"cp_compile: mask is {mask.dtype}; expected bool or a float dtype")
    expected = [("q", q, spec.q.local)]
    if spec.kv is not None:
        expected += [("k", k, spec.kv.local), ("v", v, spec.kv.local)]
    for name, x, rows in expected:
        if isinstance(rows, int) and isinstance(x.shape[-2], int) and x.shape[-2] != rows:
            raise ValueError(
                f"cp_compile: {name} of shape {tuple(x.shape)} has {x.shape[-2]} rows; its placement has {rows}"
            )


def to_4d(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """``[B, H, S, D]`` each and ``[B or 1, H or 1, Sq or 1, Skv or 1]``.

    A tensor of three dims has heads but no batch, one of more than four has its leading dims flattened into a batch.
    Batch and head dims broadcast as in SDPA; grouped kv heads stay grouped.
    """
    dims = max(q.dim(), k.dim(), v.dim(), 4)
    q, k, v = (_with_dims(x, dims) for x in (q, k, v))
    lead: Sequence[Size] = q.shape[:-3]
    if not (q.shape[:-3] == k.shape[:-3] == v.shape[:-3]):
        lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        q, k, v = (x.expand(*lead, -1, -1, -1) for x in (q, k, v))
    if k.shape[-3] != v.shape[-3]:
        heads = max(int(k.shape[-3]), int(v.shape[-3]))
        k, v = (x.expand(*lead, heads, -1, -1) for x in (k, v))
    if q.shape[-3] == 1 and k.shape[-3] != 1:
        q = q.expand(*lead, k.shape[-3], -1, -1)
    if mask is not None:
        mask = _with_dims(mask, dims)
        if dims > 4:
            if any(n != 1 for n in mask.shape[:-3]):
                mask = mask.expand(*lead, -1, -1, -1)
            mask = mask.flatten(0, -4)
    if dims > 4:
        q, k, v = (x.flatten(0, -4) for x in (q, k, v))
    return q, k, v, mask


def restore(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``[B, H, S, Dv]`` in the number of dims, and with the leading dims, of the original inputs."""
    dims = max(q.dim(), k.dim(), v.dim())
    if dims > 4:
        lead = torch.broadcast_shapes(*(_with_dims(x, dims).shape[:-3] for x in (q, k, v)))
        return out.unflatten(0, lead)
    for _ in range(4 - dims):
        out = out.squeeze(0)
    return out


def _with_dims(x: Tensor, dims: int) -> Tensor:
    while x.dim() < dims:
        x = x.unsqueeze(0)
    return x
