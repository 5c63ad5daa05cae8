"""The examples run as their first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_entry_point import launch

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", ["flux_ulysses", pytest.param("wan_unified", marks=pytest.mark.sweep)])
def test_an_example_gets_the_answer_of_one_process(name: str) -> None:
    ended = _run(name)
    assert "largest difference of a pixel between one process and 2" in ended.stdout
    assert "ulysses" in ended.stdout


def test_the_example_of_a_picture_writes_one(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    _run("pipeline_image", "--output", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


def _run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "examples" / f"{name}.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return launch([*launcher, script, "--inner", "aot_eager", "--steps", "2", *arguments])
