"""A rule registered from outside, as docs/rules.md shows it: its code is taken from the page and run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import nn

from cp_compile.agreement import digest, relative_error
from tests.ranks import Pool

pytestmark = pytest.mark.ranks

PAGE = Path(__file__).resolve().parent.parent / "docs" / "rules.md"


def _blocks() -> list[str]:
    """The page's blocks of code."""
    blocks: list[list[str]] = [[]]
    for line in PAGE.read_text().splitlines():
        if line.startswith("    ") or (not line and blocks[-1]):
            blocks[-1].append(line)
        elif blocks[-1]:
            blocks.append([])
    return [dedent("\n".join(block)) for block in blocks if block]


class _Model(nn.Module):
    """Queries and keys go through the op, as with rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.angle = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (12, 8)).transpose(1, 2).chunk(3, dim=1)
        q, k = torch.ops.mylib.rotate(q, self.angle), torch.ops.mylib.rotate(k, self.angle)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) + x


def _run(blocks: list[str], ulysses: int, ring: int) -> list[dict[str, Any]]:
    """Without the rule and with it, on one rank."""
    from cp_compile import cp_backend
    from cp_compile.passes.rules import registry

    def page(block: str) -> None:
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), {})

    op, rule = blocks
    if not hasattr(torch.ops.mylib, "rotate"):
        page(op)
    torch.manual_seed(0)
    model, x = _Model(), torch.randn(2, 11, 32)
    answers = []
    with torch.no_grad():
        expected = model(x)
        try:
            for register in (lambda: None, lambda: page(rule)):
                register()
                torch._dynamo.reset()
                backend = cp_backend(ulysses=ulysses, ring=ring, inner="aot_eager")
                found = torch.compile(model, backend=backend)(x)
                answer = {"error": relative_error(found, expected), "digest": digest(found)}
                answers.append({**answer, "report": backend.report.to_dict(), "text": str(backend.report)})
        finally:
            registry._RULES.pop(torch.ops.mylib.rotate.default, None)
    return answers


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (1, 2)])
def test_an_op_without_a_rule_is_named_and_right_and_runs_sharded_once_it_has_one(
    ranks: Callable[[int], Pool], ulysses: int, ring: int
):
    by_rank = ranks(2).run(_run, _blocks(), ulysses, ring)
    for answers in zip(*by_rank):
        assert all(a["error"] <= 1e-6 for a in answers)
        assert len({a["digest"] for a in answers}) == 1
    without, with_rule = by_rank[0]

    (graph,) = without["report"]["graphs"]
    assert graph["unknown_ops"] == ("mylib.rotate",)
    assert "no rule for (see docs/rules.md): mylib.rotate" in without["text"]
    assert {b["op"] for b in graph["barriers"]} == {"mylib.rotate"}

    (graph,) = with_rule["report"]["graphs"]
    assert graph["unknown_ops"] == () and graph["barriers"] == ()
    assert not [g for g in graph["gathers"] if g["inside"]]
    assert graph["flops_sharded"] == 1.0
    assert graph["peak_bytes"] < without["report"]["graphs"][0]["peak_bytes"]


def test_the_rule_of_the_page_is_ten_lines_at_most():
    _, rule = _blocks()
    assert len([line for line in rule.splitlines() if line.strip()]) <= 10
