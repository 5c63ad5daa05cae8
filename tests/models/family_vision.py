"""Vision and text encoders, torch's own attention modules, and FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tests.models.families import Draw, register

_BLOCKS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "attn_implementation": "sdpa",
}
_TEXT = {**_BLOCKS, "vocab_size": 96, "max_position_embeddings": 32}
_PICTURE = {**_BLOCKS, "image_size": 56, "patch_size": 4}  # 14 x 14 patches, and a class token: 197
_BERT = {**_TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Values(nn.Module):
    """A model of ``transformers`` that gives a tuple of tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> tuple[Tensor, ...]:
        return tuple(x for x in self.model(**inputs, return_dict=False) if isinstance(x, Tensor))


def clip() -> nn.Module:
    config = transformers.CLIPConfig(
        text_config={**_TEXT, "eos_token_id": 2}, vision_config=_PICTURE, projection_dim=16, attn_implementation="sdpa"
    )
    return Values(transformers.CLIPModel(config))


def clip_text() -> nn.Module:
    return Values(transformers.CLIPTextModel(transformers.CLIPTextConfig(**_TEXT, eos_token_id=2)))


def swin() -> nn.Module:
    """Windows of 4 x 4 patches, every second layer's shifted by two."""
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, drop_path_rate=0.0
    )
    return Values(transformers.SwinModel(config))


def t5() -> nn.Module:
    """Bias by relative position, a table shared by all layers."""
    config = transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
        relative_attention_max_distance=12, dropout_rate=0.0,
    )  # fmt: skip
    return Values(transformers.T5EncoderModel(config))


def text(length: int) -> Callable[[Draw], dict[str, Any]]:
    """Two texts, the second one padded by four."""

    def inputs(draw: Draw) -> dict[str, Any]:
        mask = torch.ones(2, length, dtype=torch.long)
        mask[1, -4:] = 0
        return {"input_ids": draw.ids(2, length), "attention_mask": mask}

    return inputs


def picture(size: int) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {"pixel_values": draw.numbers(2, 3, size, size)}


def picture_and_text(draw: Draw) -> dict[str, Any]:
    return {**text(11)(draw), **picture(56)(draw)}


class SelfAttention(nn.Module):
    """``nn.MultiheadAttention`` over one value, with a mask over padded keys."""

    def __init__(self, weights: bool, causal: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.out = nn.Linear(32, 32)
        self.weights, self.causal = weights, causal

    def forward(self, x: Tensor, padded: Tensor | None = None) -> tuple[Tensor, ...]:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        y, weights = self.attention(
            x, x, x, key_padding_mask=padded, need_weights=self.weights, attn_mask=mask, is_causal=self.causal
        )
        y = self.out(y)
        return (y,) if weights is None else (y, weights)


class Crossing(nn.Module):
    """``nn.MultiheadAttention`` with keys of another size and length, tokens first."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, kdim=24, vdim=24)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        return x + self.attention(x, text, text, need_weights=False)[0]


class Encoder(nn.Module):
    """``nn.TransformerEncoder``; a mask over padded keys where there is one."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, padded: Tensor | None = None) -> Tensor:
        return self.layers(x, src_key_padding_mask=padded)


class Decoder(nn.Module):
    """``nn.TransformerDecoder``: causal over its own tokens, and crossing to a memory."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerDecoder(layer, 2)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layers(x, memory, tgt_mask=causal, tgt_is_causal=True)


def tokens(draw: Draw) -> dict[str, Any]:
    return {"x": draw.numbers(2, 13, 32)}


def tokens_padded(draw: Draw) -> dict[str, Any]:
    return {**tokens(draw), "padded": torch.arange(13) >= torch.tensor([[9], [13]])}


class Flex(nn.Module):
    """FlexAttention whose mask and score functions see global indices.

    Args:
        kind: ``documents``, ``window`` or ``bias``.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.slopes = nn.Parameter(torch.zeros(4))
        self.kind = kind

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        y = flex_attention(q, k, v, score_mod=self._score(), block_mask=self._mask(x, document))
        return x + self.out(y.transpose(1, 2).flatten(2))

    def _mask(self, x: Tensor, document: Tensor) -> BlockMask | None:
        if self.kind == "bias":
            return None

        def same_document(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return document[b, row] == document[b, column]

        def window(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return (row >= column) & (row - column < 4)

        seen = same_document if self.kind == "documents" else window
        return create_block_mask(seen, x.shape[0], None, x.shape[1], x.shape[1], device=str(x.device))

    def _score(self) -> Callable[..., Tensor] | None:
        if self.kind != "bias":
            return None
        slopes = self.slopes

        def by_distance(score: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return score - slopes[h] * (row - column).abs()

        return by_distance


def documents(draw: Draw) -> dict[str, Any]:
    return {**tokens(draw), "document": torch.tensor([0] * 5 + [1] * 6 + [2] * 2).expand(2, 13)}


register("vit, 197 tokens", lambda: Values(transformers.ViTModel(transformers.ViTConfig(**_PICTURE))), picture(56))
register("dinov2", lambda: Values(transformers.Dinov2Model(transformers.Dinov2Config(**_PICTURE))), picture(56))
register("swin", swin, picture(32))
register("clip", clip, picture_and_text)
register(
    "clip text",
    lambda: Values(transformers.CLIPTextModel(transformers.CLIPTextConfig(**_TEXT, eos_token_id=2))),
    text(11),
)
register("bert", lambda: Values(transformers.BertModel(transformers.BertConfig(**_BERT))), text(13))
register("t5 encoder", t5, text(13))
for _mode in ("train", "eval"):
    _training = _mode == "train"
    register(f"nn.TransformerEncoder, {_mode}", Encoder, tokens, training=_training)
    register(f"nn.TransformerEncoder, {_mode}, padded", lambda: Encoder(True), tokens_padded, training=_training)
    for _weights in (True, False):
        _name = f"nn.MultiheadAttention, {_mode}, {'with' if _weights else 'without'} weights"
        register(_name, lambda w=_weights: SelfAttention(w), tokens, training=_training)
        register(f"{_name}, padded", lambda w=_weights: SelfAttention(w), tokens_padded, training=_training)
register("nn.MultiheadAttention, causal", lambda: SelfAttention(False, causal=True), tokens, training=True)
register(
    "nn.MultiheadAttention, other keys", Crossing, lambda d: {"x": d.numbers(13, 2, 32), "text": d.numbers(7, 2, 24)}
)
register("nn.TransformerDecoder", Decoder, lambda d: {**tokens(d), "memory": d.numbers(2, 7, 32)})
for _kind in ("documents", "window", "bias"):
    register(f"flex attention, {_kind}", lambda k=_kind: Flex(k), documents)
