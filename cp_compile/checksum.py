"""Checksums of tensors, to tell whether two ranks hold the same bits.

Of bits, not of numbers: a NaN equals itself, and -0 is not 0. Computed where the tensor lives, with no random number
and no transfer but that of the results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["checksums"]

# Words of four bytes that are worked on at once: large enough to hide the cost of a launch, small enough for a cache.
_CHUNK = 1 << 16

# The golden ratio in 64 bits, odd: a product with an odd number loses nothing modulo 2**64.
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


@torch.no_grad()
def checksums(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """A number for each tensor, which depends on every bit, on where it stands, and on shape and dtype.

    Args:
        tensors: strided tensors of any dtype and shape, on any devices.
        device: where to put the result.

    Returns:
        int64 ``[len(tensors)]`` on ``device``. Nothing waits for it to be computed.
    """
    weights = {d: _weights(d) for d in {x.device for x in tensors}}
    sums = [_checksum(x, weights[x.device]).to(device, non_blocking=True) for x in tensors]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=device)


def _weights(device: torch.device) -> Tensor:
    """A factor for each place in a chunk, without a pattern that the difference of two tensors could share."""
    x = torch.arange(1, _CHUNK + 1, device=device) * _ODD
    for _ in range(3):
        x = (x ^ (x >> 32)) * _ODD
    return x | 1


def _checksum(x: Tensor, weights: Tensor) -> Tensor:
    total = torch.full((), x.element_size(), dtype=torch.int64, device=x.device)
    for size in x.shape:
        total = total * _ODD + size
    for words in _words(x):
        for chunk in words.split(_CHUNK):
            total = total * _ODD + chunk.long().mul_(weights[: chunk.shape[0]]).sum()
    return total


def _words(x: Tensor) -> list[Tensor]:
    """The bits as int32, the last word filled up with zeros."""
    flat = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # one element, dense in torch's eyes whatever its stride; a view of bytes wants 1
        flat = flat.clone(memory_format=torch.contiguous_format)
    octets = flat.view(torch.uint8)
    if octets.storage_offset() % 4:
        octets = octets.clone()
    whole = octets.shape[0] // 4 * 4
    words = [octets[:whole].view(torch.int32)] if whole else []
    if rest := octets.shape[0] - whole:
        last = torch.zeros(4, dtype=torch.uint8, device=x.device)
        last[:rest] = octets[whole:]
        words.append(last.view(torch.int32))
    return words
