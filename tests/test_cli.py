"""The command line does what it says, tells a person what is wrong, and ends with the right status."""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cp_compile import demo
from cp_compile.__main__ import main
from cp_compile._version import __version__

ROOT = Path(__file__).resolve().parent.parent
TINY = ["--model", "FluxTransformer2DModel", "--inner", "aot_eager", "--steps", "1"]
KEYS = {
    "max_rel_error",
    "ranks_agree",
    "step_s_single",
    "step_s_parallel",
    "collectives",
    "bytes_per_rank",
    "compile_s",
    "world",
    "ulysses",
    "ring",
    "model",
}


def _options(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(argv)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    # The package is found as an installed one would be, and nothing here depends on the folder that the user is in.
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--model", "FluxTransformer"], "no case is called 'FluxTransformer'; close names: FluxTransformer2DModel"),
        (["--world", "1"], "one rank has nothing to share"),
        (["--world", "0"], "--world is 0; it must be at least 1"),
        (["--ulysses", "-2"], "--ulysses is -2; it must be at least 1"),
        (["--steps", "0"], "--steps is 0"),
        (["--world", "3", "--ulysses", "2"], "2 * 1 is not 3"),
        (["--world", "4", "--ring", "8"], "1 * 8 is not 4"),
        (["--height", "500"], "--height is 500; a token is 16 pixels wide"),
        (["--model", "WanTransformer3DModel", "--width", "512"], "WanTransformer3DModel brings its inputs along"),
        (["--inner", "nonsense"], "invalid choice: 'nonsense'"),
    ],
)
def test_options_that_make_no_sense_are_explained(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", *argv])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.fast
@pytest.mark.parametrize(
    ("argv", "degrees"),
    [
        ([], (2, 2, 1)),
        (["--world", "4"], (4, 4, 1)),
        (["--ulysses", "4"], (4, 4, 1)),
        (["--ring", "2"], (2, 1, 2)),
        (["--world", "4", "--ring", "2"], (4, 2, 2)),
        (["--world", "6", "--ulysses", "2"], (6, 2, 3)),
        (["--ulysses", "2", "--ring", "2"], (4, 2, 2)),
    ],
)
def test_degrees_left_out_follow_from_the_others(argv: list[str], degrees: tuple[int, int, int]) -> None:
    assert demo._degrees(_options(*argv), None) == degrees


@pytest.mark.fast
def test_ranks_that_a_launcher_started_are_taken() -> None:
    assert demo._degrees(_options(), 3) == (3, 3, 1)
    assert demo._degrees(_options("--ring", "2"), 4) == (4, 2, 2)
    with pytest.raises(ValueError, match="the launcher started 3 ranks"):
        demo._degrees(_options("--world", "2"), 3)


@pytest.mark.fast
def test_the_demos_flux_has_a_token_for_every_16_pixels() -> None:
    inputs = demo.configure(_options("--height", "48", "--width", "80"), None).case().kwargs()
    assert inputs["hidden_states"].shape == (1, 15, 64)
    assert inputs["img_ids"][-1].tolist() == [0.0, 2.0, 4.0]
    assert inputs["img_ids"].dtype == torch.float32


def _answer(**changes: Any) -> dict[str, Any]:
    same = {
        "error": 1e-7,
        "digest": ["a", "b"],
        "alone": [2.0],
        "alone_error": 1e-7,
        "together": [1.0],
        "compile_s": 3.0,
        "collectives": 4,
        "bytes_per_rank": 5,
    }
    return {**same, **changes}


@pytest.mark.fast
@pytest.mark.parametrize(
    ("second", "equal"),
    [
        (_answer(), True),
        (_answer(error=2e-5), False),
        (_answer(error=math.inf), False),
        (_answer(digest=["a", "c"]), False),
    ],
)
def test_only_equal_answers_count_as_equal(
    second: dict[str, Any], equal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config = demo.configure(_options(), None)
    answers = [_answer(), second]
    assert demo._equal(demo._summary(config, answers)) is equal
    demo._show(config, answers, as_json=False)
    assert ("DIFFERENT" in capsys.readouterr().out) is not equal
    demo._show(config, answers, as_json=True)
    assert "Infinity" not in capsys.readouterr().out


@pytest.mark.fast
def test_a_step_of_several_ranks_lasts_as_long_as_its_slowest_rank() -> None:
    answers = [_answer(together=[1.0, 5.0, 1.0]), _answer(together=[2.0, 1.0, 9.0])]
    assert demo._summary(demo.configure(_options(), None), answers)["step_s_parallel"] == 5.0


@pytest.mark.fast
def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert __version__ in capsys.readouterr().out


@pytest.mark.ranks
def test_the_demo_prints_one_json_object_and_its_ranks_are_equal() -> None:
    done = _run("-m", "cp_compile", "demo", *TINY, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result.keys() >= KEYS
    assert result["max_rel_error"] <= 1e-5
    assert result["ranks_agree"] is True
    assert (result["model"], result["world"], result["ulysses"], result["ring"]) == (TINY[1], 2, 2, 1)
    assert result["collectives"] > 0
    assert result["bytes_per_rank"] > 0
    assert "compiling it for 2 ranks" in done.stderr


@pytest.mark.ranks
def test_the_demo_runs_on_the_ranks_of_torchrun() -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--standalone"]
    done = _run(*launcher, "-m", "cp_compile", "demo", *TINY)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"ranks equal to the bit +yes", done.stdout)) == 1
    assert done.stdout.count("The ranks give the answer of one process.") == 1


@pytest.mark.ranks
def test_a_rank_that_fails_is_told_once_and_ends_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Ranks build the case by name, and there is none: as if a rank's installation were another one than ours.
    monkeypatch.setattr(demo, "configure", lambda *_: demo.Config("gone", 2, 2, 1, "aot_eager", 512, 512, 1, 60.0))
    assert main(["demo"]) == 1
    err = capsys.readouterr().err
    assert err.count("no case is called 'gone'") == 1
    assert "ranks 0, 1: Traceback" in err
