"""Fixtures that start ranks, and the rule that the sweep runs only when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.compare import Comparison
from tests.compare import compare as compare_on
from tests.ranks import Pool, Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Pool]]:
    """Pools of live gloo ranks by world size; the first use starts them."""
    pools = Ranks()
    yield pools
    pools.close()


@pytest.fixture
def compare(ranks: Callable[[int], Pool]) -> Callable[..., Comparison]:
    """``compare(case, world, ulysses=..., ring=..., inner=...)``: see :func:`tests.compare.compare`.

    ``ulysses`` is the whole world when no degree is given.
    """

    def run(case: str, world: int = 2, **options: Any) -> Comparison:
        if "ulysses" not in options and "ring" not in options:
            options["ulysses"] = world
        return compare_on(ranks(world), case, **options)

    return run


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves tests marked ``sweep`` out of a plain run."""
    if "sweep" in (config.option.markexpr or ""):
        return
    swept = [item for item in items if item.get_closest_marker("sweep")]
    if swept:
        config.hook.pytest_deselected(items=swept)
        items[:] = [item for item in items if not item.get_closest_marker("sweep")]
