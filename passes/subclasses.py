"""Tensor subclasses among the inputs become the plain tensors that they hold.

The capture takes plain tensors only; a quantised weight is a subclass that holds several. *Before*, a placeholder for
the subclass. *After*, a placeholder for each tensor in it, and a call that puts the subclass together again, so that
its own operators run while the graph is captured: what remains are their plain ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from ..errors import CPError
from . import _torch

__all__ = ["Opened", "has_subclasses", "open_subclasses"]


@dataclass(frozen=True)
class Opened:
    """A graph on plain tensors.

    Attributes:
        module: the graph.
        example_inputs: for it.
        unpack: from the inputs of the graph before to those of this one.
    """

    module: fx.GraphModule
    example_inputs: list[Any]
    unpack: Callable[[Sequence[Any]], list[Any]]


def has_subclasses(inputs: Sequence[Any]) -> bool:
    """Whether an input is a tensor that holds others."""
    return any(_torch.is_traceable_wrapper_subclass(x) for x in inputs)


def open_subclasses(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Opened:
    """Open one level of subclasses: what they hold may be subclasses again. ``gm`` is not changed.

    Raises:
        CPError: a subclass wants a gradient, which plain tensors could not hand back to it.
    """
    graph, names = fx.Graph(), {}
    sources = gm.graph.find_nodes(op="placeholder")
    parts: list[tuple[str, ...]] = []  # for each input, the names of what it holds
    rebuilt: list[tuple[fx.Node, Any, list[fx.Node]]] = []
    for node, x in zip(sources, example_inputs, strict=True):
        if not _torch.is_traceable_wrapper_subclass(x):
            names[node] = graph.node_copy(node)
            if hasattr(node, "_dynamo_source"):
                names[node]._dynamo_source = node._dynamo_source
            parts.append(())
            continue
        if cast(torch.Tensor, x).requires_grad and torch.is_grad_enabled():
            raise CPError(
                f"cp_compile: input {node.name} is a {type(x).__name__} that wants a gradient. Only plain tensors "
                "can be trained: freeze it (requires_grad_(False)), or run the model under torch.no_grad()."
            )
        held, _ = x.__tensor_flatten__()
        parts.append(tuple(held))
        rebuilt.append((node, x, [_placeholder(graph, node, name, getattr(x, name)) for name in held]))
    for node, x, inner in rebuilt:
        names[node] = graph.call_function(_builder(x), tuple(inner))
        names[node].meta = {"example_value": x}
    for node in gm.graph.nodes:
        if node not in names:
            names[node] = graph.node_copy(node, names.__getitem__)
    module = fx.GraphModule(gm, graph)
    module.meta = dict(gm.meta)

    def unpack(inputs: Sequence[Any]) -> list[Any]:
        flat: list[Any] = []
        for x, held in zip(inputs, parts):
            flat += [getattr(x, name) for name in held] if held else [x]
        return flat

    return Opened(module, unpack(example_inputs), unpack)


def _placeholder(graph: fx.Graph, node: fx.Node, name: str, value: torch.Tensor) -> fx.Node:
    new = graph.placeholder(f"{node.name}_{name}")
    # A parameter that never moves holds tensors that never move.
    new.meta = {k: v for k, v in node.meta.items() if k == "tensor_dict"} | {"example_value": value}
    new._dynamo_source = None
    return new


def _builder(example: Any) -> Callable[..., Any]:
    held, context = example.__tensor_flatten__()
    size, stride, cls = example.size(), example.stride(), type(example)

    def rebuild(*parts: torch.Tensor) -> Any:
        return cls.__tensor_unflatten__(dict(zip(held, parts)), context, size, stride)

    return rebuild
