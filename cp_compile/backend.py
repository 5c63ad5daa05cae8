"""The backend: what ``torch.compile(model, backend=cp_backend(...))`` calls with each graph."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from . import ops  # noqa: F401  (registers the ops)
from .accumulate import Accumulation, Partial
from .groups import RING, ULYSSES, build_mesh
from .inputs import compare_always, compare_sizes, given, sync
from .mesh import Mesh
from .passes import _torch
from .passes.axes import find_axes
from .passes.capture import Captured, capture
from .passes.compile import compile_graph
from .passes.explain import explain, explain_unchanged
from .passes.plan import Plan, make_plan
from .passes.provenance import where_of
from .passes.rewrite import Options, rewrite
from .passes.rules.attention import ATTENTION
from .passes.subclasses import has_subclasses, open_subclasses
from .passes.verify import Offer, describe, verify, verify_setup
from .rendezvous import Rendezvous, in_short
from .report import GraphReport, Report

__all__ = ["CPBackend", "cp_backend"]

log = logging.getLogger("cp_compile")

Inner = Literal["inductor", "aot_eager"] | Callable[..., Any]
CheckInputs = Literal["first", "always", "off"]


def cp_backend(
    ulysses: int = 1,
    ring: int = 1,
    *,
    mesh: DeviceMesh | None = None,
    rotate: Literal["alltoall", "allgather"] = "alltoall",
    convert_to_fp32: bool = True,
    inner: Inner = "inductor",
    options: dict[str, Any] | None = None,
    timeout: float = 60.0,
    check_inputs: CheckInputs = "first",
    sync_inputs: bool = False,
    fallback: Literal["error", "replicate"] = "error",
) -> CPBackend:
    """A torch.compile backend that runs any model with context parallelism.

    ::

        model = torch.compile(model, backend=cp_backend(ulysses=2, ring=2))

    Every rank passes the same full inputs and gets the same full outputs.

    Args:
        ulysses: ranks among which attention heads are exchanged. The innermost dim: neighbouring ranks.
        ring: ranks among which keys and values are passed around.
        mesh: the ranks to use, by mesh dims called ``ring`` and ``ulysses``, in this order; other dims are the user's.
            None for all ranks of the default process group.
        rotate: how the ring moves keys and values: ``alltoall``, one block a step, hidden behind the attention of
            the block before; ``allgather``, all of them at once.
        convert_to_fp32: merge the ring's partial results in fp32, else in the dtype of the model.
        inner: what compiles each rank's program: ``inductor``, ``aot_eager`` (for tests), or a function
            ``inner(gm, example_inputs)`` that is used as AOTAutograd's compiler.
        options: for the inner compiler: Inductor's configuration.
        timeout: seconds that a rank waits, while it compiles, for another that gives no sign of life before it raises.
            How long a collective may take is the process group's own timeout.
        check_inputs: when to compare each tensor that a graph takes, weights included, with the other ranks', by
            checksum: ``first``, when the graph is compiled; ``always``, on each call too, which waits for the device;
            ``off``, never.
        sync_inputs: on each call of a compiled graph, pass the first rank's floating inputs (not weights) on all ranks.
        fallback: when a graph cannot be compiled for the mesh: ``error``; or ``replicate``, every rank runs all of it,
            with a warning and a note in the report.

    Returns:
        The backend. Its ``report`` tells what was compiled. One backend may compile several models.

    Raises:
        ValueError: an argument makes no sense. Whether the degrees fit the ranks is known at the first compile only.
    """
    return CPBackend(
        ulysses,
        ring,
        mesh,
        rotate,
        convert_to_fp32,
        inner,
        options,
        timeout,
        check_inputs=check_inputs,
        sync_inputs=sync_inputs,
        fallback=fallback,
    )


@dataclass(frozen=True)
class _Program:
    """What one rank runs of a graph, and how it came to it."""

    captured: Captured
    plan: Plan
    module: fx.GraphModule
    report: GraphReport
    training: bool


class CPBackend:
    """See :func:`cp_backend`.

    Attributes:
        report: what was compiled so far.
    """

    def __init__(
        self,
        ulysses: int,
        ring: int,
        mesh: DeviceMesh | None,
        rotate: Literal["alltoall", "allgather"],
        convert_to_fp32: bool,
        inner: Inner,
        options: dict[str, Any] | None,
        timeout: float,
        *,
        check_inputs: CheckInputs = "first",
        sync_inputs: bool = False,
        fallback: Literal["error", "replicate"] = "error",
    ):
        for name, degree in ((ULYSSES, ulysses), (RING, ring)):
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ValueError(f"cp_compile: {name}={degree!r}; a degree is a whole number of ranks, at least 1")
        if ulysses == ring == 1:
            raise ValueError(
                "cp_compile: ulysses=1 and ring=1 leave nothing to do in parallel. Give a degree above 1, as in "
                "cp_backend(ulysses=2) on 2 ranks; for one process use torch.compile(model) as it is."
            )
        if rotate not in ("alltoall", "allgather"):
            raise ValueError(f"cp_compile: rotate={rotate!r}; expected 'alltoall' or 'allgather'")
        if not callable(inner) and inner not in ("inductor", "aot_eager"):
            raise ValueError(f"cp_compile: inner={inner!r}; expected 'inductor', 'aot_eager' or a function")
        if options and inner != "inductor":
            raise ValueError(f"cp_compile: options={options!r} are Inductor's, but inner={inner!r}")
        if check_inputs not in ("first", "always", "off"):
            raise ValueError(f"cp_compile: check_inputs={check_inputs!r}; expected 'first', 'always' or 'off'")
        if fallback not in ("error", "replicate"):
            raise ValueError(f"cp_compile: fallback={fallback!r}; expected 'error' or 'replicate'")
        if not timeout > 0:
            raise ValueError(f"cp_compile: timeout={timeout!r}; expected seconds, above 0")
        self.ulysses, self.ring = ulysses, ring
        self.device_mesh = mesh
        self.options = Options(rotate, convert_to_fp32)
        self.inner, self.inner_options = inner, options
        self.timeout = timeout
        self.check_inputs, self.sync_inputs, self.fallback = check_inputs, sync_inputs, fallback
        self.report = Report(ulysses, ring)
        self._accumulation = Accumulation()
        self._joined: tuple[Mesh, Rendezvous] | None = None
        self._frames: dict[Any, int] = {}

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile one graph of Dynamo's for this rank. All ranks must get here with the same graph.

        ``mode`` and ``options`` are those of ``torch.compile``, which hands them on.
        """
        if mode or options:
            return self._with_options(example_inputs, mode, options)(gm, example_inputs)
        if has_subclasses(example_inputs):
            opened = open_subclasses(gm, example_inputs)
            inner = self(opened.module, opened.example_inputs)
            return lambda *args: inner(*opened.unpack(args))
        number = self._number()
        mesh, rendezvous = self._join(example_inputs)
        with rendezvous.telling(f"while compiling graph {number}"):
            program: _Program | str | None
            try:
                with rendezvous.working():
                    program = self._program(gm, example_inputs, number, mesh)
            except Exception as error:
                if self.fallback == "error":
                    raise
                program = in_short(error)
            if program is None:
                return compile_graph(gm, example_inputs, self.inner, self.inner_options)
            rendezvous.get_in_step()
            with rendezvous.working():
                offer = self._offer(program, example_inputs)
            reason = verify(offer, rendezvous)
            if reason or isinstance(program, str):
                return self._replicate(gm, example_inputs, number, reason)
            self._keep(program.report)
            log.info(program.report.summary)
            compiled = self._finish(program.captured, program.module, example_inputs)
        if not program.training:
            return compiled
        partial = self._leaving_partial(program.captured, program.plan, mesh)
        return self._accumulation.choose(compiled, partial, mesh.group)

    def _program(self, gm: fx.GraphModule, example_inputs: Sequence[Any], number: int, mesh: Mesh) -> _Program | None:
        """This rank's program; none if there is no attention, which is noted."""
        start = time.perf_counter()
        captured = capture(gm, example_inputs)
        graph = captured.module.graph
        if not any(n.target is ATTENTION for n in graph.nodes):
            unchanged = explain_unchanged(captured, number)
            self._keep(unchanged)
            log.info(unchanged.summary)
            return None
        axes = find_axes(graph)
        plan = make_plan(graph, axes, self.ring, self.ulysses)
        training = torch.is_grad_enabled() and any(captured.trained)
        local = rewrite(captured, plan, mesh, self.options, training)
        seconds = time.perf_counter() - start
        report = explain(captured, plan, local, mesh, self.options, number, seconds)
        return _Program(captured, plan, local.module, report, training)

    def _offer(self, program: _Program | str, example_inputs: Sequence[Any]) -> Offer:
        """What the other ranks must know of a program, or of why there is none."""
        if isinstance(program, str):
            return Offer(unable=program)
        captured = program.captured
        lines = describe(program.module, [*captured.prefix, *example_inputs])
        if self.check_inputs == "off" or dist.get_backend() == "fake":
            return Offer(lines)
        return Offer(lines, given(captured, example_inputs).values(example_inputs, self.sync_inputs))

    def _replicate(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], number: int, reason: str
    ) -> Callable[..., Any]:
        note = f"cannot be compiled for the mesh, so every rank runs all of it: {reason}"
        warnings.warn(f"cp_compile: graph {number} {note}", stacklevel=2)
        self._note(number, gm, note)
        return compile_graph(gm, example_inputs, self.inner, self.inner_options)

    def _leaving_partial(self, captured: Captured, plan: Plan, mesh: Mesh) -> Callable[[], Partial]:
        """How to compile the same program with the gradients of its parameters left partial, when that is needed."""
        # That is after Dynamo is done, which then has forgotten the graph's inputs.
        context = _torch.TracingContext.try_get()
        inputs = [node.meta["example_value"] for node in captured.sources]
        parameters = [n for n, x in zip(captured.own_placeholders, inputs) if isinstance(x, torch.nn.Parameter)]

        def build() -> Partial:
            _, rendezvous = self._join(inputs)
            with rendezvous.telling("while compiling a graph for no_sync"), _torch.tracing(context):
                local = rewrite(captured, plan, mesh, self.options, True, leave_partial=parameters)
                verify(Offer(describe(local.module, [*captured.prefix, *inputs])), rendezvous)
                compiled = self._finish(captured, local.module, inputs)
            return compiled, [captured.own_placeholders.index(n) for n in local.left_partial]

        return build

    def no_sync(self) -> AbstractContextManager[None]:
        """For gradient accumulation: calls under it leave the gradients of parameters to a later backward to sum.

        ::

            with backend.no_sync():
                for batch in batches[:-1]:
                    loss(model(batch)).backward()
            loss(model(batches[-1])).backward()  # sums the gradients of all batches over the ranks, once

        As with ``no_sync`` of DistributedDataParallel the *forward* call counts. Until the last backward the gradients
        of these parameters wait in the backend, ``p.grad`` does not hold them. The first use compiles each graph again.
        """
        return self._accumulation.no_sync()

    def drop_gradients(self) -> None:
        """Forget the gradients that wait since :meth:`no_sync`, where a loop skips the step they were for."""
        self._accumulation.drop()

    def _with_options(
        self, example_inputs: Sequence[Any], mode: str | None, options: dict[str, Any] | None
    ) -> CPBackend:
        """This backend with what the user gave to ``torch.compile`` beside it, which wins over the backend's own."""
        given = f"mode={mode!r}" if mode else f"options={options!r}"
        if self.inner != "inductor":
            raise ValueError(
                f"cp_compile: torch.compile({given}) is Inductor's, but inner={self.inner!r}; leave it out, or use "
                "inner='inductor'"
            )
        modes = _torch.list_mode_options()
        if mode and mode not in modes:
            raise ValueError(f"cp_compile: torch.compile({given}); expected one of {', '.join(map(repr, modes))}")
        self._join(example_inputs)  # made once, for the copy too
        chosen = copy(self)
        own, theirs = self.inner_options or {}, options or {}
        named = {name.replace("-", "_"): value for name, value in theirs.items()}  # as torch.compile reads them
        chosen.inner_options = {**modes.get(mode or "", {}), **own, **named}
        return chosen

    def _finish(self, captured: Captured, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        mesh, rendezvous = self._join(example_inputs)
        with rendezvous.working():
            captured.carry_metadata(module)
            compiled = compile_graph(module, [*captured.prefix, *example_inputs], self.inner, self.inner_options)
        rendezvous.meet("finish compiling", "", lambda said: "")
        call = compiled if not captured.prefix else lambda *args: compiled(*captured.prefix, *args)
        inputs = given(captured, example_inputs)
        if self.sync_inputs:
            call = sync(call, inputs, mesh)
        if self.check_inputs == "always":
            call = compare_always(call, inputs, self.sync_inputs, mesh)
        if inputs.sizes:
            call = compare_sizes(call, inputs, rendezvous)
        return rendezvous.guard(call, "while running a compiled graph")

    def _join(self, example_inputs: Sequence[Any]) -> tuple[Mesh, Rendezvous]:
        """The other ranks. The first time, all must be there and set up alike before a process group is made."""
        if self._joined is None:
            device = next((x.device.type for x in example_inputs if isinstance(x, torch.Tensor)), "cpu")
            rendezvous = None
            if self.device_mesh is None and dist.is_initialized():
                rendezvous = self._meet_first(range(dist.get_world_size()))
            mesh = build_mesh(self.ring, self.ulysses, self.device_mesh, device)
            self._joined = mesh, rendezvous or self._meet_first(mesh.ranks)
        return self._joined

    def _meet_first(self, ranks: Sequence[int]) -> Rendezvous:
        rendezvous = Rendezvous(ranks, dist.get_rank(), self.timeout)
        names = (
            "ulysses", "ring", "options", "inner", "inner_options", "check_inputs", "sync_inputs", "fallback",
        )  # fmt: skip
        verify_setup({name: getattr(self, name) for name in names}, rendezvous)
        return rendezvous

    def _number(self) -> int:
        """Which graph this is. Dynamo may start a frame anew and hand over the same graph again."""
        frame = _torch.CompileContext.current_compile_id()
        if frame is None:
            return len(self.report.graphs)
        return self._frames.setdefault(frame, len(self.report.graphs))

    def _keep(self, graph: GraphReport) -> None:
        self.report.graphs[graph.number : graph.number + 1] = [graph]

    def _note(self, number: int, gm: fx.GraphModule, note: str) -> None:
        where = next((w for n in gm.graph.nodes if n.op == "call_function" and (w := where_of(n))), "")
        self._keep(GraphReport(number, note, where=where))
        log.info("cp: %s", note)
