"""Tiny instances of public transformer classes, as plain data.

``cases.json`` and ``more_cases.json`` hold, for each case, a class of ``diffusers``, its constructor arguments and its
inputs. Nothing in them is code: the loader here turns a description into a module and a dictionary of tensors. The
demo, the ``explain`` command and the tests all read the same files. The second file adds the classes that the first
one lacks and optional branches of the larger models, named ``Class-branch``.

A leaf of the data is one of ``{"value": x}``, ``{"list": [...]}``, ``{"tuple": [...]}``, ``{"dict": {...}}``,
``{"tensor": shape, "dtype": name}``, the last with ``"values"`` where the numbers matter (indices, timesteps), or
``{"object": path, "init": {...}}`` for the few inputs that ``diffusers`` wants as an object of its own (a cache).
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from functools import cache
from importlib import import_module, resources
from typing import Any

import torch

__all__ = ["UNAVAILABLE", "Case", "case", "case_names", "randomise"]

# Classes that run only where a package is installed that this project does not ask for, with the reason. Their cases
# are data like all others, and are tried where the package is there.
UNAVAILABLE: dict[str, str] = {
    "CosmosTransformer3DModel": "torchvision: the class resizes its padding mask with torchvision.transforms",
}


@dataclass(frozen=True)
class Case:
    """One model and its inputs.

    Attributes:
        name: what the case is called on the command line and in the docs.
        cls: name of a class exported by ``diffusers.models.transformers``.
        init: description of the constructor's keyword arguments.
        inputs: description of ``forward``'s keyword arguments.
    """

    name: str
    cls: str
    init: dict[str, Any]
    inputs: dict[str, Any]

    def model(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
        """The module in evaluation mode on CPU, every parameter drawn at random from ``seed``.

        Raises:
            ImportError: ``diffusers`` is not installed, or cannot provide this class.
        """
        model = self._class()(**self.settings())
        randomise(model, seed)
        return (model if dtype == torch.float32 else model.to(dtype)).eval()

    def settings(self) -> dict[str, Any]:
        """Keyword arguments of the constructor."""
        return {k: _build(v, None) for k, v in self.init.items()}

    def kwargs(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """Fresh inputs for ``forward``; floating tensors have ``dtype``. The same seed gives the same numbers."""
        generator = torch.Generator().manual_seed(seed)
        values = {k: _build(v, generator, dtype) for k, v in self.inputs.items()}
        if "return_dict" in inspect.signature(self._class().forward).parameters:
            values["return_dict"] = False
        return values

    def _class(self) -> type[torch.nn.Module]:
        return getattr(import_module("diffusers.models.transformers"), self.cls)


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Draws every parameter from ``seed``.

    Constructors of diffusion transformers start several layers at zero, which would hide an error in all that feeds
    them, so no parameter keeps the value that its constructor gave it.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            fan_in = p[0].numel() if p.dim() > 1 else 1
            scale = fan_in**-0.5 if p.dim() > 1 else 0.2
            p.copy_(torch.randn(p.shape, generator=generator) * scale + (0.5 if p.dim() == 1 else 0.0))


def _build(spec: Any, generator: torch.Generator | None, dtype: torch.dtype = torch.float32) -> Any:
    if "value" in spec:
        return spec["value"]
    if "list" in spec:
        return [_build(s, generator, dtype) for s in spec["list"]]
    if "tuple" in spec:
        return tuple(_build(s, generator, dtype) for s in spec["tuple"])
    if "dict" in spec:
        return {_key(k): _build(s, generator, dtype) for k, s in spec["dict"].items()}
    if "object" in spec:
        module, _, name = spec["object"].rpartition(".")
        if not module.startswith("diffusers."):
            raise ValueError(f"the data may name objects of diffusers only, not {spec['object']!r}")
        return getattr(import_module(module), name)(**{k: _build(s, generator, dtype) for k, s in spec["init"].items()})
    kind = getattr(torch, spec["dtype"])
    if "values" in spec:
        tensor = torch.tensor(spec["values"], dtype=kind).reshape(spec["tensor"])
    else:
        tensor = torch.randn(spec["tensor"], generator=generator).to(kind)
    return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor


def _key(name: str) -> str | int:
    """JSON has text keys only; a key that is a number was one."""
    return int(name) if name.isdigit() else name


@cache
def _cases() -> dict[str, Case]:
    files = [resources.files(__package__).joinpath(name) for name in ("cases.json", "more_cases.json")]
    return {c["name"]: Case(**c) for file in files for c in json.loads(file.read_text(encoding="utf-8"))}


def case_names() -> list[str]:
    """Names of all cases, in the order of the files."""
    return list(_cases())


def case(name: str) -> Case:
    """The case called ``name``.

    Raises:
        KeyError: there is none; the message lists close names.
    """
    import difflib

    cases = _cases()
    if name not in cases:
        near = difflib.get_close_matches(name, cases, n=3, cutoff=0.3)
        raise KeyError(f"no case is called {name!r}; close names: {', '.join(near) or 'none'}")
    return cases[name]
