"""The zoo: every public class has a case, the data says what it builds, and every case runs alone, in eager."""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from typing import Any

import pytest
import torch

from cp_compile.zoo import UNAVAILABLE, Case, case, case_names

# One of each kind of forward pass, each well under a second.
FEW = [
    "CogVideoXTransformer3DModel-rotary",
    "FluxTransformer2DModel-controlnet",
    "MiniMaxMusic3RVQDepthDecoder",
    "QwenImageTransformer2DModel-mask",
    "StableAudio3DiTModel",
    "WanAnimate2Transformer3DModel",
    "ZImageTransformer2DModel-pair",
]

each_case = partial(pytest.mark.parametrize, "name")


def exported() -> set[str]:
    """Names of the transformer classes that the installed ``diffusers`` exports."""
    module = importlib.import_module("diffusers.models.transformers")
    return {n for n, c in inspect.getmembers(module, inspect.isclass) if issubclass(c, torch.nn.Module)}


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in a model's output, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [t for v in values for t in tensors(v)]


def check(spec: dict[str, Any], value: Any, dtype: torch.dtype, where: str) -> None:
    """Assert that ``value`` is what ``spec`` describes, down to the shape and dtype of every tensor."""
    (kind,) = spec.keys() - {"dtype", "values", "init"}
    if kind == "tensor":
        stated = getattr(torch, spec["dtype"])
        expected = (tuple(spec["tensor"]), dtype if stated == torch.float32 else stated)
        assert (tuple(value.shape), value.dtype) == expected, where
    elif kind == "object":
        assert f"{type(value).__module__}.{type(value).__name__}" == spec["object"], where
    elif kind == "value":
        assert type(value) is type(spec["value"]) and value == spec["value"], where
    else:
        assert type(value).__name__ == kind and len(value) == len(spec[kind]), where
        parts = zip(spec[kind].values(), value.values()) if kind == "dict" else zip(spec[kind], value)
        for i, (s, v) in enumerate(parts):
            check(s, v, dtype, f"{where}[{i}]")


def runs(name: str) -> None:
    """Build the case and run it twice: finite, equal both times, and not a constant."""
    this = case(name)
    if reason := UNAVAILABLE.get(this.cls):
        pytest.importorskip(reason.split(":")[0], reason=reason)
    model = this.model()
    with torch.no_grad():
        first, second = (tensors(model(**this.kwargs())) for _ in range(2))
    assert first and len(first) == len(second)
    for a, b in zip(first, second):
        assert a.isfinite().all()
        assert a.float().std() > 1e-3
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.fast
def test_every_class_has_a_case() -> None:
    """Fails when ``diffusers`` adds a class, or a case names one that is gone."""
    described = {case(n).cls for n in case_names()}
    assert exported() - described - UNAVAILABLE.keys() == set()
    assert described - exported() == set()
    assert UNAVAILABLE.keys() <= exported() and all(UNAVAILABLE.values())


@pytest.mark.fast
def test_names() -> None:
    """A case is called like its class, with the branch after a hyphen, and an unknown name suggests near ones."""
    for n in case_names():
        assert n.partition("-")[0] == case(n).cls
    with pytest.raises(KeyError, match="FluxTransformer2DModel"):
        case("FluxTransformer")


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_case(case_names())
def test_inputs_have_the_stated_shapes(name: str, dtype: torch.dtype) -> None:
    """The data and what the loader makes of it agree, and ``forward`` takes every input by its name."""
    this = case(name)
    kwargs = this.kwargs(dtype=dtype)
    assert kwargs.pop("return_dict", False) is False
    check({"dict": this.inputs}, kwargs, dtype, name)
    module = importlib.import_module("diffusers.models.transformers")
    assert kwargs.keys() <= inspect.signature(getattr(module, this.cls).forward).parameters.keys()


@pytest.mark.fast
@each_case(["FluxTransformer2DModel-guidance", "BriaFibo2Transformer2DModel-context", "ZImageTransformer2DModel-pair"])
def test_seeds(name: str) -> None:
    """A seed fixes every number of the inputs and parameters; another seed gives others."""
    this = case(name)
    for a, b in zip(tensors(this.kwargs(seed=1)), tensors(this.kwargs(seed=1))):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert not torch.equal(tensors(this.kwargs(seed=1))[0], tensors(this.kwargs(seed=2))[0])
    state, again, other = (this.model(seed=s).state_dict() for s in (1, 1, 2))
    parameters = dict(this.model().named_parameters())
    assert all(torch.equal(state[k], again[k]) and not torch.equal(state[k], other[k]) for k in parameters)


@pytest.mark.fast
def test_only_objects_of_diffusers() -> None:
    """The data cannot name an arbitrary callable."""
    bad = Case("bad", "FluxTransformer2DModel", {}, {"x": {"object": "os.system", "init": {"command": {"value": ""}}}})
    with pytest.raises(ValueError, match="diffusers only"):
        bad.kwargs()


@pytest.mark.fast
@each_case(FEW)
def test_runs(name: str) -> None:
    """A handful of the cases in eager."""
    runs(name)


@pytest.mark.sweep
@each_case(case_names())
def test_all_run(name: str) -> None:
    """All cases in eager."""
    runs(name)
