"""Models compiled a block at a time, and graphs that hold regions: entered, or named as running on all tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.ranks

MESHES = [(4, 1), (1, 4), (2, 2)]
BLOCKWISE = ["FluxTransformer2DModel", "SD3Transformer2DModel", "WanTransformer3DModel"]


@pytest.mark.parametrize(("model", "own_loop"), [("FluxTransformer2DModel", False), ("WanTransformer3DModel", True)])
def test_blocks_compiled_one_by_one_give_the_answer(ranks, model, own_loop):
    _check_blockwise(ranks, model, 2, 1, own_loop)


@pytest.mark.sweep
@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize(("ulysses", "ring"), [(1, 2), *MESHES])
@pytest.mark.parametrize("model", BLOCKWISE)
def test_blocks_compiled_one_by_one_give_the_answer_on_every_mesh(ranks, model, ulysses, ring, own_loop):
    _check_blockwise(ranks, model, ulysses, ring, own_loop)


def _check_blockwise(ranks: Any, model: str, ulysses: int, ring: int, own_loop: bool) -> None:
    for answer in ranks(ulysses * ring).run(_blockwise, model, ulysses, ring, own_loop, timeout=300.0):
        assert answer["error"] <= 1e-5, answer
        assert answer["agree"], "ranks differ from each other"
        assert answer["variants"] and "whole" not in answer["variants"]
        # Each block ends whole on every rank: the price of a boundary, which the report counts.
        assert answer["boundary gathers"] >= answer["graphs"]
        assert answer["collectives"] == answer["of attentions"] + answer["gathers"] + answer["sums"]


def _blockwise(name: str, ulysses: int, ring: int, own_loop: bool) -> dict[str, Any]:
    from cp_compile import cp_backend
    from cp_compile.agreement import digest, relative_error
    from cp_compile.zoo import case

    backend = cp_backend(ulysses=ulysses, ring=ring, inner="aot_eager")
    plain, model = case(name).model(), case(name).model()
    if own_loop:
        for blocks in (m for m in model.children() if isinstance(m, nn.ModuleList)):
            for block in blocks:
                block.compile(backend=backend)
    else:
        model.compile_repeated_blocks(backend=backend)
    with torch.no_grad():
        actual = model(**case(name).kwargs())
        error = relative_error(actual, plain(**case(name).kwargs()))
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest(actual))
    graphs = [g for g in backend.report.graphs if g.attentions]
    return {
        "error": error,
        "agree": len(set(digests)) == 1,
        "variants": [a.variant for g in graphs for a in g.attentions],
        "graphs": len(graphs),
        "gathers": sum(len(g.gathers) for g in graphs),
        "boundary gathers": sum(x.output for g in graphs for x in g.gathers),
        "of attentions": sum(a.collectives for g in graphs for a in g.attentions),
        "sums": sum(len(g.reductions) for g in graphs),
        "collectives": backend.report.collectives,
    }


class Attending(nn.Module):
    """One self-attention of 4 heads, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Checkpointed(nn.Module):
    """A checkpoint in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = Attending(), Attending()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._both, x, use_reentrant=False)

    def _both(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, self.outer(x).sin(), use_reentrant=False) + x


class Nested(nn.Module):
    """Two blocks, each a nested compile region."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attending() for _ in range(2))
        self.run = torch.compiler.nested_compile_region(lambda block, x: block(x))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x


class Branching(nn.Module):
    """Attention before, in and after a ``cond`` on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside, self.after = Attending(), Attending(), Attending()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        x = torch.cond(x.sum() > 0, lambda y: self.inside(y).cos(), lambda y: y.sin(), (x,))
        return self.after(x)


class Looping(nn.Module):
    """Attention, and a ``while_loop`` over its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = Attending(), Attending()

    def forward(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops.while_loop import while_loop

        x = self.before(x)
        count = torch.zeros((), dtype=torch.long)
        _, x = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 0.5 + y.mean(1, keepdim=True)), (count, x))
        return self.after(x)


class Scanning(nn.Module):
    """Attention, and a recurrence along its tokens by ``scan``."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = Attending(), Attending()

    def forward(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops.scan import scan

        x = self.before(x)
        _, rows = scan(lambda c, y: (c * 0.5 + y, (c * 0.5 + y).tanh()), torch.zeros_like(x[:, 0]), x, dim=1)
        return self.after(x + rows)


ENTERED: dict[str, Callable[[], nn.Module]] = {"checkpoint": Checkpointed, "nested": Nested}
NAMED: dict[str, Callable[[], nn.Module]] = {"cond": Branching, "while_loop": Looping, "scan": Scanning}


@pytest.mark.parametrize("region", ENTERED)
def test_regions_that_run_once_are_entered(ranks, region):
    _check_entered(ranks, region, 2, 1)


@pytest.mark.sweep
@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
@pytest.mark.parametrize("region", ENTERED)
def test_regions_that_run_once_are_entered_on_every_mesh(ranks, region, ulysses, ring):
    _check_entered(ranks, region, ulysses, ring)


def _check_entered(ranks: Any, region: str, ulysses: int, ring: int) -> None:
    for answer in ranks(ulysses * ring).run(_region, region, ulysses, ring):
        assert answer["error"] <= 1e-5, answer
        assert len(answer["variants"]) == 2 and "whole" not in answer["variants"]
        assert not answer["unknown"]


@pytest.mark.parametrize("region", NAMED)
def test_regions_that_run_zero_or_many_times_are_named_in_the_report(ranks, region):
    _check_named(ranks, region, 1, 2)


@pytest.mark.sweep
@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
@pytest.mark.parametrize("region", NAMED)
def test_regions_that_run_zero_or_many_times_are_named_on_every_mesh(ranks, region, ulysses, ring):
    _check_named(ranks, region, ulysses, ring)


def _check_named(ranks: Any, region: str, ulysses: int, ring: int) -> None:
    for answer in ranks(ulysses * ring).run(_region, region, ulysses, ring):
        assert answer["error"] <= 1e-5, answer
        assert any(region in op for op in answer["unknown"]), answer
        assert len(answer["variants"]) == 2 and "whole" not in answer["variants"], "those outside are sharded"


def _region(region: str, ulysses: int, ring: int) -> dict[str, Any]:
    from cp_compile import cp_backend
    from cp_compile.agreement import relative_error

    torch.manual_seed(0)
    model, x = {**ENTERED, **NAMED}[region](), torch.randn(2, 7, 16)
    backend = cp_backend(ulysses=ulysses, ring=ring, inner="aot_eager")
    with torch.no_grad():
        error = relative_error(torch.compile(model, backend=backend)(x), model(x))
    graphs = [g for g in backend.report.graphs if g.attentions]
    return {
        "error": error,
        "variants": [a.variant for g in graphs for a in g.attentions],
        "unknown": [op for g in graphs for op in g.unknown_ops],
    }
