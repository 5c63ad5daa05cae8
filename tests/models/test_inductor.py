"""A chosen few through Inductor, forward and backward, and a second process on a warm cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.test_variants import run_variant

pytestmark = [pytest.mark.ranks, pytest.mark.inductor]


@pytest.mark.parametrize("model", ["FluxTransformer2DModel", "WanTransformer3DModel", "SD3Transformer2DModel"])
def test_inductor_gives_the_answer_of_one_process(compare, model):
    compare(model, 2, ulysses=2, inner="inductor", calls=2, timeout=600.0).check()


def test_inductor_runs_a_ring(compare):
    compare("FluxTransformer2DModel", 2, ring=2, inner="inductor", timeout=600.0).check()


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (1, 2)])
def test_inductor_trains(ranks, ulysses, ring):
    """No timestep in this model: Inductor's exp and sin of one differ from eager's by what gradients would show."""
    arguments = ("causal, grouped queries", ulysses, ring, "alltoall", "inductor")
    for answer in ranks(2).run(run_variant, *arguments, timeout=600.0):
        assert answer["error"] <= 1e-11, answer


def test_a_second_process_is_right_on_every_rank_from_a_warm_cache(tmp_path: Path):
    """Ranks differ in nothing but their rank: a cache that forgot it would hand one rank another one's code."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "cp_compile", "demo", "--model", "DiTTransformer2DModel", "--world", "2"]
    first, second = (
        json.loads(subprocess.run([*command, "--json"], env=env, check=True, capture_output=True, text=True).stdout)
        for _ in range(2)
    )
    for answer in (first, second):
        assert answer["max_rel_error"] <= 1e-5 and answer["ranks_agree"]
    assert second["compile_s"] < first["compile_s"]
