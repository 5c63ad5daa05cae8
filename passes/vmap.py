"""Regions under ``vmap`` become plain ops.

The capture works above the level at which ``vmap`` does, and cannot see through it. Block masks of FlexAttention are
made under ``vmap``, inside the model. *Before*, a run of nodes between the marks that enter and leave ``vmap``.
*After*, the batched ops that the run stands for. Nothing in such a region is attention or a linear layer of a model,
so it does no harm that they would be opened too.
"""

from __future__ import annotations

import copy

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from . import _torch

__all__ = ["open_vmap"]


def open_vmap(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph with its ``vmap`` regions opened; ``gm`` itself, if it has none. ``gm`` is not changed."""
    if not any(n.target is _torch.enter_vmap for n in gm.graph.nodes):
        return gm
    placeholders = gm.graph.find_nodes(op="placeholder")
    out = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    out.meta = dict(gm.meta)
    for old, new in zip(placeholders, out.graph.find_nodes(op="placeholder")):
        new.meta = dict(old.meta)
    for old, new in zip(gm.graph.nodes, out.graph.nodes):
        new.meta = dict(old.meta)  # a deep copy of a graph would copy fake values, too
    for region in _regions(out.graph):
        _open(out, region)
    out.graph.lint()
    out.recompile()
    return out


def _regions(graph: fx.Graph) -> list[list[fx.Node]]:
    """Runs of nodes from the entry of an outermost vmap to its end, marks included."""
    regions: list[list[fx.Node]] = []
    depth = 0
    for node in graph.nodes:
        if node.target is _torch.enter_vmap:
            if depth == 0:
                regions.append([])
            depth += 1
        if depth:
            regions[-1].append(node)
        if node.target is _torch.leave_vmap:
            depth -= 1
    return regions


def _open(gm: fx.GraphModule, region: list[fx.Node]) -> None:
    inside = set(region)
    inputs = list(dict.fromkeys(v for n in region for v in n.all_input_nodes if v not in inside))
    outputs = [n for n in region if any(u not in inside for u in n.users)]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {v: graph.placeholder(v.name) for v in inputs}
    for node in region:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[n] for n in outputs))
    examples = [v.meta["example_value"] for v in inputs]
    with (
        FakeTensorMode()
    ):  # one of its own: the examples may be of several, and tensors made in the region are fake, too
        examples = [_like(x) if isinstance(x, torch.Tensor) else x for x in examples]
        traced = _torch.make_fx(fx.GraphModule(gm, graph))(*examples)
    names = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs))
    with gm.graph.inserting_before(region[-1].next):
        for node in traced.graph.nodes:
            if node.op == "output":
                for old, new in zip(outputs, node.args[0]):
                    old.replace_all_uses_with(names[new], delete_user_cb=lambda user: user not in inside)
            elif node.op != "placeholder":
                names[node] = gm.graph.node_copy(node, names.__getitem__)
                if node.op == "get_attr":
                    # A buffer, so that the capture makes it an input as it does with all tensors that a graph holds.
                    names[node].target = f"_vmap_constant_{len(list(gm.buffers()))}"
                    gm.register_buffer(names[node].target, getattr(traced, str(node.target)))
                names[node].meta["example_value"] = node.meta.get("val")
                names[node].meta["stack_trace"] = region[0].meta.get("stack_trace")
    for node in reversed(region):
        gm.graph.erase_node(node)


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
