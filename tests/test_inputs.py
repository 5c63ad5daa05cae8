"""Inputs and weights that differ between ranks are named; on request the first rank's are taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_compile import cp_backend
from cp_compile.checksum import checksums
from tests.faults import attempt
from tests.test_backend import Block

CPU = torch.device("cpu")
DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


def _sum(x: torch.Tensor) -> int:
    return int(checksums([x], CPU))


@pytest.mark.fast
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_checksum_sees_every_bit_and_its_place(dtype: torch.dtype):
    octets = torch.randint(0, 2, (3 * 5 * dtype.itemsize,), dtype=torch.uint8)
    x = octets.clone().view(dtype).view(3, 5)
    assert _sum(x) == _sum(octets.clone().view(dtype).view(3, 5))
    seen = {_sum(x), _sum(x.view(5, 3)), _sum(x[:2]), _sum(x.reshape(-1))}
    for i in range(len(octets)):
        changed = octets.clone()
        changed[i] ^= 1
        seen.add(_sum(changed.view(dtype).view(3, 5)))
    assert len(seen) == 4 + len(octets)


@pytest.mark.fast
def test_a_checksum_is_of_bits_nan_and_signs_included():
    x = torch.randn(70_000, dtype=torch.float64)
    x[7] = float("nan")
    assert _sum(x) == _sum(x.clone())
    assert _sum(x) != _sum(-x) and _sum(torch.zeros(2)) != _sum(-torch.zeros(2))
    assert _sum(x) != _sum(x.flip(0)) and _sum(x[:60_000]) != _sum(x[1:60_001])


@pytest.mark.fast
def test_a_checksum_is_of_values_not_of_strides_nor_of_the_seed():
    x = torch.randn(4, 6, 3)
    expected = _sum(x)
    torch.manual_seed(5)
    assert _sum(x.transpose(0, 2).contiguous().transpose(0, 2)) == expected
    assert _sum(torch.cat([torch.zeros(1), x.view(-1)])[1:].view(4, 6, 3)) == expected
    one = torch.tensor([7])
    assert _sum(torch.tensor(7).expand(1)) == _sum(one) == _sum(one.as_strided((1,), (5,)))
    z = torch.randn(3, dtype=torch.complex64)
    assert _sum(z.conj()) == _sum(z.conj().resolve_conj()) != _sum(z)


@pytest.mark.fast
@settings(max_examples=50, deadline=None)
@given(st.integers(1, 200_000), st.data())
def test_two_elements_that_change_places_change_a_checksum(size: int, data: st.DataObject):
    x = torch.randn(size)
    i, j = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    y = x.clone()
    y[i], y[j] = x[j], x[i]
    assert (_sum(x) == _sum(y)) == torch.equal(x, y)


@pytest.mark.ranks
def test_an_unseeded_input_is_named_with_its_ranks_and_what_to_do(ranks):
    for first, off, always in ranks(3).run(_unseeded):
        assert first.startswith("InputError") and "input x: rank 2 and rank 0 differ" in first
        assert "seed the generator alike" in first and "sync_inputs=True" in first and "weight" not in first
        assert off == ""
        assert always.startswith("InputError") and "input x: rank 2 and rank 0 differ" in always


def _unseeded() -> tuple[str, str, str]:
    alike = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(0))
    x = alike + (dist.get_rank() == 2)
    first, _, _ = attempt(_compiled(Block(), 3), x)
    off, _, _ = attempt(_compiled(Block(), 3, check_inputs="off"), x)
    model = _compiled(Block(), 3, check_inputs="always")
    assert attempt(model, alike)[0] == ""
    return first, off, attempt(model, x)[0]


@pytest.mark.ranks
def test_after_inputs_that_differ_the_same_model_runs_with_inputs_that_do_not(ranks):
    for always, same in ranks(2).run(_again):
        assert always.startswith("InputError") and same


def _again() -> tuple[str, bool]:
    block, x = Block(), torch.randn(1, 6, 16)
    model = _compiled(block, 2, check_inputs="always")
    model(x)
    failed, _, _ = attempt(model, x + dist.get_rank())
    return failed, torch.allclose(model(x), block(x), atol=1e-6)


@pytest.mark.ranks
def test_other_weights_are_named_by_their_path_in_the_model(ranks):
    for text in ranks(2).run(_other_weights):
        assert text.startswith("InputError") and "weight out.bias: rank 1 and rank 0 differ" in text
        assert "checkpoint" in text and "qkv" not in text and "generator" not in text


def _other_weights() -> str:
    block = Block()
    with torch.no_grad():
        block.out.bias[3] += dist.get_rank()
    return attempt(_compiled(block, 2), torch.randn(1, 6, 16))[0]


class Nested(Block):
    """Takes its input from a dict, and a number that is not one."""

    def forward(self, states: dict[str, torch.Tensor], scale: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(states["image"] * scale)


@pytest.mark.ranks
def test_a_nan_equals_itself_and_nested_inputs_have_a_name(ranks):
    for same, text in ranks(2).run(_nested):
        assert same == ""
        assert "input states.image: rank 1" in text and "scale" not in text.split("Every rank")[0]


def _nested() -> tuple[str, str]:
    x = torch.full((1, 6, 16), float("nan"))
    scale = torch.tensor(2.0)
    same, _, _ = attempt(_compiled(Nested(), 2), {"image": x}, scale)
    x[0, 0, 0] = dist.get_rank()
    return same, attempt(_compiled(Nested(), 2), {"image": x}, scale)[0]


@pytest.mark.ranks
def test_sync_inputs_passes_the_first_ranks_floating_inputs_and_leaves_the_users_alone(ranks):
    results = ranks(2).run(_synced)
    for error, again, untouched, gradient in results:
        assert max(error, again) <= 1e-6 and untouched and gradient <= 1e-6


def _synced() -> tuple[float, float, bool, float]:
    rank, block = dist.get_rank(), Block()
    x = [torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    model = _compiled(block, 2, sync_inputs=True, check_inputs="always")
    errors = [(model(x[rank] + i) - block(x[0] + i)).abs().max().item() for i in range(2)]
    untouched = torch.equal(x[rank], torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(rank)))
    mine, first = x[rank].clone().requires_grad_(), x[0].clone().requires_grad_()
    torch.compile(block, backend=cp_backend(ulysses=2, inner="aot_eager", sync_inputs=True))(mine).sum().backward()
    block(first).sum().backward()
    return errors[0], errors[1], untouched, (mine.grad - first.grad).abs().max().item()


@pytest.mark.ranks
def test_ranks_that_run_a_compiled_graph_with_other_lengths_are_told_before_a_collective_breaks(ranks):
    for grown, text, again in ranks(2).run(_other_length):
        assert grown == again == ""
        assert text.startswith("ScheduleError") and "x.size()[1]" in text
        assert "12 on rank 0" in text and "13 on rank 1" in text


def _other_length() -> tuple[str, str, str]:
    rank = dist.get_rank()
    model = torch.compile(Block(), backend=cp_backend(ulysses=2, inner="aot_eager"), dynamic=True)
    with torch.no_grad():
        model(torch.randn(1, 6, 16))
        grown, _, _ = attempt(model, torch.randn(1, 10, 16))
        text, _, _ = attempt(model, torch.zeros(1, 12 + rank, 16))
        return grown, text, attempt(model, torch.randn(1, 14, 16))[0]


def _compiled(block: Block, world: int, **options: Any) -> Any:
    """The block on all ranks, without gradients."""
    torch._dynamo.reset()
    return torch.no_grad()(torch.compile(block, backend=cp_backend(ulysses=world, inner="aot_eager", **options)))
