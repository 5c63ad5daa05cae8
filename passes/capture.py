"""From Dynamo's graph to a functional ATen graph, with attention and linear layers left whole.

*Before*, Dynamo's graph calls Python functions and methods, and may write in place. *After*, every node is an ATen op
without side effects (but for the marks of autocast and no-grad regions), written-to inputs are extra outputs, and a few
ops that say one thing in several ways are said in one: splits are slices, ``copy`` is its source, attention written by
hand is attention.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import _torch
from .composites import composites
from .fused import FUSED
from .graphs import call
from .losses import LOSSES
from .recognise import recognise_attention
from .regions import enter_regions
from .relation import Op
from .vmap import open_vmap

__all__ = ["Captured", "capture"]

aten = torch.ops.aten

_Forms = dict[Any, Callable[[fx.Graph, fx.Node], None]]


@dataclass(frozen=True)
class Captured:
    """A functional graph and how its ends fit the graph that Dynamo gave.

    Attributes:
        module: the graph; its placeholders are ``prefix`` and then Dynamo's own, its output a flat tuple.
        prefix: tensors that the graph itself holds (constants, and parameters that Dynamo did not make inputs), in the
            order of the first placeholders.
        written: for each leading output, the placeholder that it must be copied into.
        dynamo: Dynamo's own graph.
        trained: for each placeholder, whether its gradient is wanted.
    """

    module: fx.GraphModule
    prefix: tuple[torch.Tensor, ...]
    written: tuple[str, ...]
    dynamo: fx.GraphModule
    trained: tuple[bool, ...]

    @property
    def sources(self) -> list[fx.Node]:
        """Dynamo's placeholders."""
        return self.dynamo.graph.find_nodes(op="placeholder")

    @property
    def placeholders(self) -> list[fx.Node]:
        return self.module.graph.find_nodes(op="placeholder")

    @property
    def own_placeholders(self) -> list[fx.Node]:
        """Placeholders of the inputs that Dynamo's graph has."""
        return self.placeholders[len(self.prefix) :]

    def carry_metadata(self, module: fx.GraphModule) -> None:
        """Tell a rewritten graph what Dynamo knew of its inputs: which are parameters that never move, say."""
        for node in module.graph.find_nodes(op="placeholder")[: len(self.prefix)]:
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
            node._dynamo_source = None  # nobody can pass another one in, so there is nothing to guard
        for node, source in zip(
            module.graph.find_nodes(op="placeholder")[len(self.prefix) :], self.sources, strict=True
        ):
            node.meta = {**source.meta, **{k: v for k, v in node.meta.items() if k == "val"}}
            if hasattr(source, "_dynamo_source"):
                node._dynamo_source = source._dynamo_source
        module.meta.update(self.dynamo.meta)
        if hasattr(self.dynamo, "_param_name_to_source"):
            module._param_name_to_source = self.dynamo._param_name_to_source


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Captured:
    """Capture a graph at the level at which context parallelism is a rewrite. ``gm`` is not changed."""
    learned = (x.requires_grad for x in (*gm.parameters(), *example_inputs) if isinstance(x, torch.Tensor))
    training = torch.is_grad_enabled() and any(learned)
    dynamo, gm = gm, open_vmap(enter_regions(gm, training))
    prefix: tuple[torch.Tensor, ...] = tuple(dict(gm.named_parameters(remove_duplicate=False)).values())
    prefix += tuple(dict(gm.named_buffers(remove_duplicate=False)).values())
    opened = {**composites(), **FUSED, **LOSSES}
    module, signature = _torch.aot_export_module(
        gm, list(example_inputs), trace_joint=False, pre_dispatch=True, decompositions=opened
    )
    assert isinstance(module, fx.GraphModule)
    names = [n.name for n in module.graph.find_nodes(op="placeholder")]
    held = [*signature.parameters, *signature.buffers]
    by_target = dict(zip(held, names[: len(held)]))
    written = tuple(by_target[t] for t in signature.buffers_to_mutate.values())
    written += tuple(signature.user_inputs_to_mutate.values())
    prefix = (*_lift_constants(module), *prefix)
    trained = tuple(isinstance(x, torch.Tensor) and x.requires_grad for x in (*prefix, *example_inputs))
    _normalise(module)
    return Captured(module, prefix, written, dynamo, trained)


def _lift_constants(module: fx.GraphModule) -> list[torch.Tensor]:
    """Make tensors that the graph holds its first inputs, as all others are."""
    lifted: dict[str, fx.Node] = {}
    tensors = []
    first = next(iter(module.graph.nodes))
    for node in module.graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(str(node.target))(module)
        if not isinstance(value, torch.Tensor):
            continue  # the child graph of a higher-order op
        name = str(node.target)
        if name not in lifted:
            with module.graph.inserting_before(first):
                lifted[name] = module.graph.placeholder(name.replace(".", "_"))
            lifted[name].meta = dict(node.meta)
            tensors.append(value)
        node.replace_all_uses_with(lifted[name])
        module.graph.erase_node(node)
    return tensors


def _normalise(module: fx.GraphModule) -> None:
    graph = module.graph
    _change(graph, _NORMAL_FORMS)
    recognise_attention(graph)
    _change(graph, _DRAWS)
    graph.eliminate_dead_code(is_impure_node=_is_impure)
    graph.lint()
    module.recompile()


def _change(graph: fx.Graph, forms: _Forms) -> None:
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in forms:
            with graph.inserting_before(node):
                forms[node.target](graph, node)


def _is_impure(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    return node.op == "call_function" and (
        node.target in _REGION_MARKS or (not isinstance(node.target, torch._ops.OpOverload) and node.is_impure())
    )


_REGION_MARKS = {_torch.enter_autocast, _torch.exit_autocast, torch._C._set_grad_enabled}


def _drop(graph: fx.Graph, node: fx.Node) -> None:
    """Assertions on dtype and device of values that are what they were when traced."""
    graph.erase_node(node)


def _type_as(graph: fx.Graph, node: fx.Node) -> None:
    """Only the dtype of the other tensor matters, and it is known."""
    dtype = node.meta["val"].dtype
    source = node.args[0]
    if source.meta["val"].dtype != dtype:  # type: ignore[union-attr]
        source = call(graph, node, aten._to_copy.default, source, dtype=dtype)
    node.replace_all_uses_with(source)  # type: ignore[arg-type]
    graph.erase_node(node)


def _copy(graph: fx.Graph, node: fx.Node) -> None:
    """``copy(self, src)`` is ``src``, in the shape and dtype of ``self``. It has no derivative, its parts have one."""
    target, source = node.args[:2]
    want, have = target.meta["val"], source.meta["val"]  # type: ignore[union-attr]
    if have.dtype != want.dtype:
        source = call(graph, node, aten._to_copy.default, source, dtype=want.dtype)
    if have.device != want.device:
        source = call(graph, node, aten._to_copy.default, source, device=want.device)
    if len(have.shape) != len(want.shape) or any(a is not b and a != b for a, b in zip(have.shape, want.shape)):
        source = call(graph, node, aten.expand.default, source, _shape(graph, node, target))
    node.replace_all_uses_with(source)  # type: ignore[arg-type]
    graph.erase_node(node)


def _shape(graph: fx.Graph, node: fx.Node, x: Any) -> list[Any]:
    """The shape of a value, as the graph may hold it."""
    sizes = enumerate(x.meta["val"].shape)
    return [n if isinstance(n, int) else call(graph, node, aten.sym_size.int, x, i) for i, n in sizes]


def _split(graph: fx.Graph, node: fx.Node) -> None:
    """Each piece is a slice."""
    op = Op.of(node)
    source = op.args["self"]
    dim = op.dim("dim", source.meta["val"].dim())
    start: Any = 0
    pieces = []
    for value in node.meta["val"]:
        size = value.shape[dim]
        if not isinstance(start, int) or not isinstance(size, int):
            return  # lengths that are not known: left as it is
        pieces.append(call(graph, node, aten.slice.Tensor, source, dim, start, start + size))
        start += size
    _replace_items(graph, node, pieces)


def _unbind(graph: fx.Graph, node: fx.Node) -> None:
    """Each piece is a select."""
    op = Op.of(node)
    source = op.args["self"]
    dim = op.dim("dim", source.meta["val"].dim())
    count = len(node.meta["val"])
    _replace_items(graph, node, [call(graph, node, aten.select.int, source, dim, i) for i in range(count)])


def _replace_items(graph: fx.Graph, node: fx.Node, pieces: list[fx.Node]) -> None:
    for user in list(node.users):
        assert user.target.__name__ == "getitem", f"{node} is used whole by {user}"  # type: ignore[union-attr]
        user.replace_all_uses_with(pieces[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)


_NORMAL_FORMS: _Forms = {
    aten._assert_tensor_metadata.default: _drop,
    aten.type_as.default: _type_as,
    aten.copy.default: _copy,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.chunk.default: _split,
    aten.unsafe_chunk.default: _split,
    aten.unsafe_split.Tensor: _split,
    aten.unbind.int: _unbind,
}


def _dropout(graph: fx.Graph, node: fx.Node) -> None:
    """``dropout(x)`` is ``x`` times factors drawn for its shape alone: the dropout of ones."""
    op = Op.of(node)
    x, p, train = (op.args[name] for name in ("input", "p", "train"))
    if train and p:
        ones = call(graph, node, aten.ones.default, _shape(graph, node, x), **_options(x))
        x = call(graph, node, aten.mul.Tensor, x, call(graph, node, aten.dropout.default, ones, p, True))
    node.replace_all_uses_with(x)
    graph.erase_node(node)


def _fill(graph: fx.Graph, node: fx.Node) -> None:
    """What a tensor held before it was filled with random values does not matter."""
    x = node.args[0]
    node.update_arg(0, call(graph, node, aten.empty.memory_format, _shape(graph, node, x), **_options(x)))


def _like(graph: fx.Graph, node: fx.Node) -> None:
    """Random values like a tensor's depend on its shape alone."""
    op = Op.of(node)
    target, numbers = _LIKE[node.target]
    args = [op.args[name] for name in numbers]
    node.replace_all_uses_with(call(graph, node, target, *args, _shape(graph, node, op.args["self"]), **_options(node)))
    graph.erase_node(node)


def _options(x: Any) -> dict[str, Any]:
    return {"dtype": x.meta["val"].dtype, "device": x.meta["val"].device}


_LIKE: dict[Any, tuple[Any, tuple[str, ...]]] = {
    aten.rand_like.default: (aten.rand.default, ()),
    aten.randn_like.default: (aten.randn.default, ()),
    aten.randint_like.default: (aten.randint.default, ("high",)),
    aten.randint_like.low_dtype: (aten.randint.low, ("low", "high")),
}

# Draws are made for all tokens, so that they are those of one process: no draw may wait for a value that is sharded.
_DRAWS: _Forms = {
    aten.dropout.default: _dropout,
    aten.bernoulli.p: _fill,
    aten.uniform.default: _fill,
    aten.normal_functional.default: _fill,
    aten.exponential.default: _fill,
    **dict.fromkeys(_LIKE, _like),
}
