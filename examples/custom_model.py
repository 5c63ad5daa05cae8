"""A diffusion transformer of forty lines, that nobody wrote a plan for, on two ranks or more.

    torchrun --nproc-per-node 2 examples/custom_model.py

Every rank gets the answer of one process; rank 0 prints how far apart the two are, and what was sharded.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cp_compile import cp_backend


class Block(nn.Module):
    """Self-attention over pixels, cross-attention to text, and a feed-forward, modulated by the timestep."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(dim, 4 * dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q, self.kv, self.cross_out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, text: Tensor, time: Tensor) -> Tensor:
        shift_1, scale_1, shift_2, scale_2 = self.modulation(time)[:, None].chunk(4, -1)
        x = x + self.out(self.attend(*self.qkv(self.norm(x) * (1 + scale_1) + shift_1).chunk(3, -1)))
        x = x + self.cross_out(self.attend(self.q(x), *self.kv(text).chunk(2, -1)))
        return x + self.feed_forward(self.norm(x) * (1 + scale_2) + shift_2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])


class DiT(nn.Module):
    """Noise ``[batch, 4, height, width]``, text ``[batch, tokens, dim]`` and timestep ``[batch]`` to noise."""

    def __init__(self, dim: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.patch, self.pixels = nn.Conv2d(4, dim, 2, 2), nn.Linear(dim, 16)
        self.time = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))

    def forward(self, noise: Tensor, text: Tensor, timestep: Tensor) -> Tensor:
        x = self.patch(noise)
        height, width = x.shape[-2:]
        x, time = x.flatten(2).transpose(1, 2), self.time(timestep[:, None])
        for block in self.blocks:
            x = block(x, text, time)
        return F.pixel_shuffle(self.pixels(x).transpose(1, 2).unflatten(2, (height, width)), 2)


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)  # every rank has the same weights and the same inputs
    model = DiT().to(device)
    inputs = [torch.randn(1, 4, 30, 22), torch.randn(1, 7, 64), torch.tensor([0.5])]
    inputs = [x.to(device) for x in inputs]

    backend = cp_backend(ulysses=world)
    with torch.no_grad():
        expected = model(*inputs)
        actual = torch.compile(model, backend=backend)(*inputs)

    error = (actual - expected).abs().max() / expected.abs().max()
    if rank == 0:
        print(backend.report)
        print(f"\nlargest relative error against one process: {error.item():.1e}")
    dist.destroy_process_group()
    if error > 1e-4:
        raise SystemExit(f"rank {rank}: the answer is off by {error.item():.1e}")


if __name__ == "__main__":
    main()
