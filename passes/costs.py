"""What things cost: one small model that the plan, the report and the simulator share.

Times are in seconds. They need to be right in proportion, not in value: the plan compares the redundant work of running
on all tokens with the communication of gathering them.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch
from torch import fx

from .relation import Op, is_tensor
from .rules.attention import ATTENTION
from .sizes import Size

__all__ = ["CostModel", "bytes_of", "flops_of", "hint", "number"]

aten = torch.ops.aten

_SUMS_OVER_LAST = {aten.linear.default: "input", aten.matmul.default: "self", aten.mm.default: "self"}
_SUMS_OVER_LAST |= {aten.bmm.default: "self", aten.addmm.default: "mat1", aten.baddbmm.default: "batch1"}
_CONVOLUTIONS = {aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.convolution.default}


@dataclass(frozen=True)
class CostModel:
    """Speeds of one rank and of its links; the defaults are those of a recent accelerator in a node.

    Attributes:
        peak: floating point operations a second.
        memory: bytes a second from and to the rank's own memory.
        bandwidth: bytes a second that a rank sends.
        latency: seconds before a collective's first byte arrives.
    """

    peak: float = 400e12
    memory: float = 2e12
    bandwidth: float = 200e9
    latency: float = 15e-6

    def compute(self, node: fx.Node) -> float:
        """Seconds to run a node on all tokens."""
        moved = bytes_of(node) + sum(bytes_of(n) for n in node.all_input_nodes)
        return max(flops_of(node) / self.peak, moved / self.memory) + 1e-9

    def send(self, sent: float) -> float:
        """Seconds of a collective in which each rank sends so many bytes."""
        return self.latency + sent / self.bandwidth


def number(size: Size) -> int:
    """A size as a number: its hint where it is not known, so that costs can be compared."""
    if isinstance(size, int):
        return size
    hints = {s: 1024 for s in size.free_symbols}
    return int(sympy.sympify(size).subs(hints))


def bytes_of(node: fx.Node) -> int:
    """Bytes of a node's tensor, or of all its tensors."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return sum(_numel(v) * v.dtype.itemsize for v in values if isinstance(v, torch.Tensor))


def flops_of(node: fx.Node) -> int:
    """Floating point operations of a matrix product, convolution or attention; 0 of anything else."""
    if not is_tensor(node):
        return 0
    out = _numel(node.meta["val"])
    if node.target is ATTENTION:
        query, key = node.args[0].meta["val"], node.args[1].meta["val"]  # type: ignore[union-attr]
        rows = hint(key.shape[-2])
        return 2 * rows * (_numel(query) + out)
    if node.target in _SUMS_OVER_LAST:
        return 2 * out * hint(Op.of(node).args[_SUMS_OVER_LAST[node.target]].meta["val"].shape[-1])
    if node.target in _CONVOLUTIONS:
        weight = Op.of(node).args["weight"].meta["val"]
        return 2 * out * _numel(weight[0])
    if node.target is aten.einsum.default:
        op = Op.of(node)
        inputs, result = op.args["equation"].replace(" ", "").split("->")
        sizes = {
            label: hint(n)
            for (slot, value), labels in zip(op.inputs(), inputs.split(","))
            for label, n in zip(labels, value.meta["val"].shape)
        }
        return 2 * out * int(torch.Size([n for label, n in sizes.items() if label not in result]).numel())
    return 0


def hint(size: int | torch.SymInt) -> int:
    """The size that was seen when the graph was made; if none was, what it can be at most; 1024 if neither is known."""
    if isinstance(size, int):
        return size
    if size.node.hint is not None:
        return int(size.node.hint)
    most = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(most) if most < 2**40 else 1024


def _numel(value: torch.Tensor) -> int:
    out = 1
    for n in value.shape:
        out *= hint(n)
    return out
