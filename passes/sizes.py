"""Lengths and sizes during analysis: an ``int``, or a sympy expression where a length is not known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import sympy
import torch

Size: TypeAlias = Any
"""An ``int``, or a ``sympy.Expr``, which has no type stubs."""

__all__ = ["Size", "divides", "equal", "less", "product", "quotient", "size_of"]


def size_of(value: int | torch.SymInt | Size) -> Size:
    """The size that a dimension reports, as a number where it is one."""
    if isinstance(value, torch.SymInt):
        value = value.node.shape_env.simplify(value.node.expr) if value.node.shape_env else value.node.expr
    return int(value) if isinstance(value, (int, sympy.Integer)) else value


def product(sizes: Iterable[Size]) -> Size:
    """The product of all sizes; 1 of none."""
    out: Size = 1
    for s in sizes:
        out = out * s
    return size_of(out)


def equal(a: Size, b: Size) -> bool:
    """Whether two sizes are known to be equal."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(sympy.expand(a - b) == 0)


def less(a: Size, b: Size) -> bool | None:
    """Whether ``a < b``, or None if that is not known (symbols are lengths: positive integers)."""
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    difference = sympy.expand(b - a)
    if difference.is_positive:
        return True
    return False if difference.is_nonpositive else None


def divides(a: Size, b: Size) -> bool:
    """Whether ``b`` is known to be a multiple of ``a``."""
    if isinstance(a, int) and isinstance(b, int):
        return a != 0 and b % a == 0
    return quotient(b, a) is not None


def quotient(a: Size, b: Size) -> Size | None:
    """``a / b`` where it is known to be a whole number, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    out = sympy.cancel(sympy.sympify(a) / b)
    if sympy.denom(out) != 1 or not out.is_integer:
        return None
    return size_of(out)
