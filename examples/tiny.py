"""Pipelines of the real classes with tiny random components, so that the examples and tests run without a checkpoint.

What they make is noise, but they make it as the large ones do: text encoder, denoising loop, autoencoder.
"""

from __future__ import annotations

from typing import Any

import diffusers
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from cp_compile.zoo import randomise

__all__ = ["cogvideox", "flux", "qwen_image", "stable_diffusion_3", "wan"]

WORDS = ["<pad>", "</s>", "<unk>", "a", "photo", "of", "the", "red", "blue", "cat", "dog", "in", "rain"]
WIDTH = 32


def flux(seed: int = 0) -> diffusers.FluxPipeline:
    """Text to image, text and image tokens in one attention. Three heads, so that two ranks share them unevenly."""
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_image_vae(seed),
        text_encoder=_clip(transformers.CLIPTextModel, seed),
        tokenizer=_tokenizer(16),
        text_encoder_2=_t5(transformers.T5EncoderModel, seed),
        tokenizer_2=_tokenizer(16),
        transformer=_random(
            diffusers.FluxTransformer2DModel(
                in_channels=16,
                num_layers=1,
                num_single_layers=1,
                attention_head_dim=16,
                num_attention_heads=3,
                joint_attention_dim=WIDTH,
                pooled_projection_dim=WIDTH,
                axes_dims_rope=(4, 4, 8),
                guidance_embeds=True,
            ),
            seed,
        ),
    )


def wan(seed: int = 0) -> diffusers.WanPipeline:
    """Text to video as Wan 2.2 does: one transformer for the noisier half of the steps, another for the rest."""
    settings: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": WIDTH,
        "freq_dim": 32,
        "ffn_dim": 32,
        "num_layers": 2,
        "rope_max_seq_len": 32,
    }
    return diffusers.WanPipeline(
        tokenizer=_tokenizer(16),
        text_encoder=_t5(transformers.UMT5EncoderModel, seed),
        vae=_random(diffusers.AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1), seed),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=_random(diffusers.WanTransformer3DModel(**settings), seed),
        transformer_2=_random(diffusers.WanTransformer3DModel(**settings), seed + 1),
        boundary_ratio=0.9,
    )


def qwen_image(seed: int = 0) -> diffusers.QwenImagePipeline:
    """Text to image, from ready embeddings of the prompt: the text encoder is left out."""
    z_dim = 4
    return diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_random(
            diffusers.AutoencoderKLQwenImage(
                base_dim=z_dim * 6,
                z_dim=z_dim,
                dim_mult=[1, 2, 4],
                num_res_blocks=1,
                temperal_downsample=[False, True],
                latents_mean=[0.0] * z_dim,
                latents_std=[1.0] * z_dim,
            ),
            seed,
        ),
        text_encoder=None,
        tokenizer=None,
        transformer=_random(
            diffusers.QwenImageTransformer2DModel(
                patch_size=2,
                in_channels=16,
                out_channels=4,
                num_layers=2,
                attention_head_dim=16,
                num_attention_heads=3,
                joint_attention_dim=WIDTH,
                axes_dims_rope=(8, 4, 4),
            ),
            seed,
        ),
    )


def stable_diffusion_3(seed: int = 0) -> diffusers.StableDiffusion3Pipeline:
    """Text to image, with the negative prompt in the same batch."""
    return diffusers.StableDiffusion3Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_image_vae(seed),
        text_encoder=_clip(transformers.CLIPTextModelWithProjection, seed),
        tokenizer=_tokenizer(16),
        text_encoder_2=_clip(transformers.CLIPTextModelWithProjection, seed + 1),
        tokenizer_2=_tokenizer(16),
        text_encoder_3=_t5(transformers.T5EncoderModel, seed, width=4 * WIDTH),
        tokenizer_3=_tokenizer(16),
        transformer=_random(
            diffusers.SD3Transformer2DModel(
                sample_size=32,
                patch_size=1,
                in_channels=4,
                out_channels=4,
                num_layers=2,
                attention_head_dim=8,
                num_attention_heads=4,
                caption_projection_dim=32,
                joint_attention_dim=4 * WIDTH,
                pooled_projection_dim=2 * WIDTH,
                pos_embed_max_size=96,
            ),
            seed,
        ),
    )


def cogvideox(seed: int = 0) -> diffusers.CogVideoXPipeline:
    """Text to video with a scheduler that looks back a step."""
    return diffusers.CogVideoXPipeline(
        tokenizer=_tokenizer(16),
        text_encoder=_t5(transformers.T5EncoderModel, seed),
        vae=_random(
            diffusers.AutoencoderKLCogVideoX(
                down_block_types=("CogVideoXDownBlock3D",) * 4,
                up_block_types=("CogVideoXUpBlock3D",) * 4,
                block_out_channels=(8, 8, 8, 8),
                latent_channels=4,
                layers_per_block=1,
                norm_num_groups=2,
                temporal_compression_ratio=4,
            ),
            seed,
        ),
        transformer=_random(
            diffusers.CogVideoXTransformer3DModel(
                num_attention_heads=4,
                attention_head_dim=16,
                in_channels=4,
                out_channels=4,
                time_embed_dim=2,
                text_embed_dim=WIDTH,
                num_layers=1,
                sample_width=2,
                sample_height=2,
                sample_frames=9,
                patch_size=2,
                temporal_compression_ratio=4,
                max_text_seq_length=16,
                use_rotary_positional_embeddings=True,
                use_learned_positional_embeddings=False,
            ),
            seed,
        ),
        scheduler=diffusers.CogVideoXDPMScheduler(),
    )


def _random(module: nn.Module, seed: int) -> Any:
    randomise(module, seed)
    return module.eval()


def _image_vae(seed: int) -> Any:
    return _random(
        diffusers.AutoencoderKL(
            in_channels=3,
            out_channels=3,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(4, 8),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=2,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.06,
            scaling_factor=1.5,
        ),
        seed,
    )


def _clip(cls: Any, seed: int) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        projection_dim=WIDTH,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    return _random(cls(config), seed)


def _t5(cls: Any, seed: int, width: int = WIDTH) -> Any:
    config_class = cls.config_class
    config = config_class(
        vocab_size=len(WORDS), d_model=width, d_ff=37, d_kv=8, num_heads=4, num_layers=2, pad_token_id=0, eos_token_id=1
    )
    return _random(cls(config), seed)


def _tokenizer(length: int) -> Any:
    """A word a token."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=length
    )
