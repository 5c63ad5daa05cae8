"""Autoencoders of ``diffusers`` whose middle block attends over pixels or frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
from torch import Tensor, nn

from tests.models.families import Draw, register


class Both(nn.Module):
    """Encode, take the mean, decode."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sample: Tensor) -> tuple[Tensor, Tensor]:
        latent = self.model.encode(sample).latent_dist.mode()
        return latent, self.model.decode(latent, return_dict=False)[0]


class Quantised(nn.Module):
    """Encode and decode, the codebook left out: a distance that ties would choose another code."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sample: Tensor) -> tuple[Tensor, Tensor]:
        latent = self.model.encode(sample, return_dict=False)[0]
        return latent, self.model.decode(latent, force_not_quantize=True, return_dict=False)[0]


class Framed(nn.Module):
    """A decoder that must be told the number of frames."""

    def __init__(self, model: nn.Module, frames: int) -> None:
        super().__init__()
        self.model, self.frames = model, frames

    def forward(self, sample: Tensor) -> tuple[Tensor, Tensor]:
        latent = self.model.encode(sample).latent_dist.mode()
        return latent, self.model.decode(latent, num_frames=self.frames, return_dict=False)[0]


def _kl(**more: Any) -> nn.Module:
    return diffusers.AutoencoderKL(
        **{
            "block_out_channels": (8, 8),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "norm_num_groups": 4,
            "latent_channels": 4,
            **more,
        }
    )


def _temporal() -> nn.Module:
    model = diffusers.AutoencoderKLTemporalDecoder(
        block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=4
    )
    return Framed(model, 3)


def _vq() -> nn.Module:
    model = diffusers.VQModel(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4, latent_channels=4,
    )  # fmt: skip
    return Quantised(model)


def _wan() -> nn.Module:
    return Both(
        diffusers.AutoencoderKLWan(
            base_dim=8, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[False],
            latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
        )
    )  # fmt: skip


def _qwen_image() -> nn.Module:
    return Both(
        diffusers.AutoencoderKLQwenImage(
            base_dim=8, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[False],
            latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
        )
    )  # fmt: skip


def _hunyuan_video() -> nn.Module:
    return Both(
        diffusers.AutoencoderKLHunyuanVideo(
            latent_channels=4, down_block_types=("HunyuanVideoDownBlock3D",) * 4,
            up_block_types=("HunyuanVideoUpBlock3D",) * 4, block_out_channels=(8, 8, 8, 8), layers_per_block=1,
            norm_num_groups=4,
        )
    )  # fmt: skip


def _flux2() -> nn.Module:
    return Both(
        diffusers.AutoencoderKLFlux2(
            block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4, latent_channels=4,
        )
    )  # fmt: skip


def picture(batch: int = 2, size: int = 16) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {"sample": draw.numbers(batch, 3, size, size)}


def film(frames: int, size: int) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {"sample": draw.numbers(1, 3, frames, size, size)}


register("AutoencoderKL", lambda: Both(_kl()), picture())
register("AutoencoderKLFlux2", _flux2, picture())
register("AutoencoderKLTemporalDecoder", _temporal, picture(3))
register("VQModel", _vq, picture())
register("AutoencoderKLWan", _wan, film(1, 16))
register("AutoencoderKLQwenImage", _qwen_image, film(1, 16))
register("AutoencoderKLHunyuanVideo", _hunyuan_video, film(5, 32))
