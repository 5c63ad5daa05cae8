"""Heads that do not divide, grouped queries, and head counts that look like lengths."""

from __future__ import annotations

import pytest

from cp_compile.attention.heads import plan_heads
from tests.attention.cases import Case, Mask, check

pytestmark = pytest.mark.fast

UNEVEN = [(5, 5, 4), (3, 3, 4), (2, 2, 4), (30, 30, 4), (30, 30, 16), (1, 1, 3)]
GROUPED = [(8, 2, 4), (8, 1, 2), (12, 4, 8), (6, 3, 2), (4, 1, 4), (6, 3, 4), (14, 7, 3), (6, 2, 3), (8, 4, 3)]


@pytest.mark.parametrize(("q_heads", "kv_heads", "ulysses"), UNEVEN + GROUPED)
def test_any_heads_under_ulysses(q_heads: int, kv_heads: int, ulysses: int) -> None:
    check(Case(1, ulysses, (11,), q_heads=q_heads, kv_heads=kv_heads))
    check(Case(1, ulysses, (5, 4), q_heads=q_heads, kv_heads=kv_heads, mask=Mask("bias", "BHSS"), learned=True))


@pytest.mark.parametrize(("q_heads", "kv_heads", "ulysses"), [(5, 5, 4), (8, 2, 4), (6, 3, 2), (6, 3, 4), (3, 1, 2)])
@pytest.mark.parametrize("rotate", ["alltoall", "allgather"])
def test_any_heads_in_unified(q_heads: int, kv_heads: int, ulysses: int, rotate: str) -> None:
    for mask in (None, Mask("bool", "BHSS"), Mask("bias", "1H1S")):
        check(Case(2, ulysses, (11,), q_heads=q_heads, kv_heads=kv_heads, rotate=rotate, mask=mask))


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(8, 2), (8, 1), (6, 3)])
@pytest.mark.parametrize("rotate", ["alltoall", "allgather"])
def test_grouped_queries_in_a_ring(q_heads: int, kv_heads: int, rotate: str) -> None:
    check(Case(3, 1, (11,), q_heads=q_heads, kv_heads=kv_heads, rotate=rotate))


@pytest.mark.parametrize(("q_heads", "kv_heads", "ulysses"), UNEVEN + GROUPED)
def test_a_rank_receives_no_more_kv_heads_than_it_reads(q_heads: int, kv_heads: int, ulysses: int) -> None:
    plan = plan_heads(q_heads, kv_heads, ulysses)
    assert plan.q_local == -(-q_heads // ulysses)
    assert plan.kv_local <= min(kv_heads, plan.q_local)
    if ulysses % kv_heads == 0:
        assert plan.kv_local == 1
    if kv_heads % ulysses == 0:
        assert plan.kv_local == kv_heads // ulysses


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 4), (4, 1), (2, 2)])
def test_as_many_heads_as_rows_as_dims(ring: int, ulysses: int) -> None:
    for mask in (None, Mask("bool", "BHSS"), Mask("bias", "1H1S")):
        check(Case(ring, ulysses, (8,), batch=8, q_heads=8, kv_heads=8, dim=8, v_dim=8, mask=mask))


def test_two_models_with_other_heads_in_one_process() -> None:
    for heads in (5, 8, 5):
        check(Case(1, 4, (8,), q_heads=heads, kv_heads=heads))


def test_heads_that_cannot_share_are_an_error() -> None:
    with pytest.raises(ValueError, match="5 query heads cannot share 2 key heads"):
        check(Case(1, 2, (8,), q_heads=4, kv_heads=4, spec={}), attend=_with_heads(5, 2))


def _with_heads(q_heads: int, kv_heads: int):  # type: ignore[no-untyped-def]
    from cp_compile.attention import attention

    return lambda q, k, v, mask, spec: attention(
        q[:, :1].expand(-1, q_heads, -1, -1), k[:, :kv_heads], v[:, :kv_heads], mask, spec
    )
