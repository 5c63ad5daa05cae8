"""What is measured: a text-to-image and a video transformer of diffusers, in sizes that stress different things."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cp_compile.zoo import Case

__all__ = ["MODELS", "SIZES", "Size", "flux", "wan"]


@dataclass(frozen=True)
class Size:
    """How wide, how deep, how many tokens.

    Attributes:
        heads: number of heads.
        head_dim: channels of one.
        depth: blocks; of FLUX a third are double ones.
        rows: rows of image tokens.
        columns: tokens in a row; a row of the video, which has two frames, has half of them.
        text: text tokens.
    """

    heads: int
    head_dim: int
    depth: int
    rows: int
    columns: int
    text: int

    @property
    def width(self) -> int:
        """Channels."""
        return self.heads * self.head_dim


SIZES = {
    "compute": Size(heads=8, head_dim=64, depth=6, rows=32, columns=64, text=256),
    "latency": Size(heads=8, head_dim=16, depth=12, rows=16, columns=32, text=64),
}


def flux(size: Size) -> Case:
    """A FLUX-like model: one axis of text and image tokens, a third of the blocks with two streams."""
    return flux_of_depth(size, size.depth // 3, size.depth - size.depth // 3)


def flux_of_depth(size: Size, double: int, single: int) -> Case:
    """The same with a given number of double and single blocks."""
    image = size.rows * size.columns
    rope = {16: (4, 6, 6), 64: (8, 28, 28)}[size.head_dim]
    init = {
        "patch_size": 1,
        "in_channels": 64,
        "num_layers": double,
        "num_single_layers": single,
        "attention_head_dim": size.head_dim,
        "num_attention_heads": size.heads,
        "joint_attention_dim": size.width,
        "pooled_projection_dim": 256,
        "axes_dims_rope": rope,
    }
    positions = [[0, row, column] for row in range(size.rows) for column in range(size.columns)]
    inputs = {
        "hidden_states": _tensor(1, image, 64),
        "encoder_hidden_states": _tensor(1, size.text, size.width),
        "pooled_projections": _tensor(1, 256),
        "timestep": _tensor(1, values=[0.7]),
        "img_ids": _tensor(image, 3, values=positions),
        "txt_ids": _tensor(size.text, 3, values=[[0, 0, 0]] * size.text),
    }
    return _case("flux", "FluxTransformer2DModel", init, inputs)


def wan(size: Size) -> Case:
    """A Wan-like model: video tokens attend to each other, and to text that every rank holds whole."""
    init = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": size.heads,
        "attention_head_dim": size.head_dim,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": size.width,
        "freq_dim": 256,
        "ffn_dim": 4 * size.width,
        "num_layers": size.depth,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 64,
    }
    inputs = {
        "hidden_states": _tensor(1, 16, 2, 2 * size.rows, size.columns),
        "encoder_hidden_states": _tensor(1, size.text, size.width),
        "timestep": {"tensor": [1], "dtype": "int64", "values": [700]},
    }
    return _case("wan", "WanTransformer3DModel", init, inputs)


MODELS = {"flux": flux, "wan": wan}


def _case(name: str, cls: str, init: dict[str, Any], inputs: dict[str, Any]) -> Case:
    return Case(name, cls, {k: {"value": v} for k, v in init.items()}, inputs)


def _tensor(*shape: int, values: Any = None) -> dict[str, Any]:
    return {"tensor": list(shape), "dtype": "float32", **({} if values is None else {"values": values})}
