"""How the passes' own work grows with a model's depth: counted in lines run, which a busy machine does not change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cp_compile.passes
from cp_compile.mesh import Mesh
from cp_compile.passes.axes import find_axes
from cp_compile.passes.plan import make_plan
from cp_compile.passes.rewrite import rewrite
from tests.passes.harness import attention_over, capture_function, tensor

pytestmark = pytest.mark.fast

_OURS = (next(iter(cp_compile.passes.__path__)), "networkx")


def _blocks(depth: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Text and image in one attention, apart in their projections, and scaled by one vector for all tokens."""

    def run(image: Tensor, text: Tensor, weight: Tensor) -> Tensor:
        for _ in range(depth):
            scale = F.silu(weight).sum(0)
            both = torch.cat([text, image], 1)
            both = both + attention_over(F.layer_norm(both, [8]) * scale)
            text, image = both[:, :4] + 1, both[:, 4:]
            image = image + F.linear(F.gelu(F.linear(image, weight)), weight)
        return image

    return run


def _lines(work: Callable[[], Any]) -> int:
    """Lines of our passes, and of the solver that they call, that ``work`` runs."""
    count = 0

    def line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        return line if any(name in frame.f_code.co_filename for name in _OURS) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def _work(depth: int) -> int:
    captured = capture_function(_blocks(depth), (tensor(1, 8, 8), tensor(1, 4, 8, seed=1), tensor(8, 8)))
    mesh = Mesh(1, 2, 0, "all", "ring", "ulysses", ())

    def passes() -> None:
        graph = captured.module.graph
        rewrite(captured, make_plan(graph, find_axes(graph), 1, 2), mesh, training=True)

    return _lines(passes)


def test_twice_the_depth_is_twice_the_work() -> None:
    shallow, deep = _work(16), _work(32)
    assert shallow > 10_000, "the passes were not seen"
    assert deep <= 2.2 * shallow, f"{shallow} lines at depth 16, {deep} at depth 32"
