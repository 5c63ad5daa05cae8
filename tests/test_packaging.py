"""What is installed is what is in the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from cp_compile import zoo
from cp_compile._version import __version__

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parent.parent


def test_every_package_is_listed() -> None:
    tomllib = pytest.importorskip("tomllib", reason="the standard library reads TOML from Python 3.11 on")
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = []
    for top, name in ((ROOT / "cp_compile", "cp_compile"), (ROOT / "passes", "cp_compile.passes")):
        for folder in {file.parent for file in top.rglob("*.py")}:
            found.append(".".join([name, *folder.relative_to(top).parts]))
    assert sorted(listed) == sorted(found)


def test_the_compiler_is_a_part_of_the_package() -> None:
    import cp_compile.passes

    assert Path(cp_compile.passes.__file__).is_file()
    assert cp_compile.passes.__name__ == "cp_compile.passes"


def test_the_zoo_ships_with_the_package() -> None:
    assert len(zoo.case_names()) > 40


def test_the_version_is_written_once() -> None:
    from importlib.metadata import version

    assert version("cp-compile") == __version__
