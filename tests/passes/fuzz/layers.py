"""Layers of ``[B, S, C]`` to ``[B, S, C]`` that are no attention, or put one among other tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention import self_attention
from .draft import Forward

__all__ = ["LAYERS", "WILD", "grid_of", "norm", "wild"]


def norm(f: Forward, x: Tensor, condition: Tensor) -> Tensor:
    """A normalisation, perhaps modulated by a vector or by token."""
    channels = x.shape[-1]
    kind = f.of("layer", "rms", "affine", "by hand", "group", "none")
    if kind == "layer":
        x = F.layer_norm(x, (channels,))
    elif kind == "affine":
        x = F.layer_norm(x, (channels,), f.tensor(channels), f.tensor(channels))
    elif kind == "rms":
        x = F.rms_norm(x, (channels,), f.tensor(channels))
    elif kind == "by hand":
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    elif kind == "group":
        f.note("group norm over tokens")
        x = F.group_norm(x.transpose(1, 2), 2 if channels % 2 == 0 else 1).transpose(1, 2)
    style = f.of("none", "vector", "chunk", "token", "table")
    if style == "none":
        return x
    f.note(f"modulation: {style}")
    if style == "vector":
        return x * (1 + F.linear(F.silu(condition), f.weight(channels, channels))[:, None])
    if style == "chunk":
        shift, scale = F.linear(condition, f.weight(2 * channels, channels)).unsqueeze(1).chunk(2, -1)
        return x * (1 + scale) + shift
    if style == "token":
        shift, scale = f.tensor(x.shape[0], x.shape[1], 2, channels).unbind(2)
        return x * (1 + scale) + shift
    table = f.tensor(1, 2, channels) + condition[:, None]
    return x * (1 + table[:, 0, None]) + table[:, 1:2]


def mlp(f: Forward, x: Tensor) -> Tensor:
    f.note("mlp")
    channels = x.shape[-1]
    style = f.of("gelu", "gated", "flat", "conv")
    if style == "gated":
        a, b = F.linear(x, f.weight(4 * channels, channels)).chunk(2, -1)
        return F.linear(F.silu(a) * b, f.weight(channels, 2 * channels))
    if style == "flat":  # tokens merged with the batch
        y = x.reshape(-1, channels)
        y = torch.addmm(f.tensor(channels), y, f.weight(channels, channels)).tanh()
        return y.view(x.shape)
    if style == "conv":
        return F.conv1d(x.transpose(1, 2), f.tensor(channels, channels, 1, scale=0.3)).transpose(1, 2)
    hidden = F.gelu(F.linear(x, f.weight(2 * channels, channels), f.tensor(2 * channels)))
    return F.linear(hidden, f.weight(channels, 2 * channels))


def grid_of(f: Forward, rows: int) -> tuple[int, int]:
    height = f.of(*[h for h in range(1, rows + 1) if rows % h == 0])
    return height, rows // height


def convolution(f: Forward, x: Tensor) -> Tensor:
    """Tokens as pixels."""
    batch, rows, channels = x.shape
    h, w = grid_of(f, rows)
    style = f.of("point", "depthwise", "full", "tokens", "strided")
    f.note(f"convolution: {style}")
    if style == "tokens":
        return F.conv1d(x.mT, f.tensor(channels, 1, 3, scale=0.5), padding=1, groups=channels).mT
    image = (
        x.transpose(1, 2).reshape(batch, channels, h, w)
        if f.chance()
        else x.view(batch, h, w, channels).permute(0, 3, 1, 2)
    )
    if style == "point":
        image = F.conv2d(image, f.tensor(channels, channels, 1, 1, scale=0.3), f.tensor(channels))
    elif style == "depthwise":
        image = F.conv2d(image, f.tensor(channels, 1, 3, 3, scale=0.3), padding=1, groups=channels)
    elif style == "full":
        image = F.conv2d(image, f.tensor(channels, channels, 3, 3, scale=0.1), padding=1)
    else:
        k = 2 if h % 2 == 0 and w % 2 == 0 else 1
        image = F.conv2d(image, f.tensor(channels, channels, k, k, scale=0.3), stride=k)
        image = image.repeat_interleave(k, 2).repeat_interleave(k, 3)
    return image.flatten(2).transpose(1, 2)


def patches(f: Forward, x: Tensor) -> Tensor:
    """Neighbouring tokens are one, and are taken apart again."""
    batch, rows, channels = x.shape
    h, w = grid_of(f, rows)
    a, b = f.of(*[n for n in (1, 2, 3) if h % n == 0]), f.of(*[n for n in (1, 2, 3) if w % n == 0])
    f.note("patches")
    y = x.view(batch, h // a, a, w // b, b, channels)
    if f.chance():
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(batch, -1, a * b * channels)
        y = torch.tanh(F.linear(y, f.weight(a * b * channels, a * b * channels)))
        return y.view(batch, h // a, w // b, a, b, channels).permute(0, 1, 3, 2, 4, 5).reshape(x.shape)
    y = torch.einsum("bhpwqc,cd->bpqhwd", y, f.weight(channels, channels)).flatten(3, 4).flatten(1, 2)
    y = torch.tanh(y)  # [B, pixels of a patch, patches, C]
    return y.view(batch, a, b, h // a, w // b, channels).permute(0, 3, 1, 4, 2, 5).reshape(x.shape)


def windows(f: Forward, x: Tensor) -> Tensor:
    """Attention in windows of the grid, perhaps shifted."""
    batch, rows, channels = x.shape
    h, w = grid_of(f, rows)
    a, b = f.of(*[n for n in (1, 2, 3, h) if h % n == 0]), f.of(*[n for n in (1, 2, 3, w) if w % n == 0])
    f.note("windows")
    shift = f.chance()
    y = x.view(batch, h, w, channels)
    if shift:
        y = torch.roll(y, (-1, -1), (1, 2))
    y = y.view(batch, h // a, a, w // b, b, channels).permute(0, 1, 3, 2, 4, 5).reshape(-1, a * b, channels)
    y = self_attention(f, y)
    y = y.view(batch, h // a, w // b, a, b, channels).permute(0, 1, 3, 2, 4, 5).reshape(batch, h, w, channels)
    return (torch.roll(y, (1, 1), (1, 2)) if shift else y).reshape(x.shape)


def divided(f: Forward, x: Tensor) -> Tensor:
    """Attention along time or along space only: the other one is batch."""
    batch, rows, channels = x.shape
    t, s = grid_of(f, rows)
    f.note("divided attention")
    y = x.view(batch, t, s, channels)
    style = f.of("time", "space", "both", "space in time's order")
    if style in ("time", "both"):
        y = y.permute(0, 2, 1, 3).reshape(batch * s, t, channels)
        y = self_attention(f, y).reshape(batch, s, t, channels).permute(0, 2, 1, 3)
    if style in ("space", "both"):
        y = self_attention(f, y.flatten(0, 1)).view(batch, t, s, channels)
    if style == "space in time's order":
        y = y.transpose(1, 2).contiguous().view(batch * s, t, channels)
        y = y.view(batch, s, t, channels).transpose(1, 2).reshape(batch * t, s, channels)
        y = self_attention(f, y)
    return y.reshape(x.shape)


def sequence_first(f: Forward, x: Tensor) -> Tensor:
    """Tokens at dim 0, as ``nn.MultiheadAttention`` has them."""
    f.note("sequence first")
    y = x.transpose(0, 1)
    y = F.linear(y, f.weight(x.shape[-1], x.shape[-1]))
    return (self_attention(f, y.transpose(0, 1)) if f.chance() else y.tanh().permute(1, 0, 2)) * 0.5


def look_up(f: Forward, x: Tensor) -> Tensor:
    """Rows by index, of the tokens or of a table."""
    batch, rows, channels = x.shape
    style = f.of("index_select", "advanced", "gather", "table", "positions", "scatter", "take_along", "reverse")
    f.note(f"look up: {style}")
    if style == "index_select":
        return x.index_select(1, f.order(rows))
    if style == "advanced":
        return x[:, f.order(rows)]
    if style == "gather":
        return torch.gather(x, 1, f.index(batch, rows, 1, below=rows).expand(-1, -1, channels))
    if style == "table":
        return x + F.embedding(f.index(*f.of((batch, rows), (rows,)), below=5), f.tensor(5, channels))
    if style == "positions":
        return x + f.tensor(rows + 2, channels)[torch.arange(rows) + f.upto(0, 2)]
    if style == "scatter":
        order = f.order(rows)
        return (
            torch.zeros_like(x).index_copy(1, order, x)
            if f.chance()
            else torch.empty_like(x).index_put((torch.arange(batch)[:, None], order[None]), x)
        )
    if style == "take_along":
        return torch.take_along_dim(x, f.index(batch, rows, channels, below=channels), -1)
    order = f.order(rows)
    return (x[:, order] * 0.5).tanh()[:, torch.argsort(order)]


def over_tokens(f: Forward, x: Tensor) -> Tensor:
    """Ops that run along the tokens."""
    style = f.of("cumsum", "flip", "roll", "softmax", "shift", "center", "sort", "diff", "std", "norm")
    f.note(f"over tokens: {style}")
    rows = x.shape[1]
    if style == "cumsum":
        return x.cumsum(1) * 0.3
    if style == "flip":
        return x.flip(1)
    if style == "roll":
        return x.roll(f.upto(1, 3), 1)
    if style == "softmax":
        return x.softmax(1)
    if style == "shift":
        return F.pad(x, (0, 0, 1, 0))[:, :-1]
    if style == "center":
        return x - x.mean(1, keepdim=True)
    if style == "sort":
        return x.sort(1).values
    if style == "diff":
        return torch.cat([x[:, :1], x[:, 1:] - x[:, :-1]], 1)
    if style == "std":
        return x / (x.var(1, keepdim=True, unbiased=False) + 1.0).sqrt()
    return x / (x.norm(dim=1, keepdim=True) + rows)


def hidden(f: Forward, x: Tensor) -> Tensor:
    """Some tokens are replaced."""
    batch, rows, channels = x.shape
    style = f.of("where", "fill", "multiply", "length", "learned", "triangle")
    f.note(f"hidden: {style}")
    if style == "where":
        return torch.where(f.mask(batch, rows, 1), x, f.tensor(channels))
    if style == "fill":
        return x.masked_fill(f.mask(batch, rows)[..., None], 0.5)
    if style == "multiply":
        return x * f.mask(rows, 1).to(x.dtype)
    if style == "length":
        return x * (torch.arange(rows) < f.index(batch, 1, below=rows + 1))[..., None]
    if style == "learned":
        return torch.where(f.mask(batch, rows)[..., None], x, f.tensor(1, 1, channels).expand_as(x))
    return x.tril() if f.chance() else x.triu(-1)


def written(f: Forward, x: Tensor) -> Tensor:
    """Writes in place, into slices and whole."""
    batch, rows, channels = x.shape
    style = f.of("slices", "tail", "add", "channels", "select", "rows", "zeros", "copy")
    f.note(f"written: {style}")
    at = f.upto(0, rows)
    if style == "slices":
        out = torch.empty_like(x)
        out[:, :at] = x[:, :at] * 2
        out[:, at:] = x[:, at:].tanh()
        return out
    out = x.clone() if style != "zeros" else x.new_zeros(batch, rows, channels)
    if style == "tail":
        out[:, at:] += f.tensor(channels)
    elif style == "add":
        out.add_(f.tensor(rows, channels)).mul_(0.5)
    elif style == "channels":
        out[..., : channels // 2] = x[..., channels - channels // 2 :]
    elif style == "select":
        out[:, f.of(0, rows - 1, -1)] = f.tensor(channels)
    elif style == "rows":
        out[:, ::2] = x[:, ::2] * 0.5
    elif style == "zeros":
        out[:, at:] = x[:, : rows - at]
    else:
        out[:, :at].copy_(x[:, :at].flip(1))
    return out


def repeated(f: Forward, x: Tensor) -> Tensor:
    """Tokens stand several times, and are summed again."""
    batch, rows, channels = x.shape
    style = f.of("repeat", "interleave", "expand", "tile", "stack", "batch", "cat", "guidance")
    f.note(f"repeated: {style}")
    if style == "repeat":
        return torch.tanh(x.repeat(1, 2, 1)).view(batch, 2, rows, channels).sum(1)
    if style == "interleave":
        return torch.tanh(x.repeat_interleave(2, 1)).view(batch, rows, 2, channels).mean(2)
    if style == "expand":
        y = x[:, :, None].expand(-1, -1, 3, -1).reshape(batch, rows * 3, channels) * f.tensor(rows * 3, 1)
        return y.unflatten(1, (rows, 3)).sum(2)
    if style == "tile":
        y = torch.tile(x, (2, 1, 1)) * f.tensor(2 * batch, 1, 1)
        return y[:batch] + y[batch:]
    if style == "stack":
        d = f.upto(0, 3)
        return torch.stack([x, x.flip(-1), x.tanh()], d).sum(d)
    if style == "batch":
        y = x.repeat_interleave(2, 0)
        return self_attention(f, y)[::2]
    if style == "cat":
        a, b = torch.cat([x, x.tanh()], 1).chunk(2, 1)
        return a * b
    y = self_attention(f, torch.cat([x, x * 0.5], 0))
    a, b = y.chunk(2)
    return a + 1.5 * (b - a)


def extended(f: Forward, x: Tensor) -> Tensor:
    """Other tokens come along for a while: registers, a class token, padding."""
    batch, rows, channels = x.shape
    n = f.upto(1, 4)
    style = f.of("registers", "class", "behind", "pad", "both", "drop")
    f.note(f"extended: {style}")
    if style == "pad":
        return self_attention(f, F.pad(x, (0, 0, 0, n)))[:, :rows]
    if style == "drop":
        if rows == 1:
            return x
        cut = f.upto(1, rows - 1)
        return torch.cat([self_attention(f, x[:, cut:]), x[:, :cut]], 1).roll(cut, 1)
    extra = f.tensor(1, 1 if style == "class" else n, channels).expand(batch, -1, -1)
    if style == "behind":
        return self_attention(f, torch.cat([x, extra], 1))[:, :rows]
    if style == "both":
        y = self_attention(f, torch.cat([extra, x, x.mean(1, keepdim=True)], 1))
        return y[:, n:-1] + y[:, -1:]
    y = self_attention(f, torch.cat([extra, x], 1))
    if style == "class":
        return y[:, 1:] + y[:, 0].unsqueeze(1)
    return y[:, n:]


def pieces(f: Forward, x: Tensor) -> Tensor:
    """Cut somewhere, worked on apart, and put together."""
    rows, channels = x.shape[1:]
    f.note("pieces")
    sizes = []
    left = rows
    while left and len(sizes) < 3:
        sizes.append(f.upto(1, left))
        left -= sizes[-1]
    sizes += [left] if left else []
    parts = (
        list(x.split(sizes, 1))
        if f.chance()
        else [x[:, sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
    )
    parts = [F.linear(p, f.weight(channels, channels)) if f.chance() else p * 0.5 for p in parts]
    if f.chance(4) and len(parts) > 1:
        parts[0] = self_attention(f, parts[0], parts[1])
    if f.chance(4):
        parts[-1] = self_attention(f, parts[-1])
    if f.chance(4):
        parts.reverse()
    return torch.cat(parts, 1)


def scalar(f: Forward, x: Tensor) -> Tensor:
    """Numbers that all tokens make together."""
    style = f.of("mean", "max", "norm", "sum by batch", "length")
    f.note(f"scalar: {style}")
    if style == "mean":
        return x - x.mean()
    if style == "max":
        return x / (1 + x.abs().amax())
    if style == "norm":
        return x / (1 + torch.linalg.vector_norm(x))
    if style == "sum by batch":
        return x * x.sum((1, 2)).sigmoid()[:, None, None]
    return x / x.shape[1] + x.shape[1] * 0.01


def _factors(f: Forward, n: int) -> list[int]:
    out = []
    while n > 1 and len(out) < 3:
        out.append(f.of(*[d for d in range(1, n + 1) if n % d == 0]))
        n //= out[-1]
    return [*out, n]


def _wild_reshape(f: Forward, x: Tensor) -> Tensor:
    shape: list[int] = []
    at = 0
    while at < x.dim():
        step = f.upto(1, min(2, x.dim() - at))
        n = int(torch.Size(x.shape[at : at + step]).numel())
        shape += _factors(f, n) if f.chance(3) else [n]
        at += step
    return x.reshape(shape) if len(shape) <= 6 else x


def _wild_cat(f: Forward, x: Tensor) -> Tensor:
    d = f.upto(0, x.dim() - 1)
    n = f.upto(1, x.shape[d])
    return torch.cat([x.narrow(d, 0, n) * 0.5, x.narrow(d, n - 1, x.shape[d] - n + 1)], d)


def _wild_slice(f: Forward, x: Tensor) -> Tensor:
    d = f.upto(0, x.dim() - 1)
    start = f.upto(0, x.shape[d] - 1)
    return x.narrow(d, start, f.upto(1, x.shape[d] - start))


def _wild_matmul(f: Forward, x: Tensor) -> Tensor:
    if x.dim() < 2:
        return x
    return torch.matmul(x, f.weight(x.shape[-1], f.upto(1, 3))) if f.chance() else (x @ x.mT) * 0.1


def _wild_linear_outer(f: Forward, x: Tensor) -> Tensor:
    return F.linear(x, f.weight(f.of(1, 2, x.shape[-1]), x.shape[-1]))


def _wild_reduce(f: Forward, x: Tensor) -> Tensor:
    d = f.upto(0, x.dim() - 1)
    keep = f.chance()
    how = f.of("sum", "mean", "logsumexp", "amax", "var")
    if how == "var":
        return x.var(d, unbiased=False, keepdim=keep)
    if how == "logsumexp":
        return x.logsumexp(d, keepdim=keep)
    return getattr(x, how)(d, keepdim=keep)


WILD = {
    "reshape": _wild_reshape,
    "permute": lambda f, x: x.permute(*_order(f, x.dim())),
    "cat": _wild_cat,
    "slice": _wild_slice,
    "select": lambda f, x: x.select(d := f.upto(0, x.dim() - 1), f.upto(0, x.shape[d] - 1)),
    "flip": lambda f, x: x.flip(f.upto(0, x.dim() - 1)),
    "cumsum": lambda f, x: x.cumsum(f.upto(0, x.dim() - 1)) * 0.5,
    "softmax": lambda f, x: x.softmax(f.upto(0, x.dim() - 1)),
    "reduce": _wild_reduce,
    "scale": lambda f, x: x * f.tensor(*[n if f.chance() else 1 for n in x.shape]),
    "matmul": _wild_matmul,
    "linear": _wild_linear_outer,
    "unsqueeze": lambda f, x: x.unsqueeze(f.upto(0, x.dim())),
    "squeeze": lambda f, x: x.squeeze(f.upto(0, x.dim() - 1)) if f.chance() else x.squeeze(),
    "chunk": lambda f, x: x.chunk(2, d := f.upto(0, x.dim() - 1))[0 if d else -1],
    "repeat": lambda f, x: x.repeat(*[f.of(1, 1, 2) for _ in x.shape]),
    "pad": lambda f, x: F.pad(x, [f.of(0, 0, 1) for _ in range(2 * x.dim())]),
    "tanh": lambda f, x: torch.tanh(x),
    "outer": lambda f, x: x.unsqueeze(-1) * x.unsqueeze(-2) if x.dim() < 4 else x,
}


def _order(f: Forward, rank: int) -> list[int]:
    left = list(range(rank))
    return [left.pop(f.upto(0, len(left) - 1)) for _ in range(rank)]


def wild(f: Forward, x: Tensor) -> Tensor:
    """Random ops on random dims."""
    for _ in range(f.upto(1, 4)):
        if x.dim() == 0 or x.numel() > 2000:
            break
        name = f.of(*WILD)
        f.note(f"wild: {name}")
        x = WILD[name](f, x)
    return x


def back_and_forth(f: Forward, x: Tensor) -> Tensor:
    """A wild value of as many elements is a layer's output; of another count it becomes a number for each channel."""
    y = wild(f, x)
    if y.numel() == x.numel():
        f.note("wild layer")
        return torch.tanh(y.reshape(x.shape))
    return x * torch.sigmoid(y.mean())


LAYERS = [
    mlp, convolution, patches, windows, divided, sequence_first, look_up, over_tokens, hidden, written, repeated,
    extended, pieces, scalar, back_and_forth, back_and_forth,
]  # fmt: skip
