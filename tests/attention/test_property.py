"""Any attention, on any mesh, equals the float64 math of one process: forward, gradients, padding, communication.

``CP_DRAWS=5000 pytest tests/attention/test_property.py`` draws other and more cases than the 300 that are drawn always.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.attention.cases import Case, Mask, check

pytestmark = pytest.mark.fast

MESHES = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (3, 1), (4, 1), (2, 2), (2, 3), (3, 2), (4, 2), (2, 4), (8, 1)]
HEADS = [(1, 1), (2, 2), (3, 3), (5, 5), (4, 2), (4, 1), (6, 3), (8, 2), (12, 4), (7, 7)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ring, ulysses = draw(st.sampled_from(MESHES))
    lengths = st.lists(st.integers(1, 13), min_size=1, max_size=3).map(tuple)
    q_lengths = draw(lengths)
    kv_lengths = draw(st.none() | lengths)
    q_heads, kv_heads = draw(st.sampled_from(HEADS))
    dim = draw(st.sampled_from([1, 3, 8]))
    dtype = draw(st.sampled_from(DTYPES))
    kind = draw(st.sampled_from(["none", "none", "causal", "bool", "bias", "inf", "min"]))
    mask = None
    if kind not in ("none", "causal"):
        dims = draw(st.sampled_from(["1", "B"])) + draw(st.sampled_from(["1", "H"]))
        dims += draw(st.sampled_from(["1", "S"])) + draw(st.sampled_from(["S", "S", "1"]))
        leading = len(dims) - len(dims.lstrip("1"))
        dims = "." * draw(st.integers(0, min(leading, 2))) + dims
        dims = dims[: dims.count(".")] + dims[2 * dims.count(".") :]
        float_dtype = draw(st.sampled_from([torch.float32, dtype]))
        mask = Mask(kind, dims, float_dtype, draw(st.sampled_from([0.0, 0.3, 1.0])))
    return Case(
        ring,
        ulysses,
        q_lengths,
        kv_lengths,
        batch=draw(st.sampled_from([1, 2])),
        q_heads=q_heads,
        kv_heads=kv_heads,
        dim=dim,
        v_dim=draw(st.sampled_from([dim, dim, 5])),
        mask=mask,
        learned=mask is not None and kind == "bias" and draw(st.booleans()),
        causal=kind == "causal",
        zigzag=draw(st.booleans()),
        replicated=draw(st.sampled_from([False, False, True])),
        rotate=draw(st.sampled_from(["alltoall", "allgather"])),
        dtype=dtype,
        scale=draw(st.sampled_from([None, 0.3])),
        seed=draw(st.integers(0, 3)),
    )


@settings(
    max_examples=int(os.environ.get("CP_DRAWS", "300")),
    derandomize="CP_DRAWS" not in os.environ,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(case=cases())
def test_every_attention_equals_float64_math_on_one_process(case: Case) -> None:
    check(case)
