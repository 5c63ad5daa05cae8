"""Peak activation memory of one forward: which tensors are alive at once when a graph runs in its order.

A storage lives from the node that makes it to the last node that uses it or a view of it, and to the end if it is an
output. Inputs (parameters among them) are the caller's and do not count, and neither does what an op needs for itself
while it runs. So it is an estimate, of the same kind for the model on one process and for a rank's program: good for
comparing the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from . import _torch
from .costs import hint

__all__ = ["peak_bytes", "values_of"]

_ATTENTION = torch.ops.cp_compile.attention.default


def peak_bytes(graph: fx.Graph, value_of: Callable[[fx.Node], Any] = lambda n: n.meta.get("val")) -> int:
    """Largest number of bytes that activations hold at once, in one forward. Sizes that vary count by their hints.

    Args:
        graph: a functional graph.
        value_of: the value of each node: a tensor, fake ones included, or any nest of them.
    """
    nodes = list(graph.nodes)
    held = {node: list(_storages(value_of(node))) for node in nodes}  # kept, or an address could be given twice
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    size: dict[int, int] = {}
    for i, node in enumerate(nodes):
        for storage in held[node]:
            first.setdefault(storage._cdata, -1 if node.op == "placeholder" else i)
            size[storage._cdata] = hint(storage.nbytes())
        for storage in (s for n in (node, *node.all_input_nodes) for s in held[n]):
            last[storage._cdata] = i
    change = [0] * (len(nodes) + 1)
    for address, start in first.items():
        if start >= 0:
            change[start] += size[address]
            change[last[address] + 1] -= size[address]
    peak = alive = 0
    for step in change:
        alive += step
        peak = max(peak, alive)
    return peak


def values_of(module: fx.GraphModule) -> dict[fx.Node, Any] | None:
    """Values of all nodes of a program, from its placeholders' (``meta["val"]``), without running it on data.

    Returns:
        Fake tensors, or None if some length depends on the data.
    """
    inputs = [n.meta.get("val") for n in module.graph.find_nodes(op="placeholder")]
    if not all(_is_known(n) for value in inputs for n in (value.shape if isinstance(value, torch.Tensor) else [value])):
        return None
    with _torch.FakeTensorMode() as mode, torch.no_grad():
        run = _Run(module, mode)
        try:
            run.run(*(_concrete(value, mode) for value in inputs))
        except _torch.DEPENDS_ON_DATA:
            return None
        finally:
            run.leave_regions()
    return run.values


class _Run(fx.Interpreter):
    """Runs a graph and keeps every node's value."""

    def __init__(self, module: fx.GraphModule, mode: Any):
        super().__init__(module)
        self.mode = mode
        self.values: dict[fx.Node, Any] = {}
        self.regions: list[Any] = []

    def run_node(self, n: fx.Node) -> Any:
        if isinstance(n.target, torch._ops.HigherOrderOperator):
            # It runs on whole values, as it was traced; some cannot be run on fake ones outside of a trace.
            value = tree_map(lambda v: _concrete(v, self.mode), n.meta["val"])
        else:
            value = super().run_node(n)
        self.values[n] = value
        if n.target is _torch.enter_autocast:
            self.regions.append(value)
        elif n.target is _torch.exit_autocast:
            self.regions.pop()
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is _ATTENTION:  # its output is as long as its rows; no need to go round the ring for that
            query, value = args[0], args[2]
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        return super().call_function(target, args, kwargs)

    def leave_regions(self) -> None:
        """Leave the autocast regions that an error cut short."""
        while self.regions:
            _torch.exit_autocast(self.regions.pop())


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    return (x.untyped_storage() for x in tree_leaves(value) if isinstance(x, torch.Tensor))


def _is_known(size: Any) -> bool:
    return not isinstance(size, torch.SymInt) or size.node.hint is not None


def _concrete(value: Any, mode: _torch.FakeTensorMode) -> Any:
    """A value like a placeholder's, its sizes numbers."""
    if isinstance(value, torch.Tensor):
        with mode:
            sizes, strides = [hint(n) for n in value.shape], [hint(n) for n in value.stride()]
            return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    return hint(value) if isinstance(value, torch.SymInt) else value
