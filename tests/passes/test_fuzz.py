"""Random transformers, sharded and whole: equal outputs, gradients and written inputs on every rank.

Each draw is a small model of random layers (``fuzz/``), captured once and then planned, rewritten and run for a few
meshes. The plan goes by random costs at times, so that legal labels are tried that no real cost would choose.

A few hundred models run by default. A long run, of other models each time::

    CP_DRAWS=5000 pytest tests/passes/test_fuzz.py -s

prints what the models had and how much of it ran on shards.
"""

from __future__ import annotations

import logging
import os
import random
import zlib
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx

from cp_compile.passes.costs import CostModel
from tests.passes.fuzz.draft import Pick, draw_model
from tests.passes.fuzz.transformer import transformer
from tests.passes.harness import ATTENTION, Compiled, capture_function, compare, compile_captured

pytestmark = pytest.mark.fast

DRAWS = int(os.environ.get("CP_DRAWS", "100"))
"""Models; thousands for a long run."""

MESHES = [(1, 2), (2, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (1, 4), (4, 1), (2, 3)]

ALWAYS_SHARD = CostModel(peak=1e3, memory=1e3, bandwidth=1e30, latency=0.0)
"""Work is dear and communication is free: whatever can run on a shard does."""


@dataclass(frozen=True)
class RandomCosts(CostModel):
    """Each node's work and each collective costs something else, so that any labelling may be the cheapest."""

    seed: int = 0

    def compute(self, node: fx.Node) -> float:
        return self._drawn(node.name)

    def send(self, sent: float) -> float:
        return self._drawn(f"{sent}") * 0.5

    def _drawn(self, name: str) -> float:
        return random.Random(zlib.crc32(f"{name}/{self.seed}".encode())).random()


def _seen(compiled: Compiled) -> Counter[str]:
    """What of a plan says that the model was really sharded."""
    modes = compiled.plan.modes
    seen: Counter[str] = Counter(plans=1)
    attentions = [n for n in compiled.graph.nodes if n.target is ATTENTION]
    seen["attentions"] = len(attentions)
    seen["attentions on a shard"] = sum(n in modes and modes[n].attends for n in attentions)
    seen["attentions as batch"] = sum(n in modes and not modes[n].attends for n in attentions)
    seen["attentions with keys on a shard"] = len(compiled.plan.keys_sharded)
    seen["plans with attention on a shard"] = bool(compiled.programs[0].attentions)
    seen["calls"] = len(compiled.axes.relations)
    seen["calls on a shard"] = len(modes)
    seen["gathers"] = len(compiled.programs[0].gathers)
    seen["partial sums"] = len(compiled.programs[0].reduced)
    seen["axes of several segments"] = any(len(m.word) > 1 for m in modes.values())
    seen.update({f"on a shard: {n.target}": 1 for n in modes})
    return seen


def run(pick: Pick, seen: Counter[str]) -> None:
    """Draw a model, and check it by three plans."""
    model = draw_model(pick, transformer)
    seen.update(model.kinds)
    seen["models"] += 1
    captured = capture_function(model, model.inputs)
    for _ in range(3):
        ring, ulysses = pick(MESHES)
        costs = pick([ALWAYS_SHARD, RandomCosts(), CostModel()])
        if isinstance(costs, RandomCosts):
            costs = RandomCosts(seed=pick(range(2**16)))
        training, rotate = pick([True, True, False]), pick(["alltoall", "allgather"])
        try:
            compiled = compile_captured(captured, ring, ulysses, training=training, rotate=rotate, costs=costs)
            compare(compiled, model, model.inputs, training=training)
        except Exception as e:
            e.add_note(f"on ring={ring}, ulysses={ulysses}, training={training}, rotate={rotate}, by {costs}")
            e.add_note(captured.module.print_readable(print_output=False))
            raise
        seen += _seen(compiled)


def test_a_random_transformer_is_the_same_on_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)  # pytest would keep all of its records
    seen: Counter[str] = Counter()

    @settings(
        max_examples=DRAWS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        derandomize="CP_DRAWS" not in os.environ,
    )
    @given(data=st.data())
    def draw(data: st.DataObject) -> None:
        run(lambda choices: data.draw(st.sampled_from(choices)), seen)

    draw()
    for name, count in sorted(seen.items(), key=lambda item: -item[1]):
        print(f"{count:8d}  {name}")
    # Random models are no test if they run whole.
    assert seen["plans with attention on a shard"] > 0.6 * seen["plans"]
    assert seen["calls on a shard"] > 0.3 * seen["calls"]
