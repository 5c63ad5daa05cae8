"""Attention layers, in the ways in which models write them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .draft import Forward

__all__ = ["heads_for", "joint_attention", "linear_attention", "mix", "self_attention", "similarity", "squeeze_excite"]


def heads_for(f: Forward, channels: int) -> int:
    return f.of(*[h for h in (1, 2, 3, 4) if channels % h == 0])


def split_heads(f: Forward, x: Tensor, heads: int) -> Tensor:
    """``[B, S, H*D]`` to ``[B, H, S, D]``."""
    batch, rows, channels = x.shape
    style = f.of("view", "unflatten", "reshape", "inner")
    if style == "view":
        return x.view(batch, -1, heads, channels // heads).transpose(1, 2)
    if style == "unflatten":
        return x.unflatten(-1, (heads, -1)).permute(0, 2, 1, 3)
    if style == "reshape":
        return x.reshape(batch, rows, heads, channels // heads).permute(0, 2, 1, 3).contiguous()
    return x.reshape(batch, rows, channels // heads, heads).permute(0, 3, 1, 2)


def merge_heads(f: Forward, x: Tensor) -> Tensor:
    """``[B, H, S, D]`` to ``[B, S, H*D]``."""
    style = f.of("flatten", "reshape", "permute")
    if style == "flatten":
        return x.transpose(1, 2).flatten(2)
    if style == "reshape":
        return x.transpose(1, 2).reshape(x.shape[0], -1, x.shape[1] * x.shape[3])
    return x.permute(0, 2, 1, 3).contiguous().view(x.shape[0], x.shape[2], -1)


def rotate(f: Forward, x: Tensor, style: str) -> Tensor:
    """Rotary embedding of ``[B, H, S, D]``, D even."""
    rows, half = x.shape[-2], x.shape[-1] // 2
    where = f.of("input", "table", "made", "by batch")
    if where == "input":
        angles = f.tensor(rows, half)
    elif where == "table":
        start = f.upto(0, 2)
        angles = f.tensor(rows + 3, half)[start : start + rows]
    elif where == "made":
        angles = torch.outer(torch.arange(rows, dtype=torch.float64), f.tensor(half))
    else:
        angles = f.tensor(x.shape[0], rows, half)[:, None]
    if style == "complex":
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], half, 2).contiguous())
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).flatten(-2)
    if style == "halves":
        cos, sin = (torch.cat([a, a], -1) for a in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin
    cos, sin = (a.repeat_interleave(2, -1) for a in (angles.cos(), angles.sin()))
    if style == "stack":
        real, imag = x.reshape(*x.shape[:-1], half, 2).unbind(-1)
        return x * cos + torch.stack([-imag, real], -1).flatten(-2) * sin
    out = torch.empty_like(x)  # Wan writes into an empty tensor
    out[..., 0::2] = x[..., 0::2] * cos[..., 0::2] - x[..., 1::2] * sin[..., 0::2]
    out[..., 1::2] = x[..., 0::2] * sin[..., 1::2] + x[..., 1::2] * cos[..., 1::2]
    return out


def draw_mask(f: Forward, batch: int, heads: int, rows: int, keys: int) -> Tensor | None:
    """A mask that broadcasts to ``[B, H, Sq, Sk]``; no row of a boolean one is masked everywhere."""
    kind = f.of(None, None, "keys", "dense", "float", "bias", "pair", "causal", "window", "table", "packed")
    f.note(f"mask: {kind}")
    if kind is None:
        return None
    if kind == "float":
        return f.tensor(*f.of((batch, 1, rows, keys), (rows, keys), (1, 1, 1, keys), (batch, heads, 1, keys)))
    if kind == "bias":
        return f.tensor(f.of(1, batch), heads, rows, keys)
    if kind == "table":
        distance = torch.arange(rows)[:, None] - torch.arange(keys)[None, :]
        return F.embedding(distance.clamp(-3, 3) + 3, f.tensor(7, heads)).permute(2, 0, 1).unsqueeze(0)
    first = torch.arange(keys) == 0
    if kind == "keys":
        mask = (f.mask(batch, keys) | first)[:, None, None, :]
        if f.chance():
            return mask.expand(-1, -1, rows, -1)
        return (1.0 - mask.to(torch.float64)) * -10000.0 if f.chance() else mask
    if kind == "dense":
        return f.mask(*f.of((batch, 1, rows, keys), (rows, keys), (batch, heads, rows, keys))) | first
    if kind == "causal":
        if f.chance():
            return torch.ones(rows, keys, dtype=torch.bool).tril()
        return torch.arange(keys)[None, :] <= torch.arange(rows)[:, None]
    if kind == "window":
        return ((torch.arange(rows)[:, None] - torch.arange(keys)[None, :]).abs() < 2) | first
    if kind == "pair":
        return (f.mask(batch, rows)[:, None, :, None] & f.mask(batch, keys)[:, None, None, :]) | first
    segment = f.index(batch, max(rows, keys), below=2)
    return (segment[:, None, :rows, None] == segment[:, None, None, :keys]) | first


def attend(f: Forward, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of ``[B, H, S, D]``, keys and values perhaps of fewer heads."""
    batch, heads, rows, dim = q.shape
    kernel = f.of("sdpa", "sdpa", "sdpa", "matmul", "einsum", "baddbmm", "fill")
    f.note(f"kernel: {kernel}")
    if k.shape[1] != heads:
        f.note("grouped queries")
        groups = heads // k.shape[1]
        style = f.of("op", "interleave", "expand")
        if style == "op" and kernel == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=f.chance(), enable_gqa=True)
        if style == "expand":
            k, v = (x[:, :, None].expand(-1, -1, groups, -1, -1).reshape(batch, heads, -1, dim) for x in (k, v))
        else:
            k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    if kernel == "sdpa":
        if f.chance(4):
            f.note("causal")
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=f.of(None, 0.3))
        mask = draw_mask(f, batch, heads, rows, k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=f.of(None, 0.3))
    if kernel == "einsum":
        weights = torch.einsum("bhqd,bhkd->bhqk", q, k).mul(dim**-0.5).softmax(-1)
        return torch.einsum("bhqk,bhkd->bhqd", weights, v)
    if kernel == "baddbmm":
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        scores = torch.baddbmm(q.new_zeros(q.shape[0], rows, k.shape[1]), q, k.mT, beta=0, alpha=0.5)
        return torch.bmm(scores.softmax(-1), v).unflatten(0, (batch, heads))
    scores = q @ k.transpose(-1, -2)
    if kernel == "fill":
        hidden = (f.mask(batch, 1, rows, k.shape[2]) | (torch.arange(k.shape[2]) == 0)).logical_not()
        return (scores / dim**0.5).masked_fill(hidden, -1e4).softmax(-1) @ v
    mask = draw_mask(f, batch, heads, rows, k.shape[2])
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -1e4).to(torch.float64)
    return ((scores * dim**-0.5 + mask) if mask is not None else scores * dim**-0.5).softmax(-1) @ v


def project(f: Forward, x: Tensor, context: Tensor, heads: int, kv_heads: int) -> list[Tensor]:
    """Query of ``x``, key and value of ``context``, as ``[B, H, S, D]``."""
    batch, rows, channels = x.shape
    dim = channels // heads
    if x is context and heads == kv_heads and f.chance():
        packed = F.linear(x, f.weight(3 * channels, channels), f.tensor(3 * channels, scale=0.1))
        style = f.of("chunk", "unbind", "permute", "split")
        if style == "unbind":
            return [t.transpose(1, 2) for t in packed.view(batch, rows, 3, heads, dim).unbind(2)]
        if style == "permute":
            q, k, v = packed.reshape(batch, rows, 3, heads, dim).permute(2, 0, 3, 1, 4)
            return [q, k, v]
        pieces = packed.chunk(3, -1) if style == "chunk" else packed.split([channels] * 3, -1)
        return [t.unflatten(-1, (heads, dim)).transpose(1, 2) for t in pieces]
    q = split_heads(f, F.linear(x, f.weight(channels, channels)), heads)
    k, v = (split_heads(f, F.linear(context, f.weight(dim * kv_heads, channels)), kv_heads) for _ in range(2))
    return [q, k, v]


def self_attention(f: Forward, x: Tensor, context: Tensor | None = None) -> Tensor:
    """Attention of ``x`` to itself or to a context: ``[B, S, C]``."""
    f.note("cross attention" if context is not None else "self attention")
    channels = x.shape[-1]
    heads = heads_for(f, channels)
    kv_heads = f.of(heads, heads, *[n for n in range(1, heads) if heads % n == 0])
    q, k, v = project(f, x, x if context is None else context, heads, kv_heads)
    if f.chance(4):
        q, k = (F.rms_norm(t, (q.shape[-1],)) for t in (q, k))
    if channels // heads % 2 == 0 and f.chance():
        style = f.of("complex", "halves", "stack", "write")
        f.note(f"rotary: {style}")
        q = rotate(f, q, style)
        k = rotate(f, k, style) if context is None else k
    out = merge_heads(f, attend(f, q, k, v))
    return F.linear(out, f.weight(channels, channels)) if f.chance() else out


def joint_attention(f: Forward, streams: list[Tensor]) -> list[Tensor]:
    """Each stream has its own projections; all attend to all. Concatenated before or after the heads are split."""
    f.note("joint attention")
    channels = streams[0].shape[-1]
    heads = heads_for(f, channels)
    late = f.chance()
    if late:
        parts = [project(f, x, x, heads, heads) for x in streams]
        q, k, v = (torch.cat(p, 2) for p in zip(*parts))
    else:
        joined = [torch.cat([F.linear(x, f.weight(channels, channels)) for x in streams], 1) for _ in range(3)]
        q, k, v = (split_heads(f, x, heads) for x in joined)
    if channels // heads % 2 == 0 and f.chance():
        style = f.of("complex", "halves", "stack")
        q, k = rotate(f, q, style), rotate(f, k, style)
    out = attend(f, q, k, v)
    sizes = [x.shape[1] for x in streams]
    if late and f.chance():
        return [merge_heads(f, t) for t in out.split(sizes, 2)]
    out = merge_heads(f, out)
    style = f.of("split", "slice", "narrow", "from the end")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    if style == "split":
        return list(out.split(sizes, 1))
    if style == "narrow":
        return [out.narrow(1, at, n) for at, n in zip(starts, sizes)]
    if style == "from the end":
        total = sum(sizes)
        return [out[:, at - total : (at + n - total) or None] for at, n in zip(starts, sizes)]
    return [out[:, at : at + n] for at, n in zip(starts, sizes)]


def linear_attention(f: Forward, x: Tensor) -> Tensor:
    """``q (k^T v)``, normalised by the sum of keys."""
    f.note("linear attention")
    heads = heads_for(f, x.shape[-1])
    q, k, v = project(f, x, x, heads, heads)
    q, k = F.softplus(q), F.softplus(k)
    if f.chance():
        return merge_heads(f, (q @ (k.transpose(-1, -2) @ v)) / (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True))
    if f.chance():
        v = F.pad(v, (0, 1), value=1.0)  # Sana: the column of ones makes the normaliser
        out = q @ torch.matmul(k.mT, v)
        return merge_heads(f, out[..., :-1] / out[..., -1:])
    return merge_heads(f, torch.einsum("bhsd,bhde->bhse", q, torch.einsum("bhsd,bhse->bhde", k, v)) * 0.1)


def mix(f: Forward, x: Tensor) -> Tensor:
    """A weighted sum of all tokens at each place, in ways that are no attention."""
    f.note("mixer")
    rows = x.shape[1]
    style = f.of("linear", "matmul", "einsum", "left")
    weight = f.weight(rows, rows)
    if style == "linear":
        return F.linear(x.transpose(1, 2), weight).transpose(1, 2)
    if style == "matmul":
        return torch.matmul(weight, x)
    if style == "einsum":
        return torch.einsum("ts,bsc->btc", weight, x)
    return (x.mT @ weight).mT


def similarity(f: Forward, x: Tensor) -> Tensor:
    """Products of tokens with tokens, used whole."""
    f.note("similarity")
    scores = x @ x.transpose(1, 2) * 0.1 if f.chance() else torch.einsum("bsc,btc->bst", x, x) * 0.1
    return torch.tanh(scores) @ x if f.chance() else x * scores.sum(f.of(1, 2)).sigmoid()[..., None]


def squeeze_excite(f: Forward, x: Tensor) -> Tensor:
    """Each channel is scaled by what all tokens have in it."""
    f.note("squeeze and excite")
    return x * torch.sigmoid(F.linear(x.mean(1, keepdim=True), f.weight(x.shape[-1], x.shape[-1])))
