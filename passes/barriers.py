"""Ops at which the token axis ends: they work on all tokens on every rank, whatever the plan would rather do."""

from __future__ import annotations

from ..report import BarrierReport
from .axes import Axes
from .costs import flops_of
from .modes import modes_of
from .provenance import module_of, where_of

__all__ = ["barriers"]


def barriers(axes: Axes) -> tuple[BarrierReport, ...]:
    """All of a graph's, in its order, with reasons."""
    return tuple(
        BarrierReport(
            op=str(node.target).removesuffix(".default"),
            reason=relation.reason,
            flops=flops_of(node),
            where=where_of(node),
            module=module_of(node),
        )
        for node, relation in axes.relations.items()
        # An input of which only the dtype matters brings no tokens.
        if any(axes.positions.get(value) for slot, value in axes.ops[node].inputs() if slot not in relation.ignored)
        and not modes_of(axes, node)
    )
