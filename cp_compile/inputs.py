"""What a rank was given: compared with the other ranks', or replaced by the first one's.

Inputs that differ between ranks, for want of a seed say, give a wrong answer and no error: every rank computes its rows
of another picture. The checksums of a graph's inputs are compared when it is compiled; on each call only on request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from .checksum import checksums
from .collectives import gather_blocks, wait
from .errors import InputError, ScheduleError
from .mesh import Mesh
from .passes.capture import Captured
from .rendezvous import Rendezvous, listed

__all__ = ["Given", "compare_always", "compare_sizes", "describe_difference", "given", "sync"]

Call = Callable[..., Any]


@dataclass(frozen=True)
class Given:
    """The inputs of one graph, by their index among its arguments.

    Attributes:
        names: of each, as a person would say it: ``hidden_states``, ``blocks.0.proj.weight``.
        weights: those that belong to the model: parameters and buffers.
        tensors: those that have a checksum.
        floating: tensors that :func:`sync` may replace: of floating numbers, not the model's, not written to.
        sizes: sizes that vary, which the graph takes as numbers.
    """

    names: tuple[str, ...]
    weights: frozenset[int]
    tensors: tuple[int, ...]
    floating: tuple[int, ...]
    sizes: tuple[int, ...]

    def values(self, inputs: Sequence[Any], synced: bool) -> dict[str, int]:
        """The checksum of each tensor by what it is: ``input hidden_states`` or ``weight blocks.0.proj.weight``.

        Args:
            inputs: of the graph.
            synced: leave those out that will be replaced.
        """
        at = [i for i in self.tensors if not (synced and i in self.floating)]
        sums = checksums([inputs[i] for i in at], _device([inputs[i] for i in at])).tolist()
        return {self.label(i): value for i, value in zip(at, sums)}

    def label(self, index: int) -> str:
        """What the input is and its name."""
        return f"{'weight' if index in self.weights else 'input'} {self.names[index]}"


def given(captured: Captured, inputs: Sequence[Any]) -> Given:
    """Name and sort the inputs of a graph.

    Args:
        captured: the graph.
        inputs: what Dynamo passes to it.
    """
    targets = captured.placeholders[len(captured.prefix) :]
    weights, tensors, floating, sizes = set(), [], [], []
    for i, (node, target, x) in enumerate(zip(captured.sources, targets, inputs, strict=True)):
        if isinstance(x, torch.SymInt):
            sizes.append(i)
        if isinstance(x, nn.Parameter) or "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {}):
            weights.add(i)
        if type(x) in (Tensor, nn.Parameter, nn.Buffer) and x.layout == torch.strided:
            tensors.append(i)
            if i not in weights and target.name not in captured.written and (x.is_floating_point() or x.is_complex()):
                floating.append(i)
    names = tuple(_name(node) for node in captured.sources)
    return Given(names, frozenset(weights), tuple(tensors), tuple(floating), tuple(sizes))


def describe_difference(differing: Mapping[str, Sequence[int]], against: int) -> str:
    """An error's text.

    Args:
        differing: the ranks on which an input differs, by :meth:`Given.label`.
        against: the rank that they were compared with.
    """
    shown = [f"  {label}: {listed(ranks)} and rank {against} differ" for label, ranks in list(differing.items())[:8]]
    if len(differing) > 8:
        shown.append(f"  and {len(differing) - 8} more")
    weights = [label for label in differing if label.startswith("weight ")]
    advice = []
    if weights:
        advice.append("Load the same checkpoint on every rank, or seed all ranks alike before the model is made.")
    if len(weights) < len(differing):
        advice.append(
            "Every rank must pass the same inputs: seed the generator alike on all ranks, as in "
            "torch.Generator(device).manual_seed(0), or let the backend pass on the first rank's floating inputs with "
            "sync_inputs=True."
        )
    what = "weights" if len(weights) == len(differing) else "inputs"
    return "\n".join(
        [
            f"cp_compile: {what} that must be equal on all ranks are not:",
            *shown,
            *advice,
            "check_inputs='off' leaves this check out; then ranks with other values compute parts of other answers.",
        ]
    )


def compare_always(call: Call, of: Given, synced: bool, mesh: Mesh) -> Call:
    """``call``, which compares the inputs with those of all ranks first. It waits for the device each time."""
    at = [i for i in of.tensors if not (synced and i in of.floating)]

    def run(*args: Any) -> Any:
        tensors = [args[i] for i in at]
        device = _device(tensors)
        table = gather_blocks(
            torch.cat([checksums(tensors, device), torch.tensor([args[i] for i in of.sizes], device=device).long()]),
            mesh.group,
            mesh.degree,
        )
        if bool((table != table[:1]).any()):
            labels = [of.label(i) for i in (*at, *of.sizes)]
            differing: dict[str, Sequence[int]] = {}
            for label, column in zip(labels, (table != table[:1]).T.tolist()):
                if any(column):
                    differing[label] = [rank for rank, differs in zip(mesh.ranks, column) if differs]
            raise InputError(describe_difference(differing, mesh.ranks[0]))
        return call(*args)

    return run


def compare_sizes(call: Call, of: Given, rendezvous: Rendezvous) -> Call:
    """``call``, before which the ranks meet whenever a size is new: with other sizes they would break a collective."""
    sizes = itemgetter(*of.sizes)
    known: set[Any] = set()
    names = [of.names[i] for i in of.sizes]

    def judge(said: dict[int, str]) -> str:
        alike: dict[str, list[int]] = {}
        for rank, text in said.items():
            alike.setdefault(text, []).append(rank)
        if len(alike) > 1:
            raise ScheduleError(
                f"cp_compile: the ranks were given inputs of different sizes; {', '.join(names)}: "
                + "; ".join(f"{text} on {listed(ranks)}" for text, ranks in alike.items())
                + ". Give all ranks the same inputs."
            )
        return ""

    def run(*args: Any) -> Any:
        new = sizes(args)
        if new not in known:
            rendezvous.meet("run inputs of a new size", str(new), judge)
            known.add(new)
        return call(*args)

    return run


def sync(call: Call, of: Given, mesh: Mesh) -> Call:
    """``call``, with the first rank's floating inputs in place of this rank's.

    The gradient of an input goes to this rank's own.
    """
    at = of.floating

    def run(*args: Any) -> Any:
        replaced = list(args)
        for i in at:
            replaced[i] = _FromFirst.apply(args[i], mesh.group)
        return call(*replaced)

    return run


class _FromFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return wait(torch.ops._c10d_functional.broadcast(x.contiguous(), 0, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


def _device(tensors: Sequence[Tensor]) -> torch.device:
    """The accelerator that the inputs are on, if there is one."""
    return next((x.device for x in tensors if x.device.type != "cpu"), torch.device("cpu"))


def _name(node: fx.Node) -> str:
    """Dynamo writes ``L['self']._modules['proj']._parameters['weight']`` for ``proj.weight``."""
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return node.name
    name = re.sub(r"\._(modules|parameters|buffers)(?=\[)", "", cast(str, source.name))
    name = re.sub(r"\['([^']*)'\]", r".\1", name)
    return name.removeprefix("L.").removeprefix("self.")
