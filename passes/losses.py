"""The cross entropy as ops that run on a shard.

torch's own kernel sums over all rows in one op, which no rank can do with its rows alone. As a lookup in the log
probabilities and a sum, the logits (a row for each token, a column for each word) stay where they are made, and ranks
add up one number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["LOSSES"]

aten = torch.ops.aten

_NONE, _MEAN = 0, 1
"""Of torch's numbers for a reduction; 2 is the sum."""


def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """``torch.nn.functional.cross_entropy``: logits ``[N, classes, ...]`` or ``[classes]``, target ``[N, ...]``."""
    if target.is_floating_point():
        return aten.cross_entropy_loss.default.decompose(
            logits, target, weight, reduction, ignore_index, label_smoothing
        )
    classes = 0 if logits.dim() == 1 else 1
    logs = logits.log_softmax(classes)
    kept = target != ignore_index
    index = torch.where(kept, target, 0)
    loss = -logs.gather(classes, index.unsqueeze(classes)).squeeze(classes)
    if weight is not None:
        loss = loss * weight[index]
    if label_smoothing:
        shares = logs if weight is None else logs * weight.view(-1, *[1] * (logits.dim() - classes - 1))
        loss = (1 - label_smoothing) * loss - label_smoothing / logits.shape[classes] * shares.sum(classes)
    loss = torch.where(kept, loss, 0.0)
    if reduction == _NONE:
        return loss
    # Of half precision only the result is: a sum, and a count of more than 256 rows even more, would not be one.
    wide = torch.promote_types(logits.dtype, torch.float32)
    total = loss.sum(dtype=wide)
    if reduction == _MEAN:
        total = total / (kept if weight is None else torch.where(kept, weight[index], 0.0)).sum(dtype=wide)
    return total.to(logits.dtype)


LOSSES: dict[Any, Callable[..., Any]] = {aten.cross_entropy_loss.default: _cross_entropy}
