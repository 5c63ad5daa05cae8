"""FLUX with Ulysses, at a size whose tokens do not divide by the ranks, compared with one process.

    torchrun --nproc-per-node 2 examples/flux_ulysses.py

The model has three heads and the picture 13 x 9 tokens: neither divides by two, and nothing has to be set for that.
"""

from __future__ import annotations

import argparse
from typing import Any

import tiny
import torch
import torch.distributed as dist

import cp_compile


def main() -> None:
    """Makes one picture twice, on this process alone and on all ranks, and says how far they are apart."""
    parser = argparse.ArgumentParser(description="FLUX with Ulysses, compared with one process.")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--inner", default="inductor", choices=["inductor", "aot_eager"], help="compiler of a rank")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    pipeline = tiny.flux()
    alone = picture(pipeline, args.steps)
    cp_compile.parallelize(pipeline, ulysses=dist.get_world_size(), inner=args.inner)
    together = picture(pipeline, args.steps)
    error = (together - alone).abs().max().item()
    if dist.get_rank() == 0:
        print(cp_compile.report_of(pipeline))
        print(f"largest difference of a pixel between one process and {dist.get_world_size()}: {error:.1e}")
    cp_compile.unparallelize(pipeline)
    dist.destroy_process_group()
    if error > 1e-4:
        raise SystemExit("the pictures differ")


def picture(pipeline: Any, steps: int) -> torch.Tensor:
    """Pixels between 0 and 1, of shape ``[1, 3, 52, 36]``."""
    return pipeline(
        "a photo of the red cat in the rain",
        height=52,
        width=36,
        num_inference_steps=steps,
        max_sequence_length=16,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).images


if __name__ == "__main__":
    main()
