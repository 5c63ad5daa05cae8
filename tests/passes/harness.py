"""Runs functions and single ops through the compiler's passes, and their local programs on emulated ranks.

Nothing here starts a process or calls Dynamo: a function is captured as the backend captures a graph of Dynamo's, then
analysed, planned and rewritten for every rank, and the ranks are threads. What comes out is compared with the function
itself in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from cp_compile import ops  # noqa: F401  (registers the ops)
from cp_compile.mesh import Mesh
from cp_compile.passes.axes import Axes, find_axes
from cp_compile.passes.capture import Captured, capture
from cp_compile.passes.costs import CostModel
from cp_compile.passes.modes import Mode, axis_groups, modes_of
from cp_compile.passes.plan import Plan, make_plan
from cp_compile.passes.relation import Position
from cp_compile.passes.rewrite import Options, Rewritten, rewrite
from cp_compile.passes.segments import Segment
from tests.emulate import Stats, emulate, meshes, stats

__all__ = [
    "ATTENTION",
    "Call",
    "Compiled",
    "Traced",
    "attention_over",
    "capture_function",
    "check",
    "check_mode",
    "compare",
    "compile_captured",
    "compile_function",
    "count",
    "graph_of",
    "rows_of",
    "tensor",
]

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_OURS = torch.ops.cp_compile

TOLERANCE = 1e-10
"""Relative to the largest value, in float64: orders of summation differ, nothing else does."""


def graph_of(function: Callable[..., Any], inputs: Sequence[Any]) -> fx.GraphModule:
    """A function of tensors as a graph like Dynamo's: an input each, and a flat tuple of outputs."""
    if isinstance(function, fx.GraphModule):
        return function

    def flat(*args: Any) -> tuple[Any, ...]:
        out = function(*args)
        return tuple(out) if isinstance(out, (tuple, list)) else (out,)

    graph = fx.Graph()
    args = tuple(graph.placeholder(f"x{i}") for i in range(len(inputs)))
    graph.output(graph.call_function(flat, args))
    return fx.GraphModule({}, graph)


def tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers that depend on the shape and the seed only."""
    generator = torch.Generator().manual_seed(seed * 7919 + sum(n * 31**i for i, n in enumerate(shape)))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def attention_over(x: Tensor, heads: int = 2, **options: Any) -> Tensor:
    """Self-attention of ``[batch, tokens, channels]`` without weights: what makes dim 1 the token axis."""
    q = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(q, q * 0.5, q + 1, **options)
    return out.transpose(1, 2).flatten(2)


# Whole functions


@dataclass(frozen=True)
class Compiled:
    """A function after all passes.

    Attributes:
        captured: the graph that the passes worked on.
        axes: where its token axes are.
        plan: its labels.
        programs: each rank's local program.
        stats: what each rank communicated in the last run.
    """

    captured: Captured
    axes: Axes
    plan: Plan
    programs: list[Rewritten]
    stats: list[Stats]

    @property
    def graph(self) -> fx.Graph:
        return self.captured.module.graph

    @property
    def local(self) -> fx.Graph:
        """The local program of rank 0."""
        return self.programs[0].module.graph

    def run(
        self, inputs: Callable[[], Sequence[Any]], after: Callable[..., Any] = lambda out, inputs: out
    ) -> list[Any]:
        """What ``after(outputs, inputs)`` gives on each rank; each rank has inputs of its own."""

        def rank(mesh: Mesh) -> Any:
            mine = list(inputs())
            out = self.programs[mesh.rank].module(*self.captured.prefix, *mine)
            done = after(out, mine)
            self.stats[mesh.rank] = stats()
            return done

        return emulate(self.plan.ring, self.plan.ulysses, rank)


def capture_function(function: Callable[..., Any], inputs: Sequence[Any]) -> Captured:
    """Capture as the backend does."""
    return capture(graph_of(function, inputs), list(inputs))


def compile_function(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    ring: int = 1,
    ulysses: int = 2,
    *,
    training: bool = False,
    rotate: str = "alltoall",
    costs: CostModel | None = None,
) -> Compiled:
    """All passes, for every rank of a mesh."""
    return compile_captured(
        capture_function(function, inputs), ring, ulysses, training=training, rotate=rotate, costs=costs
    )


def compile_captured(
    captured: Captured,
    ring: int = 1,
    ulysses: int = 2,
    *,
    training: bool = False,
    rotate: str = "alltoall",
    costs: CostModel | None = None,
) -> Compiled:
    """The passes that follow the capture, for every rank of a mesh."""
    axes = find_axes(captured.module.graph)
    plan = make_plan(captured.module.graph, axes, ring, ulysses, costs)
    options = Options(rotate)
    views = meshes(ring, ulysses)
    programs = [rewrite(captured, plan, mesh, options, training) for mesh in views]
    return Compiled(captured, axes, plan, programs, [Stats() for _ in views])


def check(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    ring: int = 1,
    ulysses: int = 2,
    *,
    training: bool = False,
    rotate: str = "alltoall",
    loss: Callable[..., Tensor] | None = None,
    costs: CostModel | None = None,
) -> Compiled:
    """Compile a function for a mesh, run it on every rank, and compare with the function itself.

    Args:
        function: of full tensors; gives a tensor or several.
        inputs: its inputs; with ``training``, those that require a gradient get one.
        ring: ring degree.
        ulysses: ulysses degree.
        training: compare the gradient of every input too.
        rotate: how the ring moves keys and values.
        loss: a scalar of the outputs; a fixed weighted sum of them when not given.
        costs: what the plan goes by; the default model when not given.

    Raises:
        AssertionError: an output or gradient differs from that of one process, or between ranks by a bit.
    """
    compiled = compile_function(function, inputs, ring, ulysses, training=training, rotate=rotate, costs=costs)
    compare(compiled, function, inputs, training=training, loss=loss)
    return compiled


def compare(
    compiled: Compiled,
    function: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    training: bool = False,
    loss: Callable[..., Tensor] | None = None,
) -> None:
    """Run a compiled function on every rank, and compare with the function itself: see :func:`check`."""
    loss = loss or _weighted_sum

    def fresh() -> list[Any]:
        return [
            x.detach().clone().requires_grad_(training and x.requires_grad) if isinstance(x, Tensor) else x
            for x in inputs
        ]

    def results(out: Any, mine: list[Any]) -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = {f"output {i}": x for i, x in enumerate(out)}
        if training:
            loss(*out).backward()
            leaves = {i: x for i, x in enumerate(mine) if isinstance(x, Tensor)}
            found |= {f"gradient of input {i}": x.grad for i, x in leaves.items() if x.requires_grad}
        found |= {f"input {i} afterwards": x for i, x in enumerate(mine) if isinstance(x, Tensor)}
        return {k: v.detach() if isinstance(v, Tensor) else v for k, v in found.items()}

    mine = fresh()
    expected = results(graph_of(function, inputs)(*mine), mine)
    ranks = compiled.run(fresh, results)
    for rank, got in enumerate(ranks):
        for name, want in expected.items():
            assert_close(got[name], want, f"{name} on rank {rank}")
            assert _same(got[name], ranks[0][name]), f"{name} differs between rank 0 and rank {rank}"


def _weighted_sum(*outputs: Any) -> Tensor:
    """Each element with a weight of its own, so that no two of them can be mistaken for each other."""
    total = torch.zeros((), dtype=torch.float64)
    for x in outputs:
        if isinstance(x, Tensor) and x.requires_grad:
            real = torch.view_as_real(x) if x.is_complex() else x
            total = total + (real * torch.linspace(0.5, 1.5, real.numel(), dtype=real.dtype).view(real.shape)).sum()
    return total


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b) if a is not None else b is None
    return bool(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))) if a.is_floating_point() else torch.equal(a, b)


def assert_close(got: Any, want: Any, what: str) -> None:
    """Equal in shape and dtype, and in value within rounding of float64."""
    if not isinstance(want, Tensor):
        assert got is None if want is None else got == want, f"{what}: {got}, expected {want}"
        return
    assert isinstance(got, Tensor), f"{what}: {got}, expected a tensor"
    assert (got.shape, got.dtype) == (want.shape, want.dtype), (
        f"{what}: {got.dtype}{list(got.shape)}, expected {want.dtype}{list(want.shape)}"
    )
    eps = torch.finfo(want.dtype).eps if want.dtype.is_floating_point or want.dtype.is_complex else 0.0
    tolerance = max(TOLERANCE, 50 * eps) if eps else 0.0
    finite = want.abs()[want.isfinite()] if want.numel() and eps else want
    scale = max(1.0, float(finite.max())) if finite.numel() and eps else 1.0
    torch.testing.assert_close(
        got, want, rtol=0.0, atol=tolerance * scale, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def count(graph: fx.Graph, *names: str) -> int:
    """How many nodes of a local program call one of our ops."""
    targets = {getattr(_OURS, name).default for name in names}
    return sum(node.target in targets for node in graph.nodes)


# Single ops


@dataclass(frozen=True)
class Call:
    """One call of an op on real tensors."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Tensor:
        return self.target(*self.args, **self.kwargs)

    def __str__(self) -> str:
        show = pytree.tree_map(
            lambda x: f"{x.dtype}{list(x.shape)}" if isinstance(x, Tensor) else x, (self.args, self.kwargs)
        )
        return f"{self.target}{show}"


@dataclass(frozen=True)
class Traced:
    """The graph ``inputs -> op -> output`` of one call, as the capture would give it."""

    call: Call
    captured: Captured
    node: fx.Node
    tensors: list[Tensor]

    @classmethod
    def of(cls, call: Call) -> Traced:
        graph = fx.Graph()
        nodes: dict[int, fx.Node] = {}
        tensors: list[Tensor] = []

        def placeholder(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if id(x) not in nodes:
                nodes[id(x)] = graph.placeholder(f"x{len(tensors)}")
                nodes[id(x)].meta["val"] = mode.from_tensor(x)
                tensors.append(x)
            return nodes[id(x)]

        with FakeTensorMode() as mode:
            args, kwargs = pytree.tree_map(placeholder, (call.args, call.kwargs))
            node = graph.call_function(call.target, args, kwargs)
            fake = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
            node.meta["val"] = call.target(*fake[0], **fake[1])
        graph.output((node,))
        module = fx.GraphModule({}, graph)
        captured = Captured(module, prefix=(), written=(), dynamo=module, trained=(False,) * len(tensors))
        return cls(call, captured, node, tensors)

    def modes(self, value: fx.Node, at: Position, lengths: Sequence[int]) -> tuple[Axes, list[Mode]]:
        """The ways in which the op can run if an axis of segments of these lengths lies there."""
        word = tuple(Segment(n) for n in lengths)
        axes = find_axes(self.captured.module.graph, [(value, at, word)])
        return axes, modes_of(axes, self.node)


def rows_of(lengths: Sequence[int], rank: int, degree: int) -> list[int]:
    """The rows that a rank holds by definition: of each segment an equal chunk, the last row repeated where it ends."""
    rows: list[int] = []
    start = 0
    for n in lengths:
        chunk = -(-n // degree)
        rows += [start + min(rank * chunk + i, n - 1) for i in range(chunk)]
        start += n
    return rows


def check_mode(traced: Traced, axes: Axes, mode: Mode, ring: int, ulysses: int, *, values: bool = True) -> None:
    """Run one op in one of its modes on every rank, and compare with the op on whole tensors.

    If its output is sharded, a rank's value must be its rows of the whole one, padding included. ``values=False``
    compares shapes only.
    """
    want = traced.call()
    plan = Plan({traced.node: mode}, frozenset(), axes, axis_groups(axes), frozenset(), ring, ulysses)
    programs = []
    for mesh in meshes(ring, ulysses):
        program = rewrite(traced.captured, plan, mesh).module
        (output,) = program.graph.find_nodes(op="output")
        (whole,) = output.args[0]
        output.args = ((whole, whole.args[0] if whole.target is _OURS.gather.default else whole),)
        program.recompile()
        programs.append(program)
    lengths = [int(s.length) for s in mode.word]
    outs = emulate(ring, ulysses, lambda mesh: programs[mesh.rank](*traced.tensors))
    for rank, (whole, local) in enumerate(outs):
        what = f"{traced.call} in {mode} on rank {rank}"
        at, mine = mode.out, want
        if at is not None:
            rows = torch.tensor(rows_of(lengths, rank, ring * ulysses))
            mine = want.unflatten(at.dim, (int(at.outer), sum(lengths), int(at.inner)))
            mine = mine.index_select(at.dim + 1, rows).flatten(at.dim, at.dim + 2)
        if values:
            assert_close(whole, want, what)
            assert_close(local, mine, f"{what}, its own rows")
        else:
            assert (whole.shape, local.shape) == (want.shape, mine.shape), what
