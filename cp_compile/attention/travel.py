"""Keys and values on their way round the ring, and their gradients on the way home."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from cp_compile.attention.blocks import RingPlan, order_matters
from cp_compile.collectives import gather_blocks, reduce_scatter_blocks, start_permute, wait
from cp_compile.placement import Placement, Size

__all__ = ["KeyGrads", "Keys"]


class Keys:
    """Keys and values in one buffer, on their way round the ring, or gathered once.

    Args:
        k, v: this rank's.
        plan: the ring.
        after: in a backward, the gradient that came in.
    """

    def __init__(self, k: Tensor, v: Tensor, plan: RingPlan, after: Tensor | None = None) -> None:
        self.plan, self.shapes = plan, (k.shape, v.shape)
        if after is not None:
            # Nothing in the backward's trip depends on its gradient, so AOTAutograd would take it for the forward's and
            # keep every block that came by: as much as one process keeps. This makes it depend on it.
            k, v = (torch.where(after.flatten()[0] == 0, x, x) for x in (k, v))
        self.buffer = _pack(k, v)
        self.coming: Tensor | None = None
        if plan.spec.rotate == "allgather":
            self.buffer = gather_blocks(self.buffer, plan.spec.mesh.ring_group, plan.spec.mesh.ring)

    def depart(self, step: int) -> None:
        """Starts the transfer for the next step; there is none for the last."""
        if self.plan.spec.rotate == "alltoall" and step + 1 < self.plan.steps:
            self.coming = _send(self.buffer, self.plan)

    def block(self, step: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a step, ``[B, n, rows, ...]`` views of the buffer where it is not gathered whole."""
        if self.plan.whole:
            blocks = _unpack(self.buffer, self.shapes)
            return _in_order(blocks[0], self.plan), _in_order(blocks[1], self.plan)
        buffer = self.buffer.select(0, self.plan.source(step)) if self.plan.spec.rotate == "allgather" else self.buffer
        return _unpack(buffer, self.shapes)

    def arrive(self) -> None:
        """Ends the transfer."""
        if self.coming is not None:
            self.buffer, self.coming = wait(self.coming), None


class KeyGrads:
    """Gradients of keys and values: they follow them round the ring and take one more hop home."""

    def __init__(self, k: Tensor, v: Tensor, plan: RingPlan) -> None:
        self.plan, self.shapes = plan, (k.shape, v.shape)
        self.coming: Tensor | None = None
        self.parts: list[Tensor] = []

    def add(self, dk: Tensor, dv: Tensor) -> None:
        """Adds a step's part; its transfer runs during the next step."""
        if self.plan.whole:
            self.parts.append(torch.cat([_from_order(g, self.plan).flatten(1) for g in (dk, dv)], 1))
        elif self.plan.spec.rotate == "allgather":
            self.parts.append(_pack(dk, dv))
        else:
            grads = _pack(dk, dv)
            self.coming = _send(grads if self.coming is None else grads + wait(self.coming), self.plan)

    def home(self) -> tuple[Tensor, Tensor]:
        """The sums for this rank's keys."""
        mesh = self.plan.spec.mesh
        if self.coming is not None:
            return _unpack(wait(self.coming), self.shapes)
        if self.plan.whole:
            parts = self.parts[0]
        else:  # part t belongs to rank i - t
            parts = torch.stack(self.parts)
            parts = parts.index_select(0, (mesh.ring_rank - torch.arange(mesh.ring, device=parts.device)) % mesh.ring)
        return _unpack(reduce_scatter_blocks(parts, mesh.ring_group, mesh.ring), self.shapes)


def _send(buffer: Tensor, plan: RingPlan) -> Tensor:
    mesh = plan.spec.mesh
    return start_permute(buffer, mesh.ring_group, mesh.ring, mesh.ring_rank)


def _pack(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.flatten(), v.flatten()])


def _unpack(buffer: Tensor, shapes: tuple[torch.Size, torch.Size]) -> tuple[Tensor, Tensor]:
    """``[..., all elements]`` to ``[..., B, n, rows, D]`` and ``[..., B, n, rows, Dv]``, views."""
    k_size, v_size = (prod(s) for s in shapes)  # torch.Size.numel() would specialise symbolic sizes
    k, v = buffer.narrow(-1, 0, k_size), buffer.narrow(-1, k_size, v_size)
    return k.unflatten(-1, shapes[0]), v.unflatten(-1, shapes[1])


# A ring rank's rows of each segment lie together. On the ring alone, that is a placement of the padded segments.


def _on_ring(p: Placement) -> Placement:
    return Placement(tuple(c * p.degree for c in p.chunks), p.ring, 1, p.zigzag)


def _in_order(blocks: Tensor, plan: RingPlan) -> Tensor:
    """``[R, B, n, rows of a ring rank, D]`` to ``[B, n, all rows, D]`` in global order without padding."""
    blocks = blocks.permute(1, 2, 0, 3, 4)
    if not order_matters(plan.spec, plan.masked):
        return blocks.flatten(2, 3)
    on_ring = _on_ring(plan.kv)
    rows = on_ring.merge(blocks, 2)
    if not plan.kv.padded:
        return rows
    pieces: list[Tensor] = []
    start: Size = 0
    for n, padded in zip(plan.kv.lengths, on_ring.lengths):
        pieces.append(rows.narrow(2, start, n))
        start = start + padded
    return torch.cat(pieces, 2)


def _from_order(grad: Tensor, plan: RingPlan) -> Tensor:
    """The transpose of :func:`_in_order`: ``[R, B, n, rows of a ring rank, D]``, zero at padding."""
    if not order_matters(plan.spec, plan.masked):
        return grad.unflatten(2, (plan.spec.mesh.ring, -1)).permute(2, 0, 1, 3, 4)
    on_ring = _on_ring(plan.kv)
    if plan.kv.padded:
        pieces: list[Tensor] = []
        start: Size = 0
        for n, padded in zip(plan.kv.lengths, on_ring.lengths):
            zeros = grad.new_zeros(*grad.shape[:2], padded - n, grad.shape[3])  # `pad` wants plain numbers
            pieces += [grad.narrow(2, start, n), zeros]
            start = start + n
        grad = torch.cat(pieces, 2)
    return on_ring.split(grad, 2).permute(2, 0, 1, 3, 4)
