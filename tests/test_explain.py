"""The explain command: the report of any world, from one process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def _explain(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cp_compile", "explain", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.fast
def test_sixty_four_ranks_are_explained_without_starting_one():
    done = _explain("--model", "FluxTransformer2DModel", "--world", "64", "--ulysses", "8", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["ulysses"], report["ring"]) == (8, 8)
    (graph,) = report["graphs"]
    assert [a["collectives"] for a in graph["attentions"]] == [2 + 7, 2 + 7]
    assert not [g for g in graph["gathers"] if g["inside"]]


@pytest.mark.fast
def test_the_report_is_for_a_person_and_names_gathers_by_source_line():
    done = _explain("--model", "WanTransformer3DModel", "--ring", "2")
    assert done.returncode == 0, done.stderr
    assert "ring" in done.stdout and "local" in done.stdout
    assert "transformer_wan.py:" in done.stdout


@pytest.mark.fast
def test_a_model_that_is_not_there_is_told_in_one_line():
    done = _explain("--model", "Flux9")
    assert done.returncode == 2 and "Flux9" in done.stderr and "Traceback" not in done.stderr
