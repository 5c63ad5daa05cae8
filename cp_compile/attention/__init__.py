"""Attention over a sharded token axis: local, ulysses, ring and unified.

:func:`attention` equals ``torch.nn.functional.scaled_dot_product_attention`` of the global tensors, and returns this
rank's rows of it.
"""

from __future__ import annotations

from torch import Tensor

from cp_compile.attention.local import local_attention
from cp_compile.attention.ring import ring_attention, unified_attention
from cp_compile.attention.shapes import autocast_input, check_inputs, restore, to_4d
from cp_compile.attention.spec import AttentionSpec, Variant, collectives, elements_sent, variant
from cp_compile.attention.ulysses import ulysses_attention

__all__ = ["AttentionSpec", "Variant", "attention", "collectives", "elements_sent", "variant"]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """This rank's rows of the attention of the whole model, differentiable.

    Args:
        q: ``[..., Hq, spec.q.local, D]``, any float dtype. Three dims are heads without a batch; leading dims beyond
            four are flattened into the batch.
        k: ``[..., Hkv, spec.kv.local, D]``, or all rows in global order where ``spec.kv`` is None.
        v: like ``k``, with its own head dim ``Dv``.
        mask: None, or bool or additive float, *whole* (global rows and columns in the model's order), broadcastable to
            ``[..., Hq, Sq, Skv]`` in any dim.
        spec: what the attention is and where its rows are.

    Returns:
        ``[..., Hq, spec.q.local, Dv]``. A padded row equals its segment's last row.

    The gradient of sharded q, k, v is that of this rank's rows, zero at padding if the output's is. The gradient of
    what is whole on every rank (the mask, and k and v where ``spec.kv`` is None) is this rank's part: the true one is
    the sum over all ranks of the mesh.

    Raises:
        ValueError: inputs that SDPA refuses too, head counts that do not fit, or rows that do not fit the placement.
    """
    q, k, v = autocast_input(q), autocast_input(k), autocast_input(v)
    mask = None if mask is None else autocast_input(mask)
    check_inputs(q, k, v, mask, spec)
    rows = {
        "local": local_attention,
        "ulysses": ulysses_attention,
        "ring": ring_attention,
        "unified": unified_attention,
    }[variant(spec)]
    return restore(rows(*to_4d(q, k, v, mask), spec), q, k, v)
