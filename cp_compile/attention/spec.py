"""What one attention of the model is, which variant serves it, and what that costs to communicate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from torch.fx.experimental.symbolic_shapes import statically_known_true

from cp_compile.attention.heads import plan_heads
from cp_compile.mesh import Mesh
from cp_compile.placement import Placement, Size

__all__ = ["AttentionSpec", "Variant", "collectives", "elements_sent", "same_placement", "variant"]

Variant = Literal["local", "ulysses", "ring", "unified"]


@dataclass(frozen=True)
class AttentionSpec:
    """One attention and where its rows are.

    Attributes:
        mesh: this rank's view of the ranks.
        q: placement of the queries, and so of the output.
        kv: placement of keys and values; None where every rank has all of them, in global order.
        causal: ``is_causal`` of SDPA: row ``i`` sees columns ``0..i``, counted globally from the top left.
        scale: of the scores; None for ``1 / sqrt(head_dim)``.
        enable_gqa: the model asked for grouped queries. Head counts decide; this is kept for the report.
        dropout_p: probability of dropping an attention weight.
        rotate: how the ring moves keys and values: one permute a step, or one all-gather.
        convert_to_fp32: merge the ring's partial results in fp32, else in the dtype of the input.
    """

    mesh: Mesh
    q: Placement
    kv: Placement | None
    causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    dropout_p: float = 0.0
    rotate: Literal["alltoall", "allgather"] = "alltoall"
    convert_to_fp32: bool = True

    def __post_init__(self) -> None:
        if self.rotate not in ("alltoall", "allgather"):
            raise ValueError(f"cp_compile: rotate={self.rotate!r}; expected 'alltoall' or 'allgather'")
        for name, p in (("q", self.q), ("kv", self.kv)):
            if p is not None and (p.ring, p.ulysses) != (self.mesh.ring, self.mesh.ulysses):
                raise ValueError(
                    f"cp_compile: {name} is placed on ring={p.ring} ulysses={p.ulysses}, "
                    f"the mesh has ring={self.mesh.ring} ulysses={self.mesh.ulysses}"
                )


def variant(spec: AttentionSpec) -> Variant:
    """Which algorithm serves this attention."""
    if spec.kv is None or spec.mesh.degree == 1:
        return "local"
    if spec.mesh.ring == 1:
        return "ulysses"
    return "ring" if spec.mesh.ulysses == 1 else "unified"


def same_placement(a: Placement | None, b: Placement | None) -> bool:
    """Equality that adds no guard on symbolic lengths: two that are not known to be equal are not."""
    if a is None or b is None:
        return a is b
    if (a.ring, a.ulysses, a.zigzag, len(a.lengths)) != (b.ring, b.ulysses, b.zigzag, len(b.lengths)):
        return False
    return all(statically_known_true(x == y) for x, y in zip(a.lengths, b.lengths))


def collectives(spec: AttentionSpec) -> int:
    """Collectives that one forward of this attention starts on each rank."""
    ring, ulysses = spec.mesh.ring, spec.mesh.ulysses
    if variant(spec) == "local":
        return 0
    steps = 0 if ring == 1 else ring - 1 if spec.rotate == "alltoall" else 1
    return steps + (2 if ulysses > 1 else 0)


def elements_sent(spec: AttentionSpec, q_shape: Sequence[int], k_shape: Sequence[int], v_shape: Sequence[int]) -> Size:
    """Elements that leave a rank for others in one forward, padding of lengths and heads included.

    Args:
        spec: the attention.
        q_shape: ``[..., Hq, S, D]`` of the queries. Rows are taken from ``spec``: local and global shapes both serve.
        k_shape: ``[..., Hkv, S, D]``.
        v_shape: ``[..., Hkv, S, Dv]``.
    """
    if spec.kv is None or variant(spec) == "local":
        return 0
    ring, ulysses = spec.mesh.ring, spec.mesh.ulysses
    (batch, q_heads, dim), (_, kv_heads, _), (_, _, v_dim) = (_sizes(s) for s in (q_shape, k_shape, v_shape))
    heads = plan_heads(q_heads, kv_heads, ulysses)
    q_rows = batch * heads.q_local * spec.q.local
    kv_rows = batch * heads.kv_local * spec.kv.local
    there = q_rows * dim + kv_rows * (dim + v_dim)
    back = q_rows * v_dim
    return (ulysses - 1) * (there + back) + (ring - 1) * ulysses * kv_rows * (dim + v_dim)


def _sizes(shape: Sequence[int]) -> tuple[int, int, int]:
    """Batch, heads and head dim of a shape of any rank that SDPA takes."""
    return prod(shape[:-3]), shape[-3] if len(shape) > 2 else 1, shape[-1]
