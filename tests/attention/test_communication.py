"""Nothing is sent that need not be, and ranks never disagree about what is sent."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cp_compile import collectives as c
from cp_compile.attention import attention, collectives, elements_sent
from cp_compile.mesh import Mesh
from tests.attention.cases import Case, Mask
from tests.attention.trace import structure, trace
from tests.emulate import CollectiveError, emulate, meshes, stats

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("variant", ["ulysses", "ring", "gathered ring"])
def test_a_self_attention_sends_the_theoretical_minimum(degree: int, variant: str) -> None:
    ring, ulysses = (1, degree) if variant == "ulysses" else (degree, 1)
    case = Case(
        ring, ulysses, (64,), q_heads=8, kv_heads=8, rotate="allgather" if variant == "gathered ring" else "alltoall"
    )
    q, k, v, _, _ = case.inputs()
    placement, _ = case.placements()
    a = q.numel()
    elements = 4 * a * (degree - 1) // degree**2 if variant == "ulysses" else 2 * a * (degree - 1) // degree
    number = {"ulysses": 2, "ring": degree - 1, "gathered ring": 1}[variant]

    def rank(mesh: Mesh) -> None:
        rows = placement.rows(mesh.rank, "cpu")
        spec = case.spec_of(mesh)
        attention(q[:, :, rows], k[:, :, rows], v[:, :, rows], None, spec)
        assert stats().elements == elements == elements_sent(spec, q.shape, k.shape, v.shape)
        assert stats().collectives == number == collectives(spec)

    emulate(ring, ulysses, rank)


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 2), (4, 2), (2, 4), (3, 2)])
@pytest.mark.parametrize("rotate", ["alltoall", "allgather"])
def test_unified_needs_two_collectives_and_the_ring(ring: int, ulysses: int, rotate: str) -> None:
    case = Case(ring, ulysses, (24,), rotate=rotate)
    number = 2 + (ring - 1 if rotate == "alltoall" else 1)
    assert {collectives(case.spec_of(m)) for m in meshes(ring, ulysses)} == {number}


CASES = [
    Case(4, 1, (16,)),
    Case(4, 1, (9,)),
    Case(4, 1, (9, 7), causal=True, zigzag=True),
    Case(4, 1, (9, 7), causal=True),
    Case(4, 1, (9, 7), causal=True, zigzag=True, rotate="allgather"),
    Case(3, 1, (9, 7), mask=Mask("bias", "BHSS"), rotate="allgather"),
    Case(2, 2, (9, 7), mask=Mask("bool", "BHSS"), q_heads=5, kv_heads=5),
    Case(2, 2, (9, 7), (5,), mask=Mask("min", "B1SS"), q_heads=6, kv_heads=3),
    Case(2, 4, (9, 7), mask=Mask("inf", "1HSS"), q_heads=6, kv_heads=3),
    Case(1, 8, (9, 7), (5,), mask=Mask("bool", "BHSS"), q_heads=12, kv_heads=4),
    Case(1, 4, (9, 7), causal=True, zigzag=True, q_heads=6, kv_heads=3),
    Case(2, 2, (13,), replicated=True, causal=True),
    Case(2, 2, (13,), (4,), replicated=True, mask=Mask("bool", "B1SS")),
    Case(2, 2, (13,), spec={"dropout_p": 0.5}),
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_every_rank_traces_the_same_graph_but_for_constants(case: Case) -> None:
    q, k, v, mask, _ = case.inputs()
    q_placement, kv_placement = case.placements()

    def of(mesh: Mesh) -> list[object]:
        rows = q_placement.rows(mesh.rank, "cpu")
        columns = torch.arange(k.shape[2]) if case.replicated else kv_placement.rows(mesh.rank, "cpu")
        graph = trace(case.spec_of(mesh), [q[:, :, rows], k[:, :, columns], v[:, :, columns], mask])
        assert not [n for n in graph.graph.nodes if n.op == "get_attr"], "a tensor was baked into the graph"
        return list(structure(graph))

    first, *others = (of(mesh) for mesh in meshes(case.ring, case.ulysses))
    for other in others:
        for a, b in zip(first, other):
            assert a == b
        assert len(first) == len(other)


def _grad(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    return torch.autograd.grad(y, x, g)[0]


def test_gradients_of_collectives() -> None:
    def rank(mesh: Mesh) -> None:
        r, where = mesh.rank, (mesh.ring_group, mesh.ring)
        x = torch.arange(6.0).view(3, 2).add(10 * r).requires_grad_()
        g = torch.arange(6.0).view(3, 2) + 100 * r

        y = c.all_to_all(x, *where)
        assert y.tolist() == [[2 * r + 10 * s, 2 * r + 1 + 10 * s] for s in range(3)]
        assert _grad(x, y, g).tolist() == [[2 * r + 100 * s, 2 * r + 1 + 100 * s] for s in range(3)]

        y = c.permute(x, *where, r)
        assert torch.equal(y, x - 10 * r + 10 * ((r - 1) % 3))
        assert torch.equal(_grad(x, y, g), g - 100 * r + 100 * ((r + 1) % 3))

        y = c.all_gather(x, *where, r)
        assert torch.equal(y, torch.stack([x - 10 * r + 10 * s for s in range(3)]))
        assert torch.equal(_grad(x, y, torch.stack([g, g + 1, g + 2])), g + r)

        y = c.all_reduce(x, mesh.ring_group)
        assert torch.equal(y, 3 * (x - 10 * r) + 30)
        assert torch.equal(_grad(x, y, g), g)

        y = c.replicate(x, mesh.ring_group)
        assert torch.equal(y, x)
        assert torch.equal(_grad(x, y, g), 3 * (g - 100 * r) + 300)

        assert torch.equal(c.reduce_scatter_blocks(x.detach(), *where), 3 * (x[r] - 10 * r) + 30)

    emulate(3, 1, rank)


def test_the_emulator_names_ranks_that_disagree() -> None:
    def rank(mesh: Mesh) -> Tensor:
        return c.all_reduce(torch.zeros(2 + (mesh.rank == 1)), mesh.group)

    with pytest.raises(CollectiveError, match=r"rank 1: all_reduce\(sum\) of torch.float32 \(3,\)"):
        emulate(3, 1, rank)


def test_the_emulator_does_not_hang_on_a_rank_that_stays_away() -> None:
    def rank(mesh: Mesh) -> None:
        if mesh.rank:
            c.all_reduce(torch.zeros(2), mesh.group)

    with pytest.raises(CollectiveError, match="waited in vain in all_reduce"):
        emulate(2, 1, rank, timeout=0.2)


def test_the_emulator_finds_results_that_are_used_too_early() -> None:
    def rank(mesh: Mesh) -> Tensor:
        return c.start_permute(torch.zeros(2), mesh.group, 2, mesh.rank) + 1

    with pytest.raises(CollectiveError, match="not waited for"):
        emulate(2, 1, rank)
