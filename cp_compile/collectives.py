"""The collectives of context parallelism, differentiable, as plain ``_c10d_functional`` ops.

Nothing here asks ``torch.distributed`` anything: groups are names, sizes and ranks are numbers. So every function
traces with fake tensors, and Inductor sees (and may overlap) each collective. Each one is an op that starts the
transfer and a ``wait_tensor`` that ends it; :func:`start_permute` and :func:`wait` give the two halves apart.

Gradients follow the contract "full tensors in, full tensors out, the same loss on every rank":

=====================  =====================================  ==========================================
function               forward                                backward
=====================  =====================================  ==========================================
:func:`all_to_all`     slice ``j`` goes to rank ``j``         all-to-all
:func:`permute`        to the next rank of a ring             permute to the previous one
:func:`all_gather`     every rank's value, stacked            this rank's slice, no communication
:func:`all_reduce`     sum over ranks                         identity, no communication
:func:`replicate`      identity                               all-reduce of the partial gradients
=====================  =====================================  ==========================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed._functional_collectives  # registers the fake kernels of _c10d_functional
from torch import Tensor

__all__ = [
    "BUCKET",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "gather_blocks",
    "permute",
    "reduce_scatter_blocks",
    "replicate",
    "start_permute",
    "sum_in_buckets",
    "wait",
]

BUCKET = 25 * 2**20
"""Bytes of gradients that are summed in one collective, as in DistributedDataParallel."""

_c10d = torch.ops._c10d_functional


def wait(x: Tensor) -> Tensor:
    """Ends the transfer that made ``x``: nothing else may touch ``x`` before this."""
    return _c10d.wait_tensor(x)


def start_permute(x: Tensor, group: str, size: int, rank: int, shift: int = 1) -> Tensor:
    """Starts sending ``x`` to rank ``rank + shift`` of a ring and receiving from ``rank - shift``. Not differentiable.

    Args:
        x: one dim or more, the same shape on all ranks.
        group: name of the group, its ranks in ring order.
        size: ranks in the group.
        rank: this rank's place in the group.
        shift: how far to send.

    Returns:
        Of the shape of ``x``, to be given to :func:`wait` before any other use.
    """
    # An all-to-all with one full and otherwise empty splits, as torch's `permute_tensor` has it. The p2p ops of 2.13
    # take no part in Inductor's overlap passes yet.
    sent, received = [0] * size, [0] * size
    sent[(rank + shift) % size] = received[(rank - shift) % size] = x.shape[0]
    return _c10d.all_to_all_single(x.contiguous(), received, sent, group)


def gather_blocks(x: Tensor, group: str, size: int) -> Tensor:
    """All ranks' ``x``, stacked at a new dim 0. Not differentiable."""
    return wait(_c10d.all_gather_into_tensor(x.contiguous().unsqueeze(0), size, group))


def reduce_scatter_blocks(x: Tensor, group: str, size: int) -> Tensor:
    """Sum over ranks of slice ``rank`` of ``x``: ``[size, ...]`` to ``[...]``. Not differentiable."""
    return wait(_c10d.reduce_scatter_tensor(x.contiguous(), "sum", size, group)).squeeze(0)


def _exchange(x: Tensor, group: str, size: int) -> Tensor:
    return wait(_c10d.all_to_all_single(x.contiguous(), [1] * size, [1] * size, group))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, size: int) -> Tensor:
        ctx.where = group, size
        return _exchange(x, group, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _exchange(grads[0], *ctx.where), None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, size: int, rank: int, shift: int) -> Tensor:
        ctx.where = group, size, rank, -shift
        return wait(start_permute(x, group, size, rank, shift))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return wait(start_permute(grads[0], *ctx.where)), None, None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, size: int, rank: int) -> Tensor:
        ctx.rank = rank
        return gather_blocks(x, group, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].select(0, ctx.rank), None, None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return wait(_c10d.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return wait(_c10d.all_reduce(grads[0].contiguous(), "sum", ctx.group)), None


def all_to_all(x: Tensor, group: str, size: int) -> Tensor:
    """Sends slice ``j`` of dim 0 to rank ``j``; slice ``j`` of the result came from rank ``j``.

    Args:
        x: ``[size, ...]``, of one shape on all ranks.
        group: name of the group.
        size: ranks in the group.

    Returns:
        Contiguous, of the shape of ``x``.
    """
    return cast(Tensor, _AllToAll.apply(x, group, size))


def permute(x: Tensor, group: str, size: int, rank: int, shift: int = 1) -> Tensor:
    """:func:`start_permute` and :func:`wait` in one, differentiable."""
    return cast(Tensor, _Permute.apply(x, group, size, rank, shift))


def all_gather(x: Tensor, group: str, size: int, rank: int) -> Tensor:
    """All ranks' ``x`` stacked at a new dim 0; what follows must be the same computation on every rank.

    Args:
        x: any shape, the same on all ranks.
        group: name of the group.
        size: ranks in the group.
        rank: this rank's place in the group, for the backward.

    Returns:
        Contiguous ``[size, *x.shape]``.
    """
    return cast(Tensor, _AllGather.apply(x, group, size, rank))


def all_reduce(x: Tensor, group: str) -> Tensor:
    """Sum of ``x`` over the ranks; what follows must be the same computation on every rank."""
    return cast(Tensor, _AllReduce.apply(x, group))


def replicate(x: Tensor, group: str) -> Tensor:
    """``x``, equal on all ranks, on its way into a computation on this rank's rows only."""
    return cast(Tensor, _Replicate.apply(x, group))


def sum_in_buckets(xs: Sequence[Tensor | None], group: str, limit: float = BUCKET) -> list[Tensor | None]:
    """Sums of tensors over the ranks, packed by dtype into few collectives, all started before any is waited for.

    Args:
        xs: any shapes and dtypes, the same on all ranks; None stays None.
        group: name of the group.
        limit: bytes at which a collective is full.
    """
    started = []
    for indices in _buckets(xs, limit):
        flat = torch.cat([cast(Tensor, xs[i]).reshape(-1) for i in indices])
        started.append((indices, _c10d.all_reduce(flat, "sum", group)))
    out: list[Tensor | None] = [None] * len(xs)
    for indices, flat in started:
        mine = [cast(Tensor, xs[i]) for i in indices]
        for i, x, piece in zip(indices, mine, wait(flat).split([x.numel() for x in mine])):
            out[i] = piece.view(x.shape)
    return out


def _buckets(xs: Sequence[Tensor | None], limit: float) -> Iterator[list[int]]:
    for dtype in dict.fromkeys(x.dtype for x in xs if x is not None):
        bucket: list[int] = []
        size = 0
        for i, x in enumerate(xs):
            if x is None or x.dtype != dtype:
                continue
            bucket.append(i)
            size += x.numel() * dtype.itemsize
            if size >= limit:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket
