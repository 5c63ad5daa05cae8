"""A small random transformer: streams of tokens, layers, outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention import joint_attention, linear_attention, mix, self_attention, similarity, squeeze_excite
from .draft import Forward
from .layers import LAYERS, grid_of, norm, wild

__all__ = ["transformer"]


@dataclass
class Trunk:
    """What the layers work on.

    Attributes:
        streams: tokens, ``[B, S, C]`` each.
        condition: ``[B, C]``.
        saved: earlier values of streams, for long residuals.
        outputs: what the model returns, streams apart.
    """

    streams: list[Tensor]
    condition: Tensor
    saved: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


def _tokens(f: Forward, batch: int, rows: int, channels: int) -> Tensor:
    origin = f.of("input", "input", "linear", "ids", "image", "first", "learned", "sum")
    f.note(f"tokens: {origin}")
    if origin == "linear":
        return F.linear(f.tensor(batch, rows, 3), f.weight(channels, 3))
    if origin == "ids":
        ids = f.index(batch, rows, below=6)
        return F.embedding(ids, f.tensor(6, channels)) + F.embedding(torch.arange(rows), f.tensor(rows + 1, channels))
    if origin == "image":
        h, w = grid_of(f, rows)
        image = F.conv2d(f.tensor(batch, 3, 2 * h, 2 * w), f.tensor(channels, 3, 2, 2, scale=0.3), stride=2)
        return image.flatten(2).transpose(1, 2)
    if origin == "first":
        return f.tensor(rows, batch, channels).transpose(0, 1)
    if origin == "learned":
        return (
            f.tensor(1, rows, channels).expand(batch, -1, -1)
            if f.chance()
            else f.tensor(rows, channels).repeat(batch, 1, 1)
        )
    if origin == "sum":
        return f.tensor(batch, rows, channels) + f.tensor(1, rows, channels)
    return f.tensor(batch, rows, channels, trained=f.chance())


def _attend(f: Forward, t: Trunk) -> None:
    kind = f.of("self", "self", "cross", "joint", "joint", "linear", "mix", "similarity", "excite")
    i = f.upto(0, len(t.streams) - 1)
    x = t.streams[i]
    if kind == "cross":
        others = [s for j, s in enumerate(t.streams) if j != i] or [f.tensor(*x.shape[:1], f.upto(1, 5), x.shape[-1])]
        y = self_attention(f, norm(f, x, t.condition), f.one(others))
    elif kind == "joint" and len(t.streams) > 1:
        outs = joint_attention(f, [norm(f, s, t.condition) for s in t.streams])
        t.streams = [s + o if f.chance() else o for s, o in zip(t.streams, outs)]
        return
    else:
        layer = {"linear": linear_attention, "mix": mix, "similarity": similarity, "excite": squeeze_excite}
        y = layer.get(kind, self_attention)(f, norm(f, x, t.condition))
    gate = torch.tanh(F.linear(t.condition, f.weight(x.shape[-1], x.shape[-1])))[:, None] if f.chance() else 1.0
    t.streams[i] = x + gate * y


def _layer(f: Forward, t: Trunk) -> None:
    i = f.upto(0, len(t.streams) - 1)
    x = t.streams[i]
    y = f.of(*LAYERS)(f, norm(f, x, t.condition))
    t.streams[i] = x + y * 0.5 if f.chance() else y


def _join(f: Forward, t: Trunk) -> None:
    """Streams become one, or one becomes two."""
    if len(t.streams) > 1:
        f.note("streams joined")
        a, b = t.streams.pop(), t.streams.pop()
        t.streams.append(torch.cat([a, b], 1))
        return
    x = t.streams.pop()
    rows = x.shape[1]
    f.note("stream cut")
    at = f.upto(1, rows)
    t.streams += [x[:, :at], x[:, at:]] if at < rows else [x, x.tanh()]


def _residual(f: Forward, t: Trunk) -> None:
    """A stream as it was before, or an input of its length."""
    i = f.upto(0, len(t.streams) - 1)
    alike = [s for s in t.saved if s.shape == t.streams[i].shape]
    f.note("long residual")
    t.streams[i] = t.streams[i] + (f.one(alike) if alike else f.tensor(*t.streams[i].shape))


def _pool(f: Forward, t: Trunk) -> None:
    """A vector of a stream goes into the condition, or out."""
    x = t.streams[f.upto(0, len(t.streams) - 1)]
    style = f.of("mean", "masked", "first", "last", "max", "softmax", "logsumexp", "dot", "attention", "adaptive")
    f.note(f"pool: {style}")
    if style == "mean":
        vector = x.mean(1)
    elif style == "masked":
        mask = f.mask(*x.shape[:2]).to(x.dtype)[..., None]
        vector = (x * mask).sum(1) / mask.sum(1).clamp(min=1)
    elif style in ("first", "last"):
        vector = x[:, 0 if style == "first" else -1]
    elif style == "max":
        vector = x.amax(1)
    elif style == "softmax":
        vector = (F.linear(x, f.weight(1, x.shape[-1])).softmax(1) * x).sum(1)
    elif style == "logsumexp":
        vector = x.logsumexp(1)
    elif style == "dot":
        vector = torch.einsum("bsc,bs->bc", x, f.tensor(*x.shape[:2], scale=0.3))
    elif style == "attention":
        vector = self_attention(f, t.condition[:, None], x).squeeze(1)
    else:
        vector = F.adaptive_avg_pool1d(x.mT, 1).flatten(1)
    if f.chance():
        t.condition = t.condition + torch.tanh(vector)
    else:
        t.outputs.append(vector)


def _side(f: Forward, t: Trunk) -> None:
    """Something of a stream is returned."""
    t.outputs.append(wild(f, t.streams[f.upto(0, len(t.streams) - 1)]))


def _write_input(f: Forward, t: Trunk) -> None:
    """An input is written to: a cache, a counter."""
    f.note("input written")
    x = t.streams[f.upto(0, len(t.streams) - 1)]
    style = f.of("copy", "slice", "add")
    if style == "copy":
        f.tensor(*x.shape, trained=False).copy_(x.detach())
        return
    cache = f.tensor(x.shape[0], x.shape[1] + 2, x.shape[2], trained=False)
    if style == "slice":
        cache[:, 1:-1] = x.detach() * 0.5
    else:
        cache.add_(x.detach().mean(1, keepdim=True))
    if f.chance():
        i = f.upto(0, len(t.streams) - 1)
        t.streams[i] = self_attention(f, t.streams[i], cache)


def _return(f: Forward, x: Tensor) -> Tensor:
    style = f.of("as it is", "as it is", "linear", "transposed", "mean", "image", "view", "sum", "first")
    f.note(f"output: {style}")
    if style == "linear":
        return F.linear(F.layer_norm(x, x.shape[-1:]), f.weight(3, x.shape[-1]))
    if style == "transposed":
        return x.transpose(0, 1)
    if style == "mean":
        return x.mean()
    if style == "image":
        h, w = grid_of(f, x.shape[1])
        return x.view(x.shape[0], h, w, -1, 1).permute(0, 3, 1, 4, 2).flatten(3) if x.is_contiguous() else x
    if style == "view":
        return x.reshape(-1, x.shape[-1])
    if style == "sum":
        return (x**2).sum((1, 2)).mean()
    return x[:, 0] if style == "first" else x


STEPS = [_attend, _attend, _attend, _layer, _layer, _layer, _layer, _join, _residual, _pool, _side, _write_input]


def transformer(f: Forward) -> list[Tensor]:
    """Draw and run a transformer; its outputs."""
    batch = f.of(1, 2, 2, 3)
    channels = f.of(4, 8, 6, 12)
    rows = [f.of(4, 9, 6, 8, 5, 12, 7, 3, 2, 1, batch, channels) for _ in range(f.of(1, 1, 2, 2, 3))]
    t = Trunk([_tokens(f, batch, n, channels) for n in rows], f.tensor(batch, channels))
    for _ in range(f.upto(1, 4)):
        f.of(*STEPS)(f, t)
        t.saved.append(t.streams[0])
        if sum(s.shape[1] for s in t.streams) > 40:
            break
    if not f.kinds["self attention"] + f.kinds["cross attention"] + f.kinds["joint attention"]:
        t.streams[-1] = t.streams[-1] + self_attention(f, t.streams[-1])
    return [*(_return(f, s) for s in t.streams), *t.outputs]
