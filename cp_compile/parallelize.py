"""One line for a pipeline: its denoisers run in parallel, in place, and stay what they are.

A module's call is replaced the way ``torch.nn.Module.compile`` does it, in one attribute that torch leaves out of
copies and pickles. Class, parameters, hooks and ``state_dict`` are untouched, so whatever a pipeline does with its
components goes on working.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from .backend import CPBackend, cp_backend
from .errors import CPError
from .groups import check_ranks
from .integrations.diffusers import backend_arguments, check_free, denoisers, modules_of
from .report import Report

__all__ = ["from_pretrained", "parallelize", "report_of", "unparallelize"]

log = logging.getLogger("cp_compile")

T = TypeVar("T")


@dataclass(frozen=True)
class _ParallelCall:
    """What stands for a module's call: the compiled one, which remembers its backend."""

    compiled: Callable[..., Any]
    backend: CPBackend

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)


def parallelize(
    target: T,
    ulysses: int | None = None,
    ring: int | None = None,
    *,
    config: Any = None,
    components: Sequence[str] | None = None,
    dynamic: bool | None = None,
    **options: Any,
) -> T:
    """Runs a pipeline, or one model, with context parallelism from its next call on.

    ::

        pipeline = cp_compile.parallelize(FluxPipeline.from_pretrained(path), ulysses=2)

    Every rank calls the pipeline with the same arguments (a generator seeded alike among them) and gets the same
    images. Compiling happens at the first call. The components compiled by one call share one backend, so that two of
    the same structure, as the two transformers of Wan 2.2, are compiled once.

    Args:
        target: a diffusers pipeline, or any module. It is changed in place.
        ulysses: degree, as of :func:`~cp_compile.cp_backend`; 1 if left out.
        ring: degree, as of :func:`~cp_compile.cp_backend`; 1 if left out.
        config: a ``ContextParallelConfig`` of diffusers in place of ``ulysses``, ``ring``, ``mesh`` and
            ``convert_to_fp32``. ``rotate`` may stand beside it, and wins.
        components: names of the pipeline's components to run in parallel; those that take a timestep if left out.
        dynamic: as of ``torch.compile``. True compiles for all sizes at once, None at the second size.
        options: the other arguments of :func:`~cp_compile.cp_backend`: ``mesh``, ``rotate``, ``inner``, ...

    Returns:
        ``target`` itself.

    Raises:
        TypeError: ``target`` is neither a module nor a pipeline, or an option is unknown.
        ValueError: arguments that make no sense, or components that are not there.
        MeshError: there is no process group, or the degrees do not fit it.
        CPError: a component is compiled or parallel already. In every case nothing has been changed.
    """
    chosen = denoisers(target, components)
    for name, module in chosen.items():
        if _call_of(module) is not None:
            raise CPError(f"cp_compile: {name} is parallel already. Call cp_compile.unparallelize(...) on it first.")
        check_free(name, module)
    backend = _backend(ulysses, ring, config, options)
    for module in {id(m): m for m in chosen.values()}.values():
        module.compile(backend=backend, dynamic=dynamic)
        module._compiled_call_impl = _ParallelCall(module._compiled_call_impl, backend)  # type: ignore[arg-type]
    left = [name for name in modules_of(target) if name not in chosen]
    log.info("cp: parallelized %s; left as they are: %s", ", ".join(chosen), ", ".join(left) or "none")
    return target


def unparallelize(target: T) -> T:
    """Undoes :func:`parallelize`: the modules of ``target`` run on one process again, from the next call on.

    Returns:
        ``target`` itself. One that is not parallel is returned as it is.

    Raises:
        TypeError: neither a module nor a pipeline.
    """
    for module in modules_of(target).values():
        if _call_of(module) is not None:
            module._compiled_call_impl = None
    return target


def report_of(target: Any) -> Report:
    """What was compiled so far for a pipeline or model given to :func:`parallelize`.

    Raises:
        TypeError: neither a module nor a pipeline.
        ValueError: nothing in it is parallel, or its parts are by several calls, each of which has its own report.
    """
    calls = {name: call for name, module in modules_of(target).items() if (call := _call_of(module)) is not None}
    backends = {id(call.backend): call.backend for call in calls.values()}
    if not backends:
        raise ValueError(f"cp_compile: nothing in this {type(target).__name__} is parallel; call parallelize first")
    if len(backends) > 1:
        raise ValueError(
            f"cp_compile: {', '.join(calls)} were parallelized by {len(backends)} calls, each with its own report. "
            "Ask for one: report_of(pipeline.transformer)."
        )
    return next(iter(backends.values())).report


def from_pretrained(cls: Any, path: Any, *, parallel: Any, **kwargs: Any) -> Any:
    """``cls.from_pretrained(path, **kwargs)``, and then :func:`parallelize`.

    The degrees are checked against the ranks before anything is read.

    Args:
        cls: a model or pipeline class of diffusers, ``AutoModel`` among them.
        path: as of its ``from_pretrained``.
        parallel: arguments of :func:`parallelize` by name, as in ``{"ulysses": 2}``, or a ``ContextParallelConfig``.
        kwargs: for its ``from_pretrained``.

    Returns:
        What ``cls.from_pretrained`` returns, parallelized.

    Raises:
        As :func:`parallelize` and ``cls.from_pretrained`` do.
    """
    if kwargs.get("parallel_config") is not None:
        raise CPError(
            "cp_compile: from_pretrained got parallel_config= beside parallel=; with both the inputs would be cut "
            "twice. Give the configuration as parallel=."
        )
    arguments = dict(parallel) if isinstance(parallel, Mapping) else {"config": parallel}
    options = {k: v for k, v in arguments.items() if k not in ("ulysses", "ring", "config", "components", "dynamic")}
    _backend(arguments.get("ulysses"), arguments.get("ring"), arguments.get("config"), options)
    return parallelize(cls.from_pretrained(path, **kwargs), **arguments)


def _backend(ulysses: int | None, ring: int | None, config: Any, options: dict[str, Any]) -> CPBackend:
    """A backend that fits the ranks at hand."""
    if config is None:
        arguments = {"ulysses": 1 if ulysses is None else ulysses, "ring": 1 if ring is None else ring, **options}
    else:
        given = {"ulysses": ulysses, "ring": ring, **options}
        arguments = backend_arguments(config, given.pop("rotate", None))
        twice = [name for name, value in given.items() if value is not None and name in arguments]
        if twice:
            raise ValueError(
                f"cp_compile: {', '.join(f'{name}={given[name]!r}' for name in twice)} beside config, which has "
                f"{', '.join(f'{name}={arguments[name]!r}' for name in twice)}. Say it once."
            )
        arguments |= {name: value for name, value in given.items() if name not in arguments}
    backend = cp_backend(**arguments)
    check_ranks(backend.ring, backend.ulysses, backend.device_mesh)
    return backend


def _call_of(module: nn.Module) -> _ParallelCall | None:
    call = module._compiled_call_impl
    return call if isinstance(call, _ParallelCall) else None
