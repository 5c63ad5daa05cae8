"""From the plan to each rank's local program.

*Before*, a graph on whole tensors. *After*, the same graph, where S nodes run on the rank's rows, ``shard`` stands
where rows are first needed, ``gather`` where a whole value is, and each sharded attention is one ``attention`` op of
ours. Its inputs and outputs are those of the graph before.

What makes it right: every value has at most two forms, whole and sharded at one position, and an edge takes the form
that its user's mode names. A padded row is a copy of the last real row at every point.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from ..collectives import BUCKET
from ..mesh import Mesh
from ..ops import mesh_arguments
from ..placement import Placement
from .capture import Captured
from .graphs import inherited
from .lengths import Lengths, known_symbols
from .localise import local_arguments
from .modes import Mode
from .plan import Plan
from .relation import OUT, Op, Part, Position, Slot, is_tensor, shape_of
from .segments import Word, between, leaves
from .sizes import product, quotient, size_of

__all__ = ["Gathered", "Rewritten", "Sharded", "rewrite"]

aten = torch.ops.aten
ours = torch.ops.cp_compile


@dataclass(frozen=True)
class Options:
    """How attentions communicate, as the user asked.

    Attributes:
        rotate: how the ring moves keys and values.
        convert_to_fp32: merge the ring's partial results in fp32.
    """

    rotate: str = "alltoall"
    convert_to_fp32: bool = True


@dataclass(frozen=True)
class Gathered:
    """A value made whole, and the nodes that wanted it so."""

    value: fx.Node
    users: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Sharded:
    """A whole value cut to the rank's rows."""

    value: fx.Node
    at: Position


@dataclass
class Rewritten:
    """The local program, and what was put into it.

    Attributes:
        module: the program; same placeholders, the outputs that Dynamo's graph had.
        gathers: values gathered.
        shards: values cut.
        attentions: for each sharded attention of the old graph, its node in the new one.
        reduced: nodes whose partial sums are added up.
        left_partial: placeholders whose gradients were asked to stay partial, and are.
    """

    module: fx.GraphModule
    gathers: list[Gathered] = field(default_factory=list)
    shards: list[Sharded] = field(default_factory=list)
    attentions: dict[fx.Node, fx.Node] = field(default_factory=dict)
    reduced: list[fx.Node] = field(default_factory=list)
    left_partial: list[fx.Node] = field(default_factory=list)


def rewrite(
    captured: Captured,
    plan: Plan,
    mesh: Mesh,
    options: Options = Options(),
    training: bool = False,
    leave_partial: Collection[fx.Node] = (),
) -> Rewritten:
    """Build the local program of one rank. The captured graph is not changed.

    Args:
        captured: the graph.
        plan: its labels.
        mesh: this rank's view of the ranks.
        options: how attentions communicate.
        training: make it differentiable: sum the gradients of what is whole on every rank.
        leave_partial: placeholders whose gradients somebody else sums.
    """
    return _Rewriter(captured, plan, mesh, options, training, leave_partial).run()


class _Rewriter:
    def __init__(
        self,
        captured: Captured,
        plan: Plan,
        mesh: Mesh,
        options: Options,
        training: bool,
        leave_partial: Collection[fx.Node],
    ):
        self.captured, self.plan, self.mesh, self.options, self.training = captured, plan, mesh, options, training
        self.source = captured.module.graph
        self.graph = fx.Graph()
        self.mesh_args = mesh_arguments(mesh)
        self.whole: dict[fx.Node, fx.Node] = {}
        self.local: dict[fx.Node, fx.Node] = {}
        self.cut: dict[tuple[fx.Node, Position, Word], fx.Node] = {}
        self.scaled: dict[fx.Node, fx.Node] = {}
        self.gather_users: dict[fx.Node, list[fx.Node]] = {}
        self.result = Rewritten(fx.GraphModule({}, self.graph))
        self.partial = _partial_gradients(self.source, plan) if training else set()
        self.result.left_partial = [n for n in leave_partial if n in self.partial]

    def run(self) -> Rewritten:
        placeholders = self.captured.placeholders
        for node in placeholders:
            self.whole[node] = self.graph.node_copy(node)
        self.last_placeholder = self.whole[placeholders[-1]] if placeholders else None
        symbols = {s: self.whole[n] for s, n in known_symbols(placeholders).items()}
        self.lengths = Lengths(self.graph, symbols, self.last_placeholder)
        if self.training:
            self._sum_input_gradients(placeholders)
        for node in self.source.nodes:
            if node.op == "placeholder":
                continue
            self.current = node
            if node.op == "output":
                self._output(node)
            elif node in self.plan.modes:
                self._sharded(node, self.plan.modes[node])
            else:
                self._whole(node)
        self.result.gathers = [Gathered(v, tuple(users)) for v, users in self.gather_users.items()]
        # Made anew, now that the graph is whole: a GraphModule takes from its root what its graph names.
        self.result.module = fx.GraphModule(self.captured.module, self.graph)
        self.result.module.graph.lint()
        return self.result

    # Nodes

    def _whole(self, node: fx.Node) -> None:
        if node.target is aten.sym_size.int and self.lengths.knows(size := size_of(node.meta["val"])):
            # The same number on every rank: no need to make the value whole for it.
            self.whole[node] = cast(fx.Node, self.lengths.of(size))
            return
        ignored = self._ignored(node)
        full_gradient = self.training and node not in self.partial

        def argument(value: fx.Node) -> fx.Node:
            if value in ignored:
                return self._any(value)
            whole = self._as_whole(value, node)
            return self._full_to_partial(value, whole) if full_gradient else whole

        self.whole[node] = new = self.graph.node_copy(node, argument)
        new.meta = dict(node.meta)
        new.target = _any_stride(node.target)
        self.lengths.learn(node.meta.get("val"), new)

    def _sharded(self, node: fx.Node, mode: Mode) -> None:
        op = self.plan.axes.ops[node]
        if mode.attends:
            self.local[node] = self._attention(node, op, mode)
            return
        args = {name: self._argument(op, name, value, mode) for name, value in op.args.items()}
        if mode.out is None:
            self._partial_sum(node, op, args, mode)
            return
        shape = self._local_shape(node, mode.out, mode.word)
        changes = local_arguments(op, mode.out, shape, lambda link: self._local_part(op, link, mode))
        if "<view>" in changes:
            self.local[node] = self._emit(node, aten.reshape.default, args["self"], changes["<view>"])
            return
        args |= changes
        self.local[node] = self._call(node, op, args)

    def _partial_sum(self, node: fx.Node, op: Op, args: dict[str, Any], mode: Mode) -> None:
        """Sum this rank's rows, each token once, and add the ranks' sums."""
        slot, at = next(iter(mode.needs.items()))
        x = args[slot] if isinstance(slot, str) else args[slot[0]][slot[1]]
        x = self._emit(node, ours.zero_padding.default, x, at.dim, self._length(at.outer), *self._rows(mode.word))
        if isinstance(slot, str):
            args[slot] = x
        else:
            args[slot[0]] = [x if i == slot[1] else v for i, v in enumerate(args[slot[0]])]
        divide = None
        if node.target in (aten.mean.dim, aten.mean.default):
            # The mean over a shard divides by the shard's length; the mean over all tokens by theirs.
            dims = op.args.get("dim") or list(range(len(op.shape("self"))))
            divide = self._length(product(op.shape("self")[d] for d in dims))
            dtype = node.meta["val"].dtype
            local = self._emit(node, aten.sum.dim_IntList, x, dims, op.args.get("keepdim", False), dtype=dtype)
        else:
            local = self._call(node, op, args)
        partial = node in self.partial
        done = self._emit(node, ours.all_reduce.default, local, self.mesh.group, partial)
        self.whole[node] = done if divide is None else self._emit(node, aten.div.Tensor, done, divide)
        self.result.reduced.append(node)

    def _attention(self, node: fx.Node, op: Op, mode: Mode) -> fx.Node:
        sharded = node in self.plan.keys_sharded
        q = self._as_local(op.args["query"], mode.needs["query"], mode.word, node)
        if sharded:
            assert mode.keys is not None
            at, word = mode.keys
            k, v = (self._as_local(op.args[s], at, word, node) for s in ("key", "value"))
            kv_lengths, kv_zigzag, _, _ = self._rows(word)
        else:
            k, v = (self._as_whole(op.args[s], node) for s in ("key", "value"))
            kv_lengths, kv_zigzag = None, False
        mask = op.args["attn_mask"]
        mask = None if mask is None else self._as_whole(mask, node)
        q_lengths, q_zigzag, *mesh = self._rows(mode.word)
        new = self._emit(
            node, ours.attention.default, q, k, v, mask, q_lengths, q_zigzag, kv_lengths, kv_zigzag,
            op.args["dropout_p"], op.args["is_causal"], op.args["scale"], op.args["enable_gqa"],
            self.options.rotate, self.options.convert_to_fp32, *mesh,
        )  # fmt: skip
        self.result.attentions[node] = new
        return new

    def _output(self, node: fx.Node) -> None:
        outputs = list(node.args[0])  # type: ignore[arg-type]
        values = [self._as_output(v, node) for v in outputs]
        written = len(self.captured.written)
        by_name = {n.name: n for n in self.captured.placeholders}
        for name, value in zip(self.captured.written, values[:written]):
            self._emit(node, aten.copy_.default, self.whole_placeholder(by_name[name]), value)
        self.graph.output(tuple(values[written:]))

    def _as_output(self, value: Any, node: fx.Node) -> Any:
        if not isinstance(value, fx.Node):
            return value
        whole = self._as_whole(value, node)
        return self._full_to_partial(value, whole) if self.training else whole

    def whole_placeholder(self, node: fx.Node) -> fx.Node:
        """The placeholder itself, not the form of it that sums its gradient."""
        return self.placeholders[node] if self.training else self.whole[node]

    # Forms of a value

    def _argument(self, op: Op, name: str, value: Any, mode: Mode) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._form(op, (name, i), v, mode) for i, v in enumerate(value)]
        return self._form(op, name, value, mode)

    def _form(self, op: Op, slot: Slot, value: Any, mode: Mode) -> Any:
        if not isinstance(value, fx.Node):
            return value
        if not is_tensor(value):
            return self.whole[value]
        if slot in mode.needs:
            word = leaves(self.plan.axes.positions[value][mode.needs[slot]])
            return self._as_local(value, mode.needs[slot], word, op.node)
        if slot in self.plan.axes.relations[op.node].ignored:
            return self._any(value)
        return self._as_whole(value, op.node)

    def _any(self, value: fx.Node) -> fx.Node:
        return self.local[value] if value in self.local else self.whole[value]

    def _as_whole(self, value: fx.Node, user: fx.Node) -> fx.Node:
        if value not in self.whole:
            mode = self.plan.modes[value]
            assert mode.out is not None
            with self._after(self.local[value]):
                self.whole[value] = self._emit(
                    value, ours.gather.default, self.local[value], mode.out.dim, self._length(mode.out.outer),
                    *self._rows(mode.word), self.training and value in self.partial,
                )  # fmt: skip
            self.gather_users[value] = []
        if value in self.gather_users and user not in self.gather_users[value]:
            self.gather_users[value].append(user)
        return self.whole[value]

    def _as_local(self, value: fx.Node, at: Position, word: Word, user: fx.Node) -> fx.Node:
        mode = self.plan.modes.get(value)
        if mode is not None and mode.out == at and leaves(mode.word) == word:
            return self.local[value]
        key = (value, at, word)
        if key not in self.cut:
            whole, lengths = self._as_whole(value, user), (self._length(at.outer), *self._rows(word))
            # A value may be older than a length that only the data tells: then it is cut where it is first needed.
            with nullcontext() if self.lengths.depends_on_data(word) else self._after(whole):
                self.cut[key] = self._emit(value, ours.shard.default, whole, at.dim, *lengths)
            self.result.shards.append(Sharded(value, at))
        return self.cut[key]

    def _after(self, node: fx.Node) -> AbstractContextManager[Any]:
        """Where the other form of a value goes: right after it, in the same region (autocast)."""
        if node.op == "placeholder":
            node = cast(fx.Node, self.last_placeholder)
        return self.graph.inserting_after(node)

    # Gradients

    def _sum_input_gradients(self, placeholders: list[fx.Node]) -> None:
        self.placeholders = dict(self.whole)
        bucket: list[fx.Node] = []
        size = 0
        trained = (n for n, wants in zip(placeholders, self.captured.trained) if wants)
        wanted = [n for n in trained if n in self.partial and n not in self.result.left_partial]
        for node in wanted:
            bucket.append(node)
            size += node.meta["val"].numel() * node.meta["val"].dtype.itemsize
            if size >= BUCKET or node is wanted[-1]:
                summed = self._emit(node, ours.sum_gradients.default, [self.whole[n] for n in bucket], self.mesh.group)
                for i, n in enumerate(bucket):
                    self.whole[n] = self._item(summed, i)
                bucket, size = [], 0

    def _item(self, node: fx.Node, index: int) -> fx.Node:
        return self.graph.call_function(operator.getitem, (node, index))

    def _full_to_partial(self, value: fx.Node, whole: fx.Node) -> fx.Node:
        """Where a value with a partial gradient is used by a node whose gradient is full, each rank gives its share."""
        if value not in self.partial or not is_tensor(value) or not value.meta["val"].dtype.is_floating_point:
            return whole
        if whole not in self.scaled:
            with self._after(whole):
                self.scaled[whole] = self._emit(value, ours.scale_gradient.default, whole, 1.0 / self.mesh.degree)
        return self.scaled[whole]

    # Sizes

    def _length(self, size: Any) -> Any:
        return self.lengths.of(size)

    def _placement(self, word: Word) -> Placement:
        return self.plan.placement(word)

    def _rows(self, word: Word) -> tuple[list[Any], bool, list[int], list[str]]:
        placement = self._placement(word)
        return [self._length(n) for n in placement.lengths], placement.zigzag, *self.mesh_args

    def _local_rows(self, word: Word) -> Any:
        """Local rows of an axis, as the graph holds them."""
        if not word:
            return 0
        placement = self._placement(word)
        parts = 2 * placement.degree if placement.zigzag else placement.degree
        rows: Any = 0
        for n in placement.lengths:
            chunk = self.lengths.ceildiv(n, parts)
            rows = self.lengths.add(rows, self.lengths.times(chunk, 2) if placement.zigzag else chunk)
        return rows

    def _local_shape(self, node: fx.Node, at: Position, word: Word) -> list[Any]:
        shape = [self._length(n) for n in shape_of(node)]
        rows = self._local_rows(word)
        shape[at.dim] = self.lengths.times(self.lengths.times(self._length(at.outer), rows), self._length(at.inner))
        return shape

    def _local_part(self, op: Op, link: Part, mode: Mode) -> tuple[Any, Any]:
        """Local first and last row of a slice of the axis: boundaries are where segments are, locally too."""
        slot = link.whole[0]
        at = mode.out if slot == OUT else mode.needs[slot]
        assert at is not None
        word = self.plan.axes.word(op.value(slot), at)  # type: ignore[arg-type]
        start, stop = quotient(link.start, at.inner), quotient(link.stop, at.inner)
        before, inside = between(word, 0, start), between(word, start, stop)
        assert before is not None and inside is not None
        first = self.lengths.times(self._local_rows(before), self._length(at.inner))
        rows = self.lengths.times(self._local_rows(inside), self._length(at.inner))
        return first, self.lengths.add(first, rows)

    # Emission

    def _ignored(self, node: fx.Node) -> set[fx.Node]:
        relation = self.plan.axes.relations.get(node)
        if relation is None:
            return set()
        return {v for s, v in self.plan.axes.ops[node].inputs() if s in relation.ignored}

    def _call(self, node: fx.Node, op: Op, args: dict[str, Any]) -> fx.Node:
        schema = node.target._schema  # type: ignore[union-attr]
        positional = [args[a.name] for a in schema.arguments if not a.kwarg_only]
        keywords = {a.name: args[a.name] for a in schema.arguments if a.kwarg_only and args[a.name] != a.default_value}
        return self._emit(node, _any_stride(node.target), *positional, **keywords)

    def _emit(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = self.graph.call_function(target, args, kwargs)
        new.meta = inherited(like)
        return new


def _any_stride(target: Any) -> Any:
    """A view was traced for the strides of the whole model; a gathered value or an attention's may have others."""
    return aten.reshape.default if target in (aten.view.default, aten._unsafe_view.default) else target


def _partial_gradients(graph: fx.Graph, plan: Plan) -> set[fx.Node]:
    """Values whose gradient, taken whole, is a partial one on each rank: those that lead to a node on a shard.

    The gradient of what leads to outputs only, through nodes on all tokens, is full: every rank computes the same.
    """
    partial: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        mode = plan.modes.get(node)
        at = mode.out if mode else None
        for user in node.users:
            wanted = plan.modes.get(user)
            if wanted is None:
                if user in partial:
                    partial.add(node)
            elif at is None or not _takes_local(plan, node, user, at):
                partial.add(node)
    return partial


def _takes_local(plan: Plan, value: fx.Node, user: fx.Node, at: Position) -> bool:
    """Whether a user on a shard takes a sharded value as it is, in every slot."""
    op, mode = plan.axes.ops[user], plan.modes[user]
    needs = dict(mode.needs)
    if user in plan.keys_sharded and mode.keys:
        needs |= dict.fromkeys(("key", "value"), mode.keys[0])
    ignored = plan.axes.relations[user].ignored
    return all(needs.get(slot) == at or slot in ignored for slot, v in op.inputs() if v is value)
