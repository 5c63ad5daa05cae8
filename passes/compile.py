"""The last step: each rank's program goes to Inductor, or to another compiler under AOTAutograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import fx

from . import _torch

__all__ = ["compile_graph"]


def compile_graph(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    inner: str | Callable[..., Any],
    options: dict[str, Any] | None,
) -> Callable[..., Any]:
    """Compile a graph for execution, forward and backward.

    Args:
        module: the graph. It may be changed.
        example_inputs: as Dynamo gave them.
        inner: ``"inductor"``, ``"aot_eager"`` or a compiler of ATen graphs.
        options: Inductor's configuration for this graph, its backward included.
    """
    if inner == "inductor":
        return cast(Callable[..., Any], _torch.compile_fx(module, example_inputs, config_patches=options))
    compiler = _run_as_it_is if inner == "aot_eager" else _boxed(inner)  # type: ignore[arg-type]
    return _torch.aot_autograd(fw_compiler=compiler, partition_fn=_torch.min_cut_rematerialization_partition)(
        module, example_inputs
    )


def _run_as_it_is(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    return _torch.make_boxed_func(gm.forward)


def _boxed(inner: Callable[..., Any]) -> Callable[..., Any]:
    def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled = inner(gm, example_inputs)
        return compiled if getattr(compiled, "_boxed_call", False) else _torch.make_boxed_func(compiled)

    return compiler
