"""A picture by any diffusers pipeline on several ranks, with one line more than on one.

    torchrun --nproc-per-node 2 examples/pipeline_image.py
    torchrun --nproc-per-node 4 examples/pipeline_image.py --path path/to/model --ulysses 2 --ring 2

Without ``--path`` the pipeline is Stable Diffusion 3 with tiny random components, and the picture is noise.
"""

from __future__ import annotations

import argparse

import diffusers
import tiny
import torch
import torch.distributed as dist

import cp_compile


def main() -> None:
    """Makes one picture; rank 0 writes it."""
    parser = argparse.ArgumentParser(description="A picture by a diffusers pipeline on all ranks.")
    parser.add_argument("--path", help="a pipeline saved with save_pretrained (default: tiny random components)")
    parser.add_argument("--prompt", default="a photo of the red cat in the rain")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--size", type=int, default=64, help="height and width in pixels")
    parser.add_argument("--ulysses", type=int, help="ranks that share heads (default: what --ring leaves)")
    parser.add_argument("--ring", type=int, default=1, help="ranks that pass keys and values around")
    parser.add_argument("--inner", default="inductor", choices=["inductor", "aot_eager"], help="compiler of a rank")
    parser.add_argument("--output", default="picture.png")
    args = parser.parse_args()

    dist.init_process_group()
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{dist.get_node_local_rank()}"
        torch.cuda.set_device(device)

    pipeline = diffusers.DiffusionPipeline.from_pretrained(args.path) if args.path else tiny.stable_diffusion_3()
    pipeline.to(device)
    ulysses = args.ulysses or dist.get_world_size() // args.ring
    cp_compile.parallelize(pipeline, ulysses=ulysses, ring=args.ring, inner=args.inner)  # the one line

    picture = pipeline(
        args.prompt,
        height=args.size,
        width=args.size,
        num_inference_steps=args.steps,
        generator=torch.Generator().manual_seed(0),  # the same on every rank
    ).images[0]
    if dist.get_rank() == 0:
        picture.save(args.output)
        print(cp_compile.report_of(pipeline))
        print(f"written to {args.output}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
