"""``torch.compile(model, backend="cp", options={...})``: found by name, under every launcher, clear when refused."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from cp_compile.local_ranks import LOOPBACK
from cp_compile.named import NamedBackend

SCRIPT = """
import torch, torch.distributed as dist
from torch import nn

{start}
torch.manual_seed(0)
model = nn.TransformerEncoderLayer(24, 3, 32, dropout=0.0, batch_first=True)
x = torch.randn(2, 7, 24)
compiled = torch.compile(model, backend="cp", options={{"ulysses": 2, "inner": "aot_eager"}})
error = (compiled(x) - model(x)).abs().max().item()
from cp_compile.named import cp
report = cp.backend({{"ulysses": 2, "inner": "aot_eager"}}).report
assert error < 1e-5, error
assert [a.variant for g in report.graphs for a in g.attentions] == ["ulysses"], str(report)
print(f"rank {{dist.get_rank()}} of {{dist.get_world_size()}} agrees", flush=True)
dist.destroy_process_group()
"""


def launch(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command on this machine alone, one thread a rank, and asserts that it ends well."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK}
    ended = subprocess.run(command, env=env, text=True, capture_output=True, timeout=400)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


@pytest.mark.fast
def test_torch_finds_the_backend_by_its_name() -> None:
    (entry,) = entry_points(group="torch_dynamo_backends", name="cp")
    assert entry.value == "cp_compile.named:cp"
    assert "cp" in torch._dynamo.list_backends()


@pytest.mark.fast
def test_equal_options_share_a_backend_until_dynamo_is_reset() -> None:
    named = NamedBackend()
    one = named.backend({"ulysses": 2, "options": {"max_autotune": True}})
    assert named.backend({"options": {"max_autotune": True}, "ulysses": 2}) is one
    assert named.backend({"ulysses": 2}) is not one
    assert (one.ulysses, one.ring, one.inner_options) == (2, 1, {"max_autotune": True})
    named.reset()
    assert named.backend({"ulysses": 2, "options": {"max_autotune": True}}) is not one


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "mode", "said"),
    [
        ({}, None, r"needs a degree: options=\{'ulysses': 2\}"),
        ({"ulyses": 2}, None, r"no option 'ulyses'; did you mean 'ulysses'\?"),
        ({"ulysses": 2, "max_autotune": True}, None, r"no option 'max_autotune'.*'options': \{\.\.\.\}"),
        ({"ulysses": 0}, None, r"ulysses=0"),
        ({}, "max-autotune", r"mode='max-autotune' is Inductor's"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], mode: str | None, said: str) -> None:
    named = NamedBackend()
    with pytest.raises(ValueError, match=said):
        named.backend(options, mode)
    compiled = torch.compile(torch.nn.Sequential(torch.nn.ReLU()), backend="cp", options=options or None, mode=mode)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=said):
        compiled(torch.ones(2))


@pytest.mark.ranks
def test_it_runs_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(start='dist.init_process_group("gloo")'))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    _agree(launch([*launcher, str(script)]).stdout)


@pytest.mark.ranks
def test_it_runs_under_accelerate(tmp_path: Path) -> None:
    # `--cpu` starts several processes only through MPI. `--multi_gpu` starts them as torchrun does, and
    # `Accelerator(cpu=True)` then puts them on the CPU, with gloo.
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(start="from accelerate import Accelerator; accelerator = Accelerator(cpu=True)"))
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    _agree(
        launch(
            [*launcher, "--num_machines", "1", "--mixed_precision", "no", "--main_process_port", "0", str(script)]
        ).stdout
    )


def _agree(printed: str) -> None:
    assert sorted(line for line in printed.splitlines() if line.startswith("rank")) == [
        "rank 0 of 2 agrees",
        "rank 1 of 2 agrees",
    ]
