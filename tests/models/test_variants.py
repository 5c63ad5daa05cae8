"""Every variant through the public backend, on real ranks: causal, grouped queries, masks, odd heads and lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytestmark = pytest.mark.ranks


class Decoder(nn.Module):
    """Causal self-attention with grouped queries, twice; the last token's row comes out apart."""

    def __init__(self, heads: int = 8, kv_heads: int = 2, dim: int = 8) -> None:
        super().__init__()
        self.dim = dim
        self.q = nn.ModuleList(nn.Linear(32, heads * dim) for _ in range(2))
        self.kv = nn.ModuleList(nn.Linear(32, 2 * kv_heads * dim) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(heads * dim, 32) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for to_q, to_kv, to_out in zip(self.q, self.kv, self.out, strict=True):
            q = to_q(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
            k, v = to_kv(x).unflatten(-1, (2, -1, self.dim)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + to_out(y.transpose(1, 2).flatten(2))
        return x, x[:, -1:]


class Joint(nn.Module):
    """Text and image in one attention, five heads, with a mask over padded text and a bias for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image, self.out = nn.Linear(24, 3 * 40), nn.Linear(16, 3 * 40), nn.Linear(40, 16)

    def forward(self, text: Tensor, image: Tensor, seen: Tensor, bias: Tensor) -> Tensor:
        joint = torch.cat([self.text(text), self.image(image)], 1)
        q, k, v = joint.unflatten(-1, (3, 5, 8)).permute(2, 0, 3, 1, 4)
        ones = seen.new_ones(image.shape[:2])
        mask = torch.where(torch.cat([seen, ones], 1)[:, None, None, :], bias, -torch.inf)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return self.out(y[:, text.shape[1] :])


class ByHand(nn.Module):
    """Attention as products and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return x + ((q @ k.mT * 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


def _case(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    if name == "causal, grouped queries":
        return Decoder(), (torch.randn(2, 13, 32),)
    if name == "joint, masked, five heads":
        seen = torch.arange(7) < torch.tensor([[3], [7]])
        return Joint(), (torch.randn(2, 7, 24), torch.randn(2, 9, 16), seen, torch.randn(1, 5, 16, 16))
    return ByHand(), (torch.randn(2, 11, 16),)


CASES = ["causal, grouped queries", "joint, masked, five heads", "by hand"]
MESHES = [(2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (1, 4), (2, 2)]


@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
@pytest.mark.parametrize("name", CASES)
def test_every_variant_gives_the_answer_and_the_gradients_of_one_process(ranks, name, ulysses, ring):
    for answer in ranks(ulysses * ring).run(run_variant, name, ulysses, ring, "alltoall"):
        assert answer["error"] <= 1e-11, answer
        assert "whole" not in answer["variants"]


@pytest.mark.parametrize("name", CASES)
def test_keys_gathered_at_once_give_the_same(ranks, name):
    for answer in ranks(3).run(run_variant, name, 1, 3, "allgather"):
        assert answer["error"] <= 1e-11, answer


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 3), (3, 2)])
def test_six_ranks(ranks, ulysses, ring):
    for name in CASES:
        for answer in ranks(6).run(run_variant, name, ulysses, ring, "alltoall"):
            assert answer["error"] <= 1e-11, (name, answer)
            assert set(answer["variants"]) == {"unified"}


def test_a_causal_ring_is_cut_zigzag(ranks):
    answers = ranks(4).run(run_variant, "causal, grouped queries", 1, 4, "alltoall")
    assert all(answer["zigzag"] for answer in answers)


@pytest.mark.parametrize("model", ["causal, grouped queries", "joint, masked, five heads"])
def test_the_report_names_the_kernel_of_a_ring(ranks, model):
    # In fp64 the flash kernel of the CPU serves; a bias that is trained needs the scores, and so the plain one.
    kernel = "cpu_flash" if model.startswith("causal") else "math"
    for answer in ranks(2).run(run_variant, model, 1, 2, "alltoall"):
        assert set(answer["kernels"]) == {kernel}


def run_variant(name: str, ulysses: int, ring: int, rotate: Any, inner: Any = "aot_eager") -> dict[str, Any]:
    """Error of outputs and gradients of one case, in fp64, and what the report says of it; run on each rank."""
    from cp_compile import cp_backend
    from cp_compile.agreement import relative_error

    (plain, args), (model, same) = _case(name), _case(name)
    backend = cp_backend(ulysses=ulysses, ring=ring, rotate=rotate, inner=inner)
    results = []
    for module, run, inputs in ((plain, plain, args), (model, torch.compile(model, backend=backend), same)):
        module.double()
        inputs = [x.double().requires_grad_() if x.is_floating_point() else x for x in inputs]
        out = run(*inputs)
        out = out if isinstance(out, tuple) else (out,)
        loss = sum((o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)).sum() for o in out)
        loss.backward()
        grads = [p.grad for p in module.parameters()] + [x.grad for x in inputs if x.is_floating_point()]
        results.append([*(o.detach() for o in out), *grads])
    # A key's bias has no gradient but rounding, so gradients are compared together.
    first = len(out)
    flat = [[*r[:first], torch.cat([g.flatten() for g in r[first:]])] for r in results]
    (graph,) = backend.report.graphs
    return {
        "error": relative_error(flat[1], flat[0]),
        "variants": [a.variant for a in graph.attentions],
        "kernels": [a.kernel for a in graph.attentions],
        "zigzag": any(a.zigzag for a in graph.axes),
    }


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (4, 1), (1, 2), (1, 4), (2, 2)])
def test_a_compiled_graph_sends_no_more_than_it_must(ranks, ulysses, ring):
    """Elements that leave a rank for one self-attention, counted at the collectives of the final graph."""
    n, a = ulysses * ring, 1 * 16 * 4 * 4
    for sent, calls in ranks(n).run(_sent, ulysses, ring):
        assert calls == (2 if ulysses > 1 else 0) + (ring - 1)
        there = 4 * a * (ulysses - 1) / (ulysses * n)
        around = 2 * a * (ring - 1) / n
        assert sent == there + around


def _sent(ulysses: int, ring: int) -> tuple[int, int]:
    from cp_compile import cp_backend

    found: list[int] = []

    def inner(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        me = torch.distributed.get_rank()
        for node in gm.graph.nodes:
            if node.target is torch.ops._c10d_functional.all_to_all_single.default:
                group = torch.distributed.distributed_c10d._resolve_process_group(node.args[3])
                splits, rows = node.args[2], node.args[0].meta["val"]
                mine = splits[torch.distributed.get_group_rank(group, me)]
                found.append((sum(splits) - mine) * rows[0].numel())
        return gm.forward

    torch.manual_seed(0)
    with torch.no_grad():
        torch.compile(ByHand(), backend=cp_backend(ulysses=ulysses, ring=ring, inner=inner))(torch.randn(1, 16, 16))
    return sum(found), len(found)
