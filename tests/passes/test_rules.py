"""Every rule, on random shapes: the op on each rank's rows gives each rank's rows of the op.

An axis is laid along a random dim of a random input (or of the output), as several segments and merged with batch and
head dims at times; the rules say how the op can then run on a shard, and each way they offer is run on every rank.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from cp_compile.passes.relation import Position
from cp_compile.passes.rules.registry import _RULES
from tests.passes.harness import Call, Traced, check_mode

pytestmark = pytest.mark.fast

aten = torch.ops.aten

DRAWS = int(os.environ.get("CP_DRAWS", "8"))
"""Examples an op; thousands for a long run."""

MESHES = [(1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2)]
SIZES = [1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9]
"""Small, so that two dims often have the same size by chance."""


@dataclass
class Draw:
    """What a builder of calls draws from."""

    draw: st.DrawFn

    def of(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def size(self) -> int:
        return self.of(*SIZES)

    def shape(self, least: int = 1, most: int = 4) -> list[int]:
        return [self.size() for _ in range(self.draw(st.integers(least, most)))]

    def dim(self, rank: int) -> int:
        return self.draw(st.integers(-rank, rank - 1))

    def dims(self, rank: int, least: int = 1) -> list[int]:
        chosen = self.draw(st.sets(st.integers(0, rank - 1), min_size=least, max_size=rank))
        return [d - rank if self.of(True, False) else d for d in chosen]

    def tensor(self, shape: list[int], dtype: torch.dtype = torch.float64) -> Tensor:
        generator = torch.Generator().manual_seed(self.draw(st.integers(0, 2**16)))
        x = torch.randn(shape, generator=generator, dtype=torch.complex128 if dtype.is_complex else torch.float64)
        return x > 0 if dtype == torch.bool else x.to(dtype)

    def index(self, shape: list[int], below: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.draw(st.integers(0, 2**16)))
        return torch.randint(0, below, shape, generator=generator)

    def broadcastable(self, shape: list[int]) -> list[int]:
        """A shape that broadcasts to this one: some dims 1, some leading ones left out."""
        kept = [n if self.of(True, True, False) else 1 for n in shape]
        return kept[self.draw(st.integers(0, len(kept))) :] if self.of(True, False, False) else kept


BUILDERS: dict[Any, Callable[[Draw, Any], Call]] = {}


def covers(*packets: Any) -> Callable[[Callable[[Draw, Any], Call]], Callable[[Draw, Any], Call]]:
    """Decorator: the function draws calls of these ops."""

    def keep(build: Callable[[Draw, Any], Call]) -> Callable[[Draw, Any], Call]:
        BUILDERS.update(dict.fromkeys(packets, build))
        return build

    return keep


def call(target: Any, *args: Any, **kwargs: Any) -> Call:
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = target.default
    return Call(target, args, kwargs)


# Pointwise


@covers(
    aten.clone, aten.alias, aten.detach, aten.contiguous, aten.lift_fresh_copy, aten.relu6, aten.selu, aten.square,
    aten.silu, aten.mish, aten.softplus, aten.hardtanh, aten.hardswish, aten.zeros_like, aten.ones_like,
    aten.empty_like,
    aten.resolve_conj, aten.resolve_neg, aten.nan_to_num, aten.gelu, aten.neg, aten.sigmoid, aten.exp,
)  # fmt: skip
def unary(d: Draw, packet: Any) -> Call:
    return call(packet, d.tensor(d.shape()))


@covers(aten.real, aten.imag, aten._conj, aten.view_as_real)
def of_complex(d: Draw, packet: Any) -> Call:
    return call(packet, d.tensor(d.shape(), torch.complex128))


@covers(aten.full_like, aten.logit, aten.clip, aten.fill, aten._to_copy, aten.rrelu)
def unary_with_numbers(d: Draw, packet: Any) -> Call:
    x = d.tensor(d.shape())
    if packet in (aten.clip, aten.fill) and d.of(True, False):
        bound = d.tensor([] if packet is aten.fill else d.broadcastable(list(x.shape)))
        return call(packet.Tensor, x, bound)
    if packet is aten.rrelu:
        return call(packet, x, 0.1, 0.3, d.of(True, False))
    if packet is aten._to_copy:
        return call(packet, x, dtype=d.of(torch.float32, torch.float64, torch.int64))
    target = packet.Scalar if packet is aten.fill else packet
    return call(target, x, 0.25)


@covers(aten.add, aten.mul, aten.sub, aten.div, aten.eq, aten.lt, aten.maximum, aten.atan2, aten.logical_and)
def binary(d: Draw, packet: Any) -> Call:
    shape = d.shape()
    a, b = d.broadcastable(shape), d.broadcastable(shape)
    target = packet.Tensor if "Tensor" in packet.overloads() else packet.default
    return call(target, d.tensor(a), d.tensor(b))


@covers(aten.where, aten.addcmul, aten.addcdiv, aten.lerp, aten.masked_fill)
def ternary(d: Draw, packet: Any) -> Call:
    shape = d.shape()
    a, b, c = (d.broadcastable(shape) for _ in range(3))
    if packet is aten.where:
        mask = d.tensor(a, torch.bool)
        which = d.of("self", "ScalarOther", "ScalarSelf")
        if which == "self":
            return call(packet.self, mask, d.tensor(b), d.tensor(c))
        return (
            call(packet.ScalarOther, mask, d.tensor(b), 2.0)
            if which == "ScalarOther"
            else call(packet.ScalarSelf, mask, 2.0, d.tensor(b))
        )
    if packet is aten.masked_fill:
        mask = d.tensor(b, torch.bool)
        if d.of(True, False):
            return call(packet.Scalar, d.tensor(shape), mask, -1.0)
        return call(packet.Tensor, d.tensor(shape), mask, d.tensor([]))
    if packet is aten.lerp:
        return call(packet.Tensor, d.tensor(a), d.tensor(b), d.tensor(c))
    return call(packet, d.tensor(a), d.tensor(b), d.tensor(c))


@covers(aten.complex, aten.polar, aten.type_as)
def two_alike(d: Draw, packet: Any) -> Call:
    shape = d.shape()
    return call(packet, d.tensor(shape), d.tensor(shape))


@covers(aten.prelu)
def prelu(d: Draw, packet: Any) -> Call:
    shape = d.shape(2, 4)
    return call(packet, d.tensor(shape), d.tensor([d.of(1, shape[1])]))


# Views


def split_sizes(d: Draw, n: int) -> list[int]:
    """Factors whose product is ``n``, 1 included at times."""
    out = []
    while n > 1:
        out.append(d.of(*[f for f in range(2, n + 1) if n % f == 0]))
        n //= out[-1]
    if d.of(True, False, False) or not out:
        out.insert(d.draw(st.integers(0, len(out))), 1)
    return out


def regrouped(d: Draw, shape: list[int]) -> list[int]:
    """Another shape of as many elements: neighbouring dims merged, dims split."""
    out: list[int] = []
    at = 0
    while at < len(shape):
        step = d.draw(st.integers(1, len(shape) - at))
        merged = math.prod(shape[at : at + step])
        out += split_sizes(d, merged) if d.of(True, False) else [merged]
        at += step
    return out


@covers(aten.view, aten._unsafe_view, aten.reshape)
def reshapes(d: Draw, packet: Any) -> Call:
    shape = d.shape()
    if packet is aten.view and d.of(True, False, False):
        return call(packet.dtype, d.tensor([*shape, d.of(2, 4)], torch.float64), d.of(torch.int64, torch.float32))
    to = regrouped(d, shape)
    x = d.tensor(shape)
    if d.of(True, False):
        to[d.dim(len(to))] = -1
    return call(packet, x, to)


@covers(aten.flatten)
def flatten(d: Draw, packet: Any) -> Call:
    shape = d.shape(1, 4)
    first = d.draw(st.integers(0, len(shape) - 1))
    return call(packet.using_ints, d.tensor(shape), first, d.draw(st.integers(first, len(shape) - 1)))


@covers(aten.unflatten)
def unflatten(d: Draw, packet: Any) -> Call:
    shape = d.shape()
    at = d.dim(len(shape))
    return call(packet.int, d.tensor(shape), at, split_sizes(d, shape[at]))


@covers(aten.squeeze, aten.unsqueeze)
def squeezes(d: Draw, packet: Any) -> Call:
    shape = d.shape()
    x = d.tensor(shape)
    if packet is aten.unsqueeze:
        return call(packet, x, d.dim(len(shape) + 1))
    which = d.of("default", "dim", "dims")
    if which == "default":
        return call(packet, x)
    return call(packet.dim, x, d.dim(len(shape))) if which == "dim" else call(packet.dims, x, d.dims(len(shape)))


@covers(aten.view_as_complex)
def to_complex(d: Draw, packet: Any) -> Call:
    return call(packet, d.tensor([*d.shape(1, 3), 2]))


@covers(aten.permute)
def permute(d: Draw, packet: Any) -> Call:
    shape = d.shape()
    order = d.draw(st.permutations(range(len(shape))))
    return call(packet, d.tensor(shape), [n - len(shape) if d.of(True, False) else n for n in order])


@covers(aten.transpose, aten.t, aten.numpy_T, aten.mT)
def transposes(d: Draw, packet: Any) -> Call:
    if packet is aten.transpose:
        shape = d.shape()
        return call(packet.int, d.tensor(shape), d.dim(len(shape)), d.dim(len(shape)))
    shape = d.shape(*{aten.t: (1, 2), aten.mT: (2, 4)}.get(packet, (1, 4)))
    return call(packet, d.tensor(shape))


@covers(aten.expand)
def expand(d: Draw, packet: Any) -> Call:
    shape = d.shape()
    before = d.broadcastable(shape)
    new = len(shape) - len(before)
    return call(packet, d.tensor(before), [-1 if i >= new and before[i - new] == n and d.of(True, False) else n
                                           for i, n in enumerate(shape)])  # fmt: skip


@covers(aten.repeat, aten.tile)
def repeat(d: Draw, packet: Any) -> Call:
    shape = d.shape(1, 3)
    times = [d.of(1, 1, 2, 3) for _ in range(len(shape) + d.of(0, 0, 1))]
    if packet is aten.tile and d.of(True, False):
        times = times[1:]
    return call(packet, d.tensor(shape), times)


@covers(aten.repeat_interleave)
def repeat_interleave(d: Draw, packet: Any) -> Call:
    shape = d.shape()
    dim = d.of(None, d.dim(len(shape)))
    return call(packet.self_int, d.tensor(shape), d.of(1, 2, 3), dim)


@covers(aten.cat, aten.concat, aten.concatenate)
def cat(d: Draw, packet: Any) -> Call:
    shape = d.shape()
    dim = d.dim(len(shape))
    pieces = []
    for _ in range(d.of(1, 2, 3)):
        if pieces and d.of(True, False, False, False):
            pieces.append(pieces[0])
            continue
        piece = list(shape)
        piece[dim] = d.size()
        pieces.append(d.tensor(piece))
    if d.of(True, False, False, False):
        pieces.insert(d.draw(st.integers(0, len(pieces))), torch.empty(0, dtype=torch.float64))
    if d.of(True, False, False, False):
        piece = list(shape)
        piece[dim] = 0
        pieces.append(d.tensor(piece))
    return call(packet, pieces, dim)


@covers(aten.stack)
def stack(d: Draw, packet: Any) -> Call:
    shape = d.shape(1, 3)
    return call(packet, [d.tensor(shape) for _ in range(d.of(1, 2, 3))], d.dim(len(shape) + 1))


def bounds(d: Draw, n: int) -> tuple[int, int]:
    """Where a slice of ``n`` rows starts and ends: whole, negative and beyond the end, too."""
    start = d.draw(st.integers(0, n - 1))
    stop = d.draw(st.integers(start + 1, n))
    return (start - n if d.of(True, False) else start), (2**63 - 1 if stop == n and d.of(True, False) else stop)


@covers(aten.slice)
def slices(d: Draw, packet: Any) -> Call:
    shape = d.shape()
    dim = d.dim(len(shape))
    start, stop = bounds(d, shape[dim])
    return call(packet.Tensor, d.tensor(shape), dim, start, stop, d.of(1, 1, 1, 2))


@covers(aten.slice_scatter)
def slice_scatter(d: Draw, packet: Any) -> Call:
    shape = d.shape()
    dim = d.dim(len(shape))
    start, stop = bounds(d, shape[dim])
    step = d.of(1, 1, 1, 2)
    part = list(shape)
    part[dim] = len(range(*slice(start, stop, step).indices(shape[dim])))
    return call(packet, d.tensor(shape), d.tensor(part), dim, start, stop, step)


@covers(aten.select, aten.select_scatter)
def select(d: Draw, packet: Any) -> Call:
    shape = d.shape(2, 4)
    dim = d.dim(len(shape))
    index = d.draw(st.integers(-shape[dim], shape[dim] - 1))
    if packet is aten.select:
        return call(packet.int, d.tensor(shape), dim, index)
    part = list(shape)
    del part[dim]
    return call(packet, d.tensor(shape), d.tensor(part), dim, index)


@covers(aten.roll, aten.flip)
def roll(d: Draw, packet: Any) -> Call:
    shape = d.shape()
    dims = d.dims(len(shape))
    if packet is aten.flip:
        return call(packet, d.tensor(shape), dims)
    if d.of(True, False, False):
        return call(packet, d.tensor(shape), [d.of(1, 2)])
    return call(packet, d.tensor(shape), [d.of(-1, 1, 2) for _ in dims], dims)


@covers(aten.pad, aten.constant_pad_nd)
def pad(d: Draw, packet: Any) -> Call:
    shape = d.shape()
    amounts = [d.of(0, 0, 1, 2) for _ in range(2 * d.draw(st.integers(1, len(shape))))]
    return call(packet, d.tensor(shape), amounts)


# Sums over shared dims


@covers(aten.linear)
def linear(d: Draw, packet: Any) -> Call:
    shape = d.shape()
    out = d.size()
    bias = d.of(None, d.tensor([out]))
    return call(packet, d.tensor(shape), d.tensor([out, shape[-1]]), bias)


@covers(aten.matmul)
def matmul(d: Draw, packet: Any) -> Call:
    i, j, k = d.size(), d.size(), d.size()
    batch = d.shape(0, 2)
    left = [*d.broadcastable(batch), i, k] if d.of(True, True, False) else [k]
    right = [*d.broadcastable(batch), k, j] if d.of(True, True, False) else [k]
    return call(packet, d.tensor(left), d.tensor(right))


@covers(aten.mm, aten.bmm, aten.dot, aten.mv, aten.outer)
def products(d: Draw, packet: Any) -> Call:
    b, i, j, k = d.size(), d.size(), d.size(), d.size()
    left, right = {
        aten.mm: ([i, k], [k, j]),
        aten.bmm: ([b, i, k], [b, k, j]),
        aten.dot: ([k], [k]),
        aten.mv: ([i, k], [k]),
        aten.outer: ([i], [j]),
    }[packet]
    return call(packet, d.tensor(left), d.tensor(right))


@covers(aten.addmm, aten.baddbmm, aten.addbmm)
def added_products(d: Draw, packet: Any) -> Call:
    b, i, j, k = d.size(), d.size(), d.size(), d.size()
    batch = [] if packet is aten.addmm else [b]
    out = [b, i, j] if packet is aten.baddbmm else [i, j]
    first = d.tensor(d.broadcastable(out))
    return call(packet, first, d.tensor([*batch, i, k]), d.tensor([*batch, k, j]), beta=d.of(1, 2), alpha=d.of(1, 3))


@covers(aten.einsum)
def einsum(d: Draw, packet: Any) -> Call:
    equation = d.of(
        "bij,bjk->bik", "bhid,bhjd->bhij", "bld,de->ble", "bl,l->b", "ij->ji", "ijk->i", "i,j->ij", "bld,bl->bd",
        "bid, bjd -> bij", "nhwpqc->nchpwq", "bhid,bhie->bhde", "b...d,de->b...e", "bii->bi", "bi,bi",
    )  # fmt: skip
    inputs = equation.replace(" ", "").split("->")[0].split(",")
    sizes = {label: d.size() for label in "abcdefghijklmnopqrstuvwxyz"}
    middle = d.size()
    operands = [d.tensor([sizes[x] for x in labels.replace("...", "Z")] if "." not in labels else
                         [sizes["b"], middle, sizes["d"]]) for labels in inputs]  # fmt: skip
    return call(packet, equation, operands)


@covers(aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution, aten.conv_transpose1d, aten.conv_transpose2d)
def convolution(d: Draw, packet: Any) -> Call:
    spatial = int(str(packet)[-2]) if str(packet)[-2].isdigit() else d.of(1, 2)
    transposed = "transpose" in str(packet)
    kernel = [d.of(1, 1, 2) for _ in range(spatial)]
    pixels = [d.draw(st.integers(k + 1, 7)) for k in kernel]
    groups = d.of(1, 1, 2)
    channels, out = 2 * d.of(1, 2), 2 * d.of(1, 2)
    batch = [] if packet is not aten.convolution and d.of(True, False, False, False) else [d.size()]
    x = d.tensor([*batch, channels, *pixels])
    stride, padding = d.of(1, 1, 2), d.of(0, 0, 1)
    weight = [channels, out // groups] if transposed else [out, channels // groups]
    w, bias = d.tensor([*weight, *kernel]), d.of(None, d.tensor([out]))
    if packet is aten.convolution:
        return call(
            packet, x, w, bias, [stride] * spatial, [padding] * spatial, [1] * spatial, False, [0] * spatial, groups
        )
    if transposed:
        target = aten.conv_transpose1d.default if spatial == 1 else aten.conv_transpose2d.input
        return call(target, x, w, bias, [stride] * spatial, [padding] * spatial, [0] * spatial, groups)
    if d.of(True, False, False):
        return call(packet.padding, x, w, bias, [1] * spatial, d.of("same", "valid"), [1] * spatial, groups)
    return call(packet, x, w, bias, [stride] * spatial, [padding] * spatial, [1] * spatial, groups)


@covers(aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d, aten.max_pool2d, aten.adaptive_avg_pool2d)
def pool(d: Draw, packet: Any) -> Call:
    spatial = int(str(packet)[-2])
    x = d.tensor([*d.shape(1, 2), *(d.of(4, 5, 6) for _ in range(spatial))])
    short = d.of(True, False) and packet is not aten.adaptive_avg_pool2d
    return call(packet, x, [2] if short else [2] * spatial)


# Whole dims


@covers(aten.layer_norm, aten.rms_norm)
def normalise_last(d: Draw, packet: Any) -> Call:
    shape = d.shape()
    last = shape[-d.draw(st.integers(1, len(shape))) :]
    weight = d.of(None, d.tensor(last))
    if packet is aten.rms_norm:
        return call(packet, d.tensor(shape), last, weight)
    return call(packet, d.tensor(shape), last, weight, d.of(None, d.tensor(last)))


@covers(aten._fused_rms_norm)
def fused_norm(d: Draw, packet: Any) -> Call:
    shape = d.shape()
    return call(packet, d.tensor(shape), shape[-1:], d.tensor(shape[-1:]), 1e-6)


@covers(aten.group_norm, aten.instance_norm)
def group_norm(d: Draw, packet: Any) -> Call:
    channels = 2 * d.of(1, 2)
    x = d.tensor([d.size(), channels, *[d.of(2, 3, 4) for _ in range(d.of(1, 2))]])
    weight, bias = d.tensor([channels]), d.tensor([channels])
    if packet is aten.group_norm:
        return call(packet, x, 2, weight, bias)
    if d.of(True, False):
        return call(packet, x, weight, bias, None, None, True, 0.1, 1e-5, False)
    return call(packet, x, weight, bias, d.tensor([channels]), d.tensor([channels]).abs(), False, 0.1, 1e-5, False)


@covers(
    aten.softmax, aten.log_softmax, aten._softmax, aten._log_softmax, aten._safe_softmax, aten.cumsum, aten.cumprod,
    aten.logcumsumexp, aten.argsort, aten.glu,
)  # fmt: skip
def over_one_dim(d: Draw, packet: Any) -> Call:
    shape = d.shape()
    dim = d.dim(len(shape))
    if packet is aten.glu:
        shape[dim] = 2 * d.of(1, 2, 3)
    x = d.tensor(shape)
    if packet in (aten.softmax, aten.log_softmax):
        return call(packet.int, x, dim)
    if packet in (aten._softmax, aten._log_softmax):
        return call(packet, x, dim, False)
    if packet is aten.argsort:
        return call(packet.stable, x, stable=True, dim=dim)
    return call(packet, x, dim)


@covers(aten.sum, aten.mean, aten.amax, aten.amin)
def reductions(d: Draw, packet: Any) -> Call:
    shape = d.shape()
    x = d.tensor(shape)
    if packet in (aten.sum, aten.mean) and d.of(True, False, False, False):
        return call(packet, x)
    dims = d.dims(len(shape), least=0)
    target = {aten.sum: aten.sum.dim_IntList, aten.mean: aten.mean.dim}.get(packet, packet)
    if packet is aten.sum and d.of(True, False, False):
        return call(target, d.tensor(shape, torch.bool), dims, d.of(True, False))
    return call(target, x, dims, d.of(True, False))


@covers(
    aten.var, aten.std, aten.any, aten.all, aten.logsumexp, aten.norm, aten.prod, aten.argmax, aten.argmin,
    aten.linalg_vector_norm,
)  # fmt: skip
def barriers(d: Draw, packet: Any) -> Call:
    shape = d.shape()
    x = d.tensor(shape)
    keep = d.of(True, False)
    dims = d.dims(len(shape))
    if packet in (aten.any, aten.all):
        x = x > 0
        return call(packet, x) if d.of(True, False) else call(packet.dim, x, dims[0], keep)
    if packet is aten.prod:
        return call(packet, x) if d.of(True, False) else call(packet.dim_int, x, dims[0], keep)
    if packet in (aten.argmax, aten.argmin):
        return call(packet, x) if d.of(True, False) else call(packet, x, dims[0], keep)
    if packet is aten.norm:
        return call(packet.ScalarOpt_dim, x, 2, dims, keep)
    if packet is aten.linalg_vector_norm:
        return call(packet, x, 2, d.of(None, dims), keep)
    if packet is aten.logsumexp:
        return call(packet, x, dims, keep)
    return call(packet.correction, x, d.of(None, dims), correction=0, keepdim=keep)


# Creation and lookup


@covers(aten.full, aten.zeros, aten.ones, aten.empty)
def creation(d: Draw, packet: Any) -> Call:
    target = packet.memory_format if packet is aten.empty else packet.default
    return call(target, d.shape(), *([2.5] if packet is aten.full else []), dtype=torch.float64)


@covers(aten.new_full, aten.new_zeros, aten.new_ones, aten.new_empty)
def creation_like(d: Draw, packet: Any) -> Call:
    return call(packet, d.tensor(d.shape()), d.shape(), *([2.5] if packet is aten.new_full else []))


@covers(aten.arange, aten.linspace, aten.rand, aten.randn, aten.randint, aten.randperm, aten.eye)
def by_position(d: Draw, packet: Any) -> Call:
    n = d.size()
    arguments = {
        aten.linspace: (0, 1, n), aten.rand: ([n, 2],), aten.randn: ([n, 2],), aten.randint: (5, [n, 2])
    }  # fmt: skip
    return call(packet, *arguments.get(packet, (n,)))


@covers(aten.dropout, aten.bernoulli, aten.uniform, aten.normal_functional, aten.exponential)
def drawn(d: Draw, packet: Any) -> Call:
    numbers = {aten.dropout: (0.5, True), aten.bernoulli: (0.5,)}
    return call(packet.p if packet is aten.bernoulli else packet, d.tensor(d.shape()), *numbers.get(packet, ()))


@covers(aten.embedding)
def embedding(d: Draw, packet: Any) -> Call:
    rows = d.size()
    return call(packet, d.tensor([rows, d.size()]), d.index(d.shape(1, 3), rows))


@covers(aten.index_select, aten.gather)
def lookups(d: Draw, packet: Any) -> Call:
    shape = d.shape()
    dim = d.dim(len(shape))
    if packet is aten.index_select:
        return call(packet, d.tensor(shape), dim, d.index([d.size()], shape[dim]))
    taken = [n if d.of(True, True, False) else d.draw(st.integers(1, n)) for n in shape]
    taken[dim] = d.size()
    return call(packet, d.tensor(shape), dim, d.index(taken, shape[dim]))


@covers(aten.index)
def index(d: Draw, packet: Any) -> Call:
    shape = d.shape(1, 4)
    given = d.dims(len(shape))
    at = d.shape(1, 2)
    indices: list[Tensor | None] = [None] * len(shape)
    for dim in given:
        indices[dim] = d.index(d.broadcastable(at), shape[dim])
    while indices[-1] is None and d.of(True, False):
        indices.pop()
    return call(packet.Tensor, d.tensor(shape), indices)


@covers(aten.triu, aten.tril)
def triangle(d: Draw, packet: Any) -> Call:
    return call(packet, d.tensor(d.shape(2, 4)), d.of(-1, 0, 1))


# Attention


@covers(aten.scaled_dot_product_attention)
def attention(d: Draw, packet: Any) -> Call:
    """Its batch and head dims; its token dims are tested with the attention itself."""
    batch, rows, keys, channels = d.size(), d.size(), d.size(), d.of(2, 4)
    heads, groups = d.of(1, 2, 3), d.of(1, 1, 2)
    q = d.tensor([batch, heads * groups, rows, channels])
    k, v = (d.tensor([batch, heads, keys, channels]) for _ in range(2))
    mask = d.of(None, d.tensor([d.of(1, batch), d.of(1, heads * groups), d.of(1, rows), keys]))
    return call(packet, q, k, v, mask, enable_gqa=groups > 1)


# The tests


def segments(d: Draw, rows: int) -> list[int]:
    """The rows cut into one to three segments."""
    cuts = sorted(d.draw(st.sets(st.integers(1, rows - 1), max_size=2))) if rows > 1 else []
    return [b - a for a, b in zip([0, *cuts], [*cuts, rows])]


def lay_axis(d: Draw, traced: Traced) -> tuple[Any, Position, list[int]] | None:
    """A place of an axis: a value, a dim that it is merged with others in, and its segments."""
    ends = [(v, i) for v in (*traced.captured.placeholders, traced.node) if isinstance(v.meta["val"], Tensor)
            for i, n in enumerate(v.meta["val"].shape) if n > 0]  # fmt: skip
    if not ends:
        return None
    value, dim = d.of(*ends)
    size = value.meta["val"].shape[dim]
    outer = d.of(1, 1, *[n for n in range(1, size + 1) if size % n == 0])
    inner = d.of(1, 1, *[n for n in range(1, size // outer + 1) if size // outer % n == 0])
    return value, Position(dim, outer, inner), segments(d, size // outer // inner)


@pytest.mark.parametrize("packet", BUILDERS, ids=str)
@settings(
    max_examples=DRAWS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    derandomize="CP_DRAWS" not in os.environ,
)
@given(data=st.data())
def test_an_op_on_each_ranks_rows_gives_each_ranks_rows_of_the_op(packet: Any, data: st.DataObject) -> None:
    d = Draw(data.draw)
    drawn = BUILDERS[packet](d, packet)
    try:
        drawn()
    except RuntimeError:
        reject()  # torch itself refuses the arguments (a kernel larger than its input, say)
    traced = Traced.of(drawn)
    laid = lay_axis(d, traced)
    if laid is None:
        return
    axes, modes = traced.modes(*laid)
    ring, ulysses = d.of(*MESHES)
    for mode in modes:
        if not mode.attends:
            check_mode(traced, axes, mode, ring, ulysses, values="empty" not in str(packet))


def test_every_rule_has_a_builder_of_calls_here() -> None:
    packets = {target.overloadpacket for target in _RULES if target.namespace == "aten"}
    assert not packets - BUILDERS.keys(), "a rule without a test: write a builder of calls for it"
