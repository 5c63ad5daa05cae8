"""Lengths and sizes during analysis: an ``int``, or a sympy expression where a length is not known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import sympy
import torch

Size: TypeAlias = Any
"""An ``int``, or a ``sympy.Expr``, which has no type stubs."""

__all__ = ["Size", "at_most", "divides", "equal", "less", "product", "quotient", "size_of"]


def size_of(value: int | torch.SymInt | Size) -> Size:
    """The size that a dimension reports, as a number where it is one."""
    if isinstance(value, torch.SymInt):
        value = _with_signs(value)
    return int(value) if isinstance(value, (int, sympy.Integer)) else value


def _with_signs(value: torch.SymInt) -> Size:
    """A size as an expression. torch keeps apart from a symbol that a length which only the data tells is not below 0;
    to sympy, which is asked here, the symbol itself has to say so."""
    environment, expression = value.node.shape_env, value.node.expr
    if environment is None:
        return expression
    expression = environment.simplify(expression)
    unsigned = [s for s in expression.free_symbols if s.is_nonnegative is None]
    lengths = [s for s in unsigned if environment.bound_sympy(s).lower >= 0]
    return expression.xreplace({s: sympy.Symbol(s.name, integer=True, nonnegative=True) for s in lengths})


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
    """Whether ``a < b``, or None if that is not known (symbols are lengths)."""
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    difference = sympy.expand(b - a)
    if difference.is_positive:
        return True
    return False if difference.is_nonpositive else None


def at_most(a: Size, b: Size) -> bool:
    """Whether ``a <= b`` is known."""
    if isinstance(a, int) and isinstance(b, int):
        return a <= b
    return bool(sympy.expand(b - a).is_nonnegative)


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
