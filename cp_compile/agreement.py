"""How far apart two outputs of a model are, and whether two ranks hold the same bits."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["digest", "relative_error"]


def relative_error(actual: Any, expected: Any) -> float:
    """The largest error of any tensor of a nested output, relative to that tensor's largest number.

    Numbers that are not finite must be the same in both. Tensors that hold no floating numbers must be equal.

    Returns:
        0 when nothing differs, ``inf`` when a number that must be equal is not.

    Raises:
        ValueError: the outputs are not built alike, so there is nothing to subtract.
    """
    found, found_spec = pytree.tree_flatten(actual)
    wanted, wanted_spec = pytree.tree_flatten(expected)
    if found_spec != wanted_spec:
        raise ValueError(f"cp_compile: outputs are nested differently: got {found_spec}, expected {wanted_spec}")
    return max((_leaf_error(i, a, b) for i, (a, b) in enumerate(zip(found, wanted))), default=0.0)


def _leaf_error(index: int, actual: Any, expected: Any) -> float:
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        return 0.0 if type(actual) is type(expected) and actual == expected else math.inf
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise ValueError(
            f"cp_compile: output {index} is {actual.dtype} {list(actual.shape)}, "
            f"expected {expected.dtype} {list(expected.shape)}"
        )
    if not expected.dtype.is_floating_point and not expected.dtype.is_complex:
        return 0.0 if torch.equal(actual, expected) else math.inf
    wide = torch.complex128 if expected.dtype.is_complex else torch.float64
    a, b = actual.detach().to(wide), expected.detach().to(wide)
    finite = torch.isfinite(b)
    if not torch.equal(torch.isfinite(a), finite) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return math.inf
    a, b = a[finite], b[finite]
    if b.numel() == 0:
        return 0.0
    error, scale = (a - b).abs().max().item(), b.abs().max().item()
    return error / scale if scale else (math.inf if error else 0.0)


def digest(output: Any) -> str:
    """A hash of the bytes of every tensor of a nested output, and of how it is nested."""
    leaves, spec = pytree.tree_flatten(output)
    total = hashlib.sha256(str(spec).encode())
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            total.update(f"{leaf.dtype}{list(leaf.shape)}".encode())
            total.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            total.update(repr(leaf).encode())
    return total.hexdigest()
