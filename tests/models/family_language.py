"""Language models of ``transformers``: causal, padded, packed, with a loss, with a static cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.models.families import Draw, register

LENGTH = 13
"""Odd, so that no number of ranks divides it."""

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Class of the model, class of its config, what the config has besides sizes.
_DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 5}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {"sliding_window": 5, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"sliding_window": 5, "query_pre_attn_scalar": 8}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 2}),
}


class Logits(nn.Module):
    """A language model that gives its logits, and its loss where there are labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> tuple[Tensor, ...]:
        out = self.model(**inputs, use_cache=False)
        return (out.logits,) if out.loss is None else (out.loss, out.logits)


class Prefill(nn.Module):
    """A language model that fills a static cache, and gives it with the logits."""

    def __init__(self, model: nn.Module, slots: int) -> None:
        super().__init__()
        self.model, self.slots = model, slots

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        cache = transformers.StaticCache(config=self.model.config, max_cache_len=self.slots)
        logits = self.model(input_ids=input_ids, past_key_values=cache, use_cache=True).logits
        return (logits, *(x for layer in cache.layers for x in (layer.keys, layer.values)))


def decoder(name: str, attention: str = "sdpa", **more: Any) -> nn.Module:
    """A causal language model without a head of its own for the cache."""
    cls, config, extra = _DECODERS[name]
    made = getattr(transformers, config)(**{**_SIZES, **extra, **more}, attn_implementation=attention)
    return getattr(transformers, cls)(made)


def gpt2(attention: str = "sdpa") -> nn.Module:
    """GPT-2, whose config has names of its own; without dropout, so that training can be compared."""
    config = transformers.GPT2Config(
        vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=4, attn_implementation=attention,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def plain(draw: Draw) -> dict[str, Any]:
    return {"input_ids": draw.ids(2, LENGTH)}


def padded(side: str) -> Callable[[Draw], dict[str, Any]]:
    """Two texts, the first of nine tokens."""

    def inputs(draw: Draw) -> dict[str, Any]:
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[0, slice(0, 4) if side == "left" else slice(9, None)] = 0
        return {"input_ids": draw.ids(2, LENGTH) * mask, "attention_mask": mask}

    return inputs


def packed(draw: Draw) -> dict[str, Any]:
    """Three texts one after another in one row, told apart by positions that start anew."""
    positions = torch.cat([torch.arange(n) for n in (5, 6, 2)])[None]
    return {"input_ids": draw.ids(1, LENGTH), "position_ids": positions}


def labelled(draw: Draw) -> dict[str, Any]:
    """Next-token labels, which the model shifts itself; some do not count."""
    ids = draw.ids(2, LENGTH)
    labels = ids.clone()
    labels[0, :4] = -100
    labels[1, 7] = -100
    return {"input_ids": ids, "labels": labels}


def last_only(draw: Draw) -> dict[str, Any]:
    return {**plain(draw), "logits_to_keep": 1}


for _name in _DECODERS:
    if _name != "gemma2":  # it caps its scores, and refuses SDPA
        register(_name, lambda n=_name: Logits(decoder(n)), plain)
for _name in ("llama", "qwen2", "mistral", "gemma2"):
    register(f"{_name}, eager attention", lambda n=_name: Logits(decoder(n, "eager")), plain)
for _name in ("llama", "qwen3", "mistral", "gemma"):
    for _side in ("left", "right"):
        register(f"{_name}, padded on the {_side}", lambda n=_name: Logits(decoder(n)), padded(_side))
    register(f"{_name}, packed", lambda n=_name: Logits(decoder(n)), packed)
    register(f"{_name}, with a loss", lambda n=_name: Logits(decoder(n)), labelled)
register("llama, eager attention, padded on the left", lambda: Logits(decoder("llama", "eager")), padded("left"))
register("llama, last logits", lambda: Logits(decoder("llama")), last_only)
register("llama, static cache", lambda: Prefill(decoder("llama"), 24), plain)
register("mistral, static cache", lambda: Prefill(decoder("mistral", sliding_window=None), 24), plain)
register("gpt2", lambda: Logits(gpt2()), plain)
register("gpt2, eager attention", lambda: Logits(gpt2("eager")), plain)
register("gpt2, padded on the left", lambda: Logits(gpt2()), padded("left"))
register("gpt2, padded on the right", lambda: Logits(gpt2()), padded("right"))
register("gpt2, with a loss", lambda: Logits(gpt2()), labelled)
register("gpt2, with a loss, in training", lambda: Logits(gpt2()), labelled, training=True)
