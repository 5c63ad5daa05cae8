"""Building graphs whose nodes know their values and where they come from."""

from __future__ import annotations

from typing import Any

from torch import fx

from . import _torch

__all__ = ["call", "inherited"]

_INHERITED = ("stack_trace", "nn_module_stack", "source_fn_stack", "recompute", "ac_graph_id")


def inherited(node: fx.Node) -> dict[str, Any]:
    """What a node passes on to nodes that stand for it: where it comes from, and whether to recompute it."""
    return {k: node.meta[k] for k in _INHERITED if k in node.meta}


def call(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node with the source location of ``like`` and its own value."""
    node = graph.call_function(target, args, kwargs)
    node.meta = inherited(like)
    values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    mode = _torch.detect_fake_mode(like.meta.get("val")) or _torch.detect_fake_mode(values)
    assert mode is not None, f"{like} has no fake value"
    with mode:
        node.meta["val"] = target(*values[0], **values[1])
    return node
