"""The ops that the compiler puts into a graph, registered with torch so that the graph stays readable.

Each is opened when the graph is compiled (``CompositeImplicitAutograd``): autograd goes through our own formulas, and
Inductor sees every collective as a ``_c10d_functional`` op. Rank and groups are arguments, so that no cache can hand
one rank another rank's code.

The arguments ``(lengths, zigzag, mesh, groups)`` describe a :class:`~cp_compile.placement.Placement` on a
:class:`~cp_compile.mesh.Mesh`: ``mesh`` is ``[ring, ulysses, rank]``, ``groups`` names the group of all ranks, the ring
group and the ulysses group.

Gradients: the gradient of a sharded value is that of the rank's rows. The gradient of a whole value is either *full*,
the true one on every rank, or *partial*, to be summed over the ranks; the compiler knows which from the graph, sums
partial ones where they leave the graph (:func:`sum_gradients`) and says ``partial`` where an op must know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from . import collectives
from .attention import AttentionSpec
from .attention import attention as _attention
from .mesh import Mesh
from .placement import Placement, Size

__all__ = ["NAMESPACE", "mesh_arguments", "mesh_of"]

NAMESPACE = "cp_compile"

_F = TypeVar("_F", bound=Callable[..., Any])
_Sizes = Sequence[Size]
_Ints = Sequence[int]
_Names = Sequence[str]

_library = torch.library.Library(NAMESPACE, "DEF")
_ROWS = "SymInt[] lengths, bool zigzag, int[] mesh, str[] groups"


def mesh_arguments(mesh: Mesh) -> tuple[list[int], list[str]]:
    """A mesh as arguments of an op."""
    return [mesh.ring, mesh.ulysses, mesh.rank], [mesh.group, mesh.ring_group, mesh.ulysses_group]


def mesh_of(mesh: Sequence[int], groups: Sequence[str]) -> Mesh:
    """The mesh that :func:`mesh_arguments` described."""
    return Mesh(mesh[0], mesh[1], mesh[2], groups[0], groups[1], groups[2], ())


def _register(schema: str) -> Callable[[_F], _F]:
    def keep(function: _F) -> _F:
        name = _library.define(schema)
        _library.impl(name, function, "CompositeImplicitAutograd")
        return function

    return keep


@_register(f"shard(Tensor x, int dim, SymInt outer, {_ROWS}) -> Tensor")
def shard(x: Tensor, dim: int, outer: Size, lengths: _Sizes, zigzag: bool, mesh: _Ints, groups: _Names) -> Tensor:
    """This rank's rows of a whole value. Dim ``dim`` runs over ``outer * rows * inner``."""
    placement = Placement(tuple(lengths), mesh[0], mesh[1], zigzag)
    return _on_rows(x, dim, outer, placement.total, lambda y, d: _take(y, d, placement, mesh[2]))


@_register(f"gather(Tensor x, int dim, SymInt outer, {_ROWS}, bool partial=False) -> Tensor")
def gather(
    x: Tensor, dim: int, outer: Size, lengths: _Sizes, zigzag: bool, mesh: _Ints, groups: _Names, partial: bool = False
) -> Tensor:
    """The whole value on every rank, from each rank's rows of it."""
    m = mesh_of(mesh, groups)
    placement = Placement(tuple(lengths), m.ring, m.ulysses, zigzag)

    def all_rows(y: Tensor, d: int) -> Tensor:
        y = y.transpose(0, d) if d else y
        blocks = (
            cast(Tensor, _GatherPartial.apply(y, m.group, m.degree))
            if partial
            else collectives.all_gather(y, m.group, m.degree, m.rank)
        )
        rows = placement.merge(blocks, 0)
        return rows.transpose(0, d).contiguous() if d else rows

    return _on_rows(x, dim, outer, placement.local, all_rows)


@_register(f"zero_padding(Tensor x, int dim, SymInt outer, {_ROWS}) -> Tensor")
def zero_padding(
    x: Tensor, dim: int, outer: Size, lengths: _Sizes, zigzag: bool, mesh: _Ints, groups: _Names
) -> Tensor:
    """Zeros in place of this rank's padded rows, so that a sum over its rows counts each token once."""
    placement = Placement(tuple(lengths), mesh[0], mesh[1], zigzag)

    def clear(y: Tensor, d: int) -> Tensor:
        valid = placement.valid(mesh[2], y.device)
        return torch.where(
            valid.view(-1, *(1,) * (y.dim() - d - 1)), y, torch.zeros((), dtype=y.dtype, device=y.device)
        )

    return _on_rows(x, dim, outer, placement.local, clear) if placement.padded else x


@_register("all_reduce(Tensor x, str group, bool partial=False) -> Tensor")
def all_reduce(x: Tensor, group: str, partial: bool = False) -> Tensor:
    """Sum over the ranks of each rank's partial result."""
    total = collectives.all_reduce(x, group)
    return collectives.replicate(total, group) if partial else total


@_register("sum_gradients(Tensor[] xs, str group) -> Tensor[]")
def sum_gradients(xs: list[Tensor], group: str) -> list[Tensor]:
    """The same tensors; their partial gradients are summed over the ranks, in one collective a dtype."""
    return list(cast(tuple[Tensor, ...], _SumGradients.apply(group, *xs)))


@_register("scale_gradient(Tensor x, float by) -> Tensor")
def scale_gradient(x: Tensor, by: float) -> Tensor:
    """The same tensor; its gradient times ``by``. Makes a full gradient one of ``1 / by`` equal partial ones."""
    return cast(Tensor, _ScaleGradient.apply(x, by))


@_register(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, SymInt[] q_lengths, bool q_zigzag, SymInt[]? kv_lengths, "
    "bool kv_zigzag, float dropout_p, bool causal, float? scale, bool enable_gqa, str rotate, bool convert_to_fp32, "
    "int[] mesh, str[] groups) -> Tensor"
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    q_lengths: _Sizes,
    q_zigzag: bool,
    kv_lengths: _Sizes | None,
    kv_zigzag: bool,
    dropout_p: float,
    causal: bool,
    scale: float | None,
    enable_gqa: bool,
    rotate: str,
    convert_to_fp32: bool,
    mesh: _Ints,
    groups: _Names,
) -> Tensor:
    """This rank's rows of an attention: :func:`cp_compile.attention.attention`, with its spec as arguments."""
    m = mesh_of(mesh, groups)
    spec = AttentionSpec(
        mesh=m,
        q=Placement(tuple(q_lengths), m.ring, m.ulysses, q_zigzag),
        kv=None if kv_lengths is None else Placement(tuple(kv_lengths), m.ring, m.ulysses, kv_zigzag),
        causal=causal,
        scale=scale,
        enable_gqa=enable_gqa,
        dropout_p=dropout_p,
        rotate=rotate,  # type: ignore[arg-type]
        convert_to_fp32=convert_to_fp32,
    )
    return _attention(q, k, v, mask, spec)


def _on_rows(x: Tensor, dim: int, outer: Size, rows: Size, change: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Apply ``change(y, d)`` with the rows alone at dim ``d``, where ``dim`` runs over ``outer * rows * inner``."""
    inner = x.shape[dim] // (outer * rows)
    if isinstance(outer, int) and isinstance(inner, int) and outer == inner == 1:
        return change(x, dim)
    y = change(x.unflatten(dim, (outer, rows, inner)), dim + 1)
    return y.flatten(dim, dim + 2)


def _take(x: Tensor, dim: int, placement: Placement, rank: int) -> Tensor:
    """The rows of one rank: as views where no row is padded, by index otherwise."""
    if placement.padded or placement.zigzag:
        return x.index_select(dim, placement.rows(rank, x.device))
    pieces: list[Tensor] = []
    start: Size = 0
    for n, c in zip(placement.lengths, placement.chunks):
        pieces.append(x.narrow(dim, start + rank * c, c))
        start = start + n
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


class _GatherPartial(torch.autograd.Function):
    """All ranks' rows, stacked; each rank's gradient of the whole is partial."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, size: int) -> Tensor:
        ctx.where = group, size
        return collectives.gather_blocks(x, group, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return collectives.reduce_scatter_blocks(grads[0], *ctx.where), None, None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: str, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *collectives.sum_in_buckets(grads, ctx.group, math.inf)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.by, None
