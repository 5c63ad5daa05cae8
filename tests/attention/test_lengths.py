"""Lengths that no number of ranks divides, and axes of several segments."""

from __future__ import annotations

import pytest

from tests.attention.cases import Case, check

pytestmark = pytest.mark.fast

VARIANTS = pytest.mark.parametrize(
    ("ring", "ulysses", "rotate"),
    [(1, 4, "alltoall"), (4, 1, "alltoall"), (4, 1, "allgather"), (2, 2, "alltoall"), (2, 2, "allgather")],
)


@VARIANTS
@pytest.mark.parametrize("rows", [9, 15, 16, 3, 1, 5])
def test_any_number_of_rows_on_four_ranks(ring: int, ulysses: int, rotate: str, rows: int) -> None:
    check(Case(ring, ulysses, (rows,), rotate=rotate))


@VARIANTS
@pytest.mark.parametrize("zigzag", [False, True])
def test_text_and_image_are_cut_apart_each_unevenly(ring: int, ulysses: int, rotate: str, zigzag: bool) -> None:
    check(Case(ring, ulysses, (7, 9), rotate=rotate, zigzag=zigzag))


@VARIANTS
def test_three_segments_one_of_a_single_row(ring: int, ulysses: int, rotate: str) -> None:
    check(Case(ring, ulysses, (5, 1, 10), rotate=rotate))


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 1), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4), (2, 3), (3, 2)])
def test_cross_attention_to_sharded_text_of_another_length(ring: int, ulysses: int) -> None:
    check(Case(ring, ulysses, (12,), (769,), batch=1, q_heads=6, kv_heads=6))


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 4), (4, 1), (2, 2)])
def test_an_odd_number_of_image_tokens_beside_text(ring: int, ulysses: int) -> None:
    check(Case(ring, ulysses, (77, 9 * 7 * 7), batch=1))


@pytest.mark.parametrize("zigzag", [False, True])
def test_one_rank_alone_whatever_its_placement(zigzag: bool) -> None:
    check(Case(1, 1, (7, 5), zigzag=zigzag))
    check(Case(1, 1, (7, 5), (3,), zigzag=zigzag, replicated=True))
