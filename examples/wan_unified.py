"""Wan 2.2, both of its transformers, with diffusers' own configuration of context parallelism.

    torchrun --nproc-per-node 2 examples/wan_unified.py
    torchrun --nproc-per-node 4 examples/wan_unified.py --ring 2

With four ranks and ``--ring 2`` the variant is unified: heads are exchanged within pairs, keys go round between them.
"""

from __future__ import annotations

import argparse
from typing import Any

import tiny
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig

import cp_compile


def main() -> None:
    """Makes one film twice, on this process alone and on all ranks, and says how far they are apart."""
    parser = argparse.ArgumentParser(description="Wan 2.2 with ulysses, ring or both, compared with one process.")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--ring", type=int, default=1, help="ranks that pass keys and values around")
    parser.add_argument("--inner", default="inductor", choices=["inductor", "aot_eager"], help="compiler of a rank")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    pipeline = tiny.wan()
    alone = film(pipeline, args.steps)
    config = ContextParallelConfig(ulysses_degree=dist.get_world_size() // args.ring, ring_degree=args.ring)
    cp_compile.parallelize(pipeline, config=config, rotate="alltoall", inner=args.inner)
    together = film(pipeline, args.steps)
    error = (together - alone).abs().max().item()
    if dist.get_rank() == 0:
        print(cp_compile.report_of(pipeline))
        print(f"largest difference of a pixel between one process and {dist.get_world_size()}: {error:.1e}")
    cp_compile.unparallelize(pipeline)
    dist.destroy_process_group()
    if error > 1e-4:
        raise SystemExit("the films differ")


def film(pipeline: Any, steps: int) -> torch.Tensor:
    """Pixels between 0 and 1, of shape ``[1, 9, 3, 32, 48]``."""
    return pipeline(
        "a photo of the red cat in the rain",
        negative_prompt="blue",
        height=32,
        width=48,
        num_frames=9,
        num_inference_steps=steps,
        max_sequence_length=16,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).frames


if __name__ == "__main__":
    main()
