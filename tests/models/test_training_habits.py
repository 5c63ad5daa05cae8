"""Training beside other things: data parallelism over another mesh dim, and the memory that a step keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.models.test_variants import Decoder

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("degree", ["ulysses", "ring"])
def test_data_parallelism_over_another_mesh_dim_gives_the_gradients_of_the_whole_batch(ranks, degree):
    answers = ranks(4).run(_data_parallel, degree)
    for error, _ in answers:
        assert error <= 1e-11
    assert len({digest for _, digest in answers}) == 1


def _data_parallel(degree: str) -> tuple[float, str]:
    """The recipe of docs/training.md, two batches of two ranks each, against one process with both batches."""
    from cp_compile import cp_backend
    from cp_compile.agreement import digest, relative_error

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", degree))
    torch.manual_seed(0)
    plain = Decoder().double()
    model = Decoder().double()
    model.load_state_dict(plain.state_dict())
    batch = torch.randn(4, 13, 32, dtype=torch.float64)
    plain(batch)[0].square().mean().backward()

    compiled = torch.compile(model, backend=cp_backend(**{degree: 2}, mesh=mesh, inner="aot_eager"))
    mine = batch.chunk(2)[mesh.get_local_rank("dp")]
    compiled(mine)[0].square().mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        p.grad /= mesh["dp"].size()
    grads = [[p.grad for p in m.parameters()] for m in (model, plain)]
    return relative_error(*grads), digest(grads[0])


@pytest.mark.parametrize("degrees", [{"ulysses": 2}, {"ring": 2}], ids=str)
def test_a_rank_keeps_its_share_of_what_one_process_keeps_for_the_backward(ranks, degrees):
    for mine, whole in ranks(2).run(_saved, degrees):
        assert 0.45 * whole < mine < 0.6 * whole


class _Block(nn.Module):
    """A transformer block as they train: norm, attention, norm, feed-forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def _saved(degrees: dict[str, int]) -> tuple[int, int]:
    """Bytes of activations kept between forward and backward: by one rank, and by one process."""
    from cp_compile import cp_backend

    model = nn.Sequential(*(_Block(32) for _ in range(4)))
    x = torch.randn(1, 1024, 32)
    sizes = []
    for backend in (cp_backend(**degrees, inner="aot_eager"), "aot_eager_decomp_partition"):
        torch._dynamo.reset()
        held = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept: dict[int, int] = {}

        def keep(t: Tensor, kept: dict[int, int] = kept, held: set[int] = held) -> Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in held:
                kept[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out: Any = torch.compile(model, backend=backend)(x)
        out.sum().backward()
        sizes.append(sum(kept.values()))
    return sizes[0], sizes[1]
