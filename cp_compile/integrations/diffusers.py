"""What we know of diffusers: its pipelines, its models and its configuration of context parallelism.

Everything is told by what an object offers, never by its class, so diffusers is not imported here: a pipeline is what
has ``components``, a denoiser is what takes the time of the noise, and a configuration is what has the fields.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..errors import CPError

__all__ = ["backend_arguments", "check_free", "denoisers", "modules_of"]

# Names of the parameter that tells a denoiser how noisy its input is, such as timestep, timestep_ratio, t, ca_time.
_TIME = re.compile(r"timestep|(^|_)(t|time)$")


def modules_of(target: Any) -> dict[str, nn.Module]:
    """The modules of a pipeline by component name, or the one module under the name of its class.

    Raises:
        TypeError: neither a module nor a pipeline.
    """
    if isinstance(target, nn.Module):
        return {type(target).__name__: target}
    components = getattr(target, "components", None)
    if not isinstance(components, Mapping):
        raise TypeError(
            f"cp_compile: expected a module or a pipeline (an object with `components`), got {type(target).__name__}"
        )
    return {name: part for name, part in components.items() if isinstance(part, nn.Module)}


def denoisers(target: Any, names: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The modules to run in parallel: those named, or those that the denoising loop calls.

    The loop calls what takes the time of the noise: transformers, UNets, priors and ControlNets. Text and image
    encoders, autoencoders, adapters and upsamplers do not. A module that is no pipeline is taken as it is.

    Raises:
        ValueError: no component takes a time, a name is unknown, or the pipeline does not call the component itself.
        TypeError: neither a module nor a pipeline.
    """
    modules = modules_of(target)
    if isinstance(target, nn.Module):
        if names is not None:
            raise ValueError(
                f"cp_compile: components={names!r} are for a pipeline; {type(target).__name__} is a module"
            )
        return modules
    there = f"The pipeline's modules: {', '.join(modules) or 'none'}."
    if names is None:
        chosen = {name: module for name, module in modules.items() if _takes_time(module)}
        if not chosen:
            raise ValueError(
                f"cp_compile: no component of {type(target).__name__} takes a timestep, so it is not known which are "
                f"called in the denoising loop. Name them: components=[...]. {there}"
            )
        return chosen
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if name not in modules:
            raise ValueError(f"cp_compile: components={names!r}: {type(target).__name__} has no {name!r}. {there}")
        if hasattr(modules[name], "decode"):
            raise ValueError(
                f"cp_compile: components={names!r}: pipelines call {name}.decode() and not {name}() itself, so that it "
                f"would stay as it is. Use torch.compile({name}.decode, backend=cp_backend(...)) for it."
            )
    return {name: modules[name] for name in names}


def check_free(name: str, module: nn.Module) -> None:
    """Refuses a module that somebody else has compiled or made parallel.

    Raises:
        CPError: so it is; the message says how to get back.
    """
    for path, part in module.named_modules(prefix=name):
        if getattr(part, "_parallel_config", None) is not None:
            raise CPError(
                f"cp_compile: {path} is parallel already, by enable_parallelism() or parallel_config=...: "
                "its inputs would be cut twice. Load it without, and leave that call out."
            )
        if part._compiled_call_impl is not None or "_orig_mod" in part._modules:
            raise CPError(
                f"cp_compile: {path} is compiled already, by torch.compile, .compile() or compile_repeated_blocks(). "
                "Leave that call out: parallelize compiles the whole module, with Inductor unless told otherwise."
            )


def backend_arguments(config: Any, rotate: str | None) -> dict[str, Any]:
    """Arguments of ``cp_backend`` that say what a ``ContextParallelConfig`` says.

    Args:
        config: a ``ContextParallelConfig`` of diffusers, or a ``ParallelConfig`` around one.
        rotate: in place of the configuration's ``rotate_method``, whose class allows only ``allgather``.

    Raises:
        TypeError: another kind of object.
        ValueError: the configuration asks for tensor parallelism.
    """
    if getattr(config, "tensor_parallel_config", None) is not None or hasattr(config, "tp_degree"):
        raise ValueError(
            "cp_compile: config asks for tensor parallelism, which is not ours. Give a ContextParallelConfig."
        )
    config = getattr(config, "context_parallel_config", config)
    fields = ("ulysses_degree", "ring_degree", "convert_to_fp32", "rotate_method", "mesh")
    missing = [field for field in fields if not hasattr(config, field)]
    if missing:
        raise TypeError(
            f"cp_compile: config is a {type(config).__name__} without {', '.join(missing)}; expected a "
            "ContextParallelConfig of diffusers"
        )
    # `ulysses_anything` and `ring_anything` ask for lengths and heads of any size: always so here.
    return {
        "ulysses": config.ulysses_degree,
        "ring": config.ring_degree,
        "convert_to_fp32": config.convert_to_fp32,
        "rotate": rotate or config.rotate_method,
        "mesh": config.mesh,
    }


def _takes_time(module: nn.Module) -> bool:
    return any(_TIME.search(name) for name in inspect.signature(module.forward).parameters)
