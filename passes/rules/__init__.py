"""Rules: for each op, how its dims correspond. One module a family, one function an op or a few that are alike.

``relation_of(node)`` answers for any node; an op that no rule knows is a barrier, and says so by name.
"""

from __future__ import annotations

from torch import fx

from ..relation import Relation
from . import attention, contraction, creation, indexing, pointwise, reduction, views  # noqa: F401  (each registers its rules)
from .registry import find_rule, register_rule

__all__ = ["register_rule", "relation_of"]


def relation_of(node: fx.Node) -> Relation:
    """The relation between the dims of a node's inputs and its output."""
    rule = find_rule(node.target)
    if rule is None:
        return Relation(reason=f"no rule for {node.target}")
    return rule(node)
