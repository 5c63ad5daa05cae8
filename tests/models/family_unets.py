"""UNets and ControlNets of ``diffusers``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from cp_compile import zoo
from tests.models.families import Draw, register

_UNET = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
}
_DOWN = ("CrossAttnDownBlock2D", "DownBlock2D")
_UP = ("UpBlock2D", "CrossAttnUpBlock2D")
_PLANE = {**_UNET, "sample_size": 16, "down_block_types": _DOWN}


class Tensors(nn.Module):
    """A model of ``diffusers`` that gives a tuple."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> tuple[Any, ...]:
        return self.model(**inputs, return_dict=False)


def unet(**more: Any) -> nn.Module:
    return Tensors(diffusers.UNet2DConditionModel(**{**_PLANE, "up_block_types": _UP, **more}))


def unet_2d() -> nn.Module:
    """Attention over pixels only."""
    return Tensors(
        diffusers.UNet2DModel(
            sample_size=16, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )
    )  # fmt: skip


def unet_3d() -> nn.Module:
    return Tensors(
        diffusers.UNet3DConditionModel(
            **_UNET,
            sample_size=8,
            down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        )
    )


def unet_motion() -> nn.Module:
    sizes = {k: v for k, v in _UNET.items() if k != "attention_head_dim"}
    return Tensors(
        diffusers.UNetMotionModel(
            **sizes, sample_size=8, num_attention_heads=2, motion_num_attention_heads=2, motion_max_seq_length=8,
            down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
            up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"),
        )
    )  # fmt: skip


def unet_spatio_temporal() -> nn.Module:
    return Tensors(
        diffusers.UNetSpatioTemporalConditionModel(
            sample_size=8, in_channels=4, out_channels=4, block_out_channels=(32, 64), layers_per_block=1,
            num_attention_heads=(2, 4), cross_attention_dim=16, addition_time_embed_dim=8, num_frames=3,
            projection_class_embeddings_input_dim=24,
            down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        )
    )  # fmt: skip


def uvit() -> nn.Module:
    return diffusers.UVit2DModel(
        hidden_size=32, cond_embed_dim=16, encoder_hidden_size=16, block_out_channels=32, in_channels=8,
        vocab_size=32, codebook_size=24, num_attention_heads=4, num_hidden_layers=2, intermediate_size=48,
        block_num_heads=4, num_res_blocks=1, sample_size=8, micro_cond_encode_dim=8, micro_cond_embed_dim=40,
    )  # fmt: skip


def controlnet() -> nn.Module:
    return Tensors(
        diffusers.ControlNetModel(**_UNET, down_block_types=_DOWN, conditioning_embedding_out_channels=(8, 16))
    )


def noise(draw: Draw) -> dict[str, Any]:
    return {"sample": draw.numbers(2, 4, 16, 16), "timestep": torch.tensor([7, 400])}


def noise_and_text(draw: Draw) -> dict[str, Any]:
    return {**noise(draw), "encoder_hidden_states": draw.numbers(2, 7, 16)}


def text_padded(draw: Draw) -> dict[str, Any]:
    return {**noise_and_text(draw), "encoder_attention_mask": torch.arange(7) < torch.tensor([[4], [7]])}


def with_control(draw: Draw) -> dict[str, Any]:
    return {**noise_and_text(draw), "controlnet_cond": draw.numbers(2, 3, 32, 32)}


def with_residuals(draw: Draw) -> dict[str, Any]:
    """What a ControlNet adds to a UNet."""
    down: list[Tensor] = [draw.numbers(2, c, n, n) for c, n in ((8, 16), (8, 16), (8, 8), (16, 8))]
    middle = draw.numbers(2, 16, 8, 8)
    return {
        **noise_and_text(draw),
        "down_block_additional_residuals": tuple(down),
        "mid_block_additional_residual": middle,
    }


def film(draw: Draw) -> dict[str, Any]:
    return {
        "sample": draw.numbers(1, 4, 3, 8, 8),
        "timestep": torch.tensor([7]),
        "encoder_hidden_states": draw.numbers(1, 7, 16),
    }


def film_and_text_by_frame(draw: Draw) -> dict[str, Any]:
    return {**film(draw), "encoder_hidden_states": draw.numbers(3, 7, 16)}


def film_by_frame(draw: Draw) -> dict[str, Any]:
    return {
        "sample": draw.numbers(1, 3, 4, 8, 8),
        "timestep": torch.tensor(7.0),
        "encoder_hidden_states": draw.numbers(1, 1, 16),
        "added_time_ids": draw.numbers(1, 3),
    }


def codes(draw: Draw) -> dict[str, Any]:
    return {
        "input_ids": draw.ids(2, 8, 8, below=24),
        "encoder_hidden_states": draw.numbers(2, 7, 16),
        "pooled_text_emb": draw.numbers(2, 16),
        "micro_conds": draw.numbers(2, 5),
    }


def control(cls: str, transformer: str, drop: tuple[str, ...] = ()) -> Callable[[], nn.Module]:
    """A ControlNet built with the arguments of its transformer in the zoo, but for those it lacks."""
    init = {k: v for k, v in zoo.case(transformer).settings().items() if k not in drop}
    return lambda: Tensors(getattr(diffusers, cls)(**init))


def like(transformer: str, *control: int) -> Callable[[Draw], dict[str, Any]]:
    """The inputs of a transformer of the zoo, and a picture to control it by."""

    def inputs(draw: Draw) -> dict[str, Any]:
        values = zoo.case(transformer).kwargs(draw.generator.initial_seed(), draw.dtype)
        values.pop("return_dict", None)
        return {**values, "controlnet_cond": draw.numbers(*control)}

    return inputs


register("UNet2DConditionModel", unet, noise_and_text)
register("UNet2DConditionModel, padded text", unet, text_padded)
register("UNet2DConditionModel, with a ControlNet's residuals", unet, with_residuals)
register("UNet2DConditionModel, linear projections", lambda: unet(use_linear_projection=True), noise_and_text)
register("UNet2DModel", unet_2d, lambda d: {"sample": d.numbers(2, 3, 16, 16), "timestep": torch.tensor([7, 400])})
register("UNet3DConditionModel", unet_3d, film)
register("UNetMotionModel", unet_motion, film_and_text_by_frame)
register("UNetSpatioTemporalConditionModel", unet_spatio_temporal, film_by_frame)
register("UVit2DModel", uvit, codes)
register("ControlNetModel", controlnet, with_control)
for _cls, _transformer, _control, _drop in (
    ("FluxControlNetModel", "FluxTransformer2DModel", (1, 16, 4), ()),
    ("SD3ControlNetModel", "SD3Transformer2DModel", (2, 4, 32, 32), ()),
    ("QwenImageControlNetModel", "QwenImageTransformer2DModel", (1, 16, 16), ("guidance_embeds",)),
    ("SanaControlNetModel", "SanaTransformer2DModel", (2, 4, 32, 32), ()),
):
    register(_cls, control(_cls, _transformer, _drop), like(_transformer, *_control))
