"""The explain command and what its report says: memory, barriers, graph breaks, modules, the page."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from cp_compile import report as reports
from cp_compile import zoo
from cp_compile.__main__ import main
from cp_compile.explain_command import plan_of
from cp_compile.passes.memory import peak_bytes, values_of

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parent.parent
HERE = "tests/test_explain.py"
CASES = ["FluxTransformer2DModel", "SanaTransformer2DModel", "HunyuanVideo15Transformer3DModel"]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


@cache
def _json(*arguments: str) -> dict[str, Any]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["explain", *arguments, "--json"]) == 0
    return json.loads(out.getvalue())


@cache
def _plan(name: str) -> reports.Report:
    case = zoo.case(name)
    return plan_of(case.model(), case.kwargs(), 2, 1)


def _line(function: Callable[..., Any], text: str) -> str:
    """``file:line`` of the one line of a function that holds ``text``."""
    code = function.__code__
    source = Path(code.co_filename).read_text().splitlines()
    (line,) = [i for i in range(code.co_firstlineno, len(source) + 1) if text in source[i - 1]][:1]
    return f"{HERE}:{line}"


# The command


def test_sixty_four_ranks_are_explained_without_starting_one():
    report = _json("--model", "FluxTransformer2DModel", "--world", "64", "--ulysses", "8")
    assert (report["ulysses"], report["ring"]) == (8, 8)
    (graph,) = report["graphs"]
    assert [a["collectives"] for a in graph["attentions"]] == [2 + 7, 2 + 7]
    assert not [g for g in graph["gathers"] if g["inside"]]


def test_the_report_is_for_a_person_and_names_gathers_by_source_line():
    command = [sys.executable, "-m", "cp_compile", "explain", "--model", "WanTransformer3DModel", "--ring", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "ring" in done.stdout and "local" in done.stdout
    assert "transformer_wan.py:" in done.stdout
    assert re.search(r"peak activations [\d,]+ bytes, \d+% of one process", done.stdout)


def test_a_model_that_is_not_there_is_told_in_one_line(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["explain", "--model", "Flux9"])
    assert ended.value.code == 2 and "Flux9" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["explain", "--model", "SanaTransformer2DModel", "--html", str(tmp_path / "none" / "page.html")])
    assert ended.value.code == 2 and "--html" in capsys.readouterr().err


# Memory


def _peaks(function: Callable[..., Any], *args: torch.Tensor) -> tuple[int, int]:
    """By the values that a graph was traced with, and by those of a run of it."""
    module = make_fx(function, tracing_mode="fake")(*args)
    values = values_of(module)
    assert values is not None
    return peak_bytes(module.graph), peak_bytes(module.graph, values.__getitem__)


def test_memory_is_that_of_the_tensors_alive_at_once():
    x = torch.randn(1000)  # 4000 bytes, not counted
    assert _peaks(lambda x: ((x + 1) * 2) + 3, x) == (8000, 8000)

    def kept(x: torch.Tensor) -> torch.Tensor:
        a = x + 1
        return a + ((a * 2) * 3)  # a waits while a * 2 becomes a * 2 * 3

    assert _peaks(kept, x) == (12000, 12000)


def test_views_hold_what_they_view_and_nothing_more():
    x = torch.randn(1000)

    def first_half(x: torch.Tensor) -> torch.Tensor:
        half = (x + 1).view(2, 500)[0]  # keeps all of x + 1
        return half.double() + 1  # 4000 + 4000, then 4000 + 4000 + ... without x + 1

    assert _peaks(first_half, x) == (8000, 8000)
    assert _peaks(lambda x: x.view(2, 500).t(), x) == (0, 0)


def test_outputs_live_to_the_end():
    x = torch.randn(1000)
    assert _peaks(lambda x: (x + 1, x + 2, x + 3), x) == (12000, 12000)


def test_memory_that_depends_on_the_data_is_not_guessed():
    module = make_fx(lambda x: x.nonzero() + 1, tracing_mode="symbolic")(torch.ones(5))
    assert values_of(module) is None


def test_two_ranks_hold_half_of_the_activations_of_flux():
    (graph,) = _json("--model", "flux", "--ulysses", "2")["graphs"]
    assert 0.49 <= graph["peak_bytes"] / graph["peak_bytes_single"] <= 0.52
    # 1152 tokens in 512 channels, in fp32: the trunk, its norm and a feed-forward four times as wide, with its GELU.
    trunk = 1152 * 512 * 4
    assert 8 * trunk < graph["peak_bytes_single"] < 16 * trunk


# Barriers and breaks


class _Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.inner(x).unflatten(-1, (2, 8)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


class _Mixing(_Attends):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x.cumsum(1) @ torch.ones(16, 16)


class _Breaking(_Attends):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        scale = x.sum().item()
        return super().forward(x) * scale


class _Around(nn.Module):
    """The break is in an inner module, after a gather that it is not to blame for."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing, self.breaking = _Mixing(), _Breaking()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.breaking(self.mixing(x))


class _Looping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Attends(), _Attends()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            torch._dynamo.graph_break()
            x = self.second(x)
        return x


def _explained(model: nn.Module) -> reports.Report:
    return plan_of(model, {"x": torch.randn(1, 12, 16)}, 2, 1)


def test_an_op_that_mixes_tokens_is_named_with_its_line():
    (graph,) = _explained(_Mixing()).graphs
    (barrier,) = graph.barriers
    assert barrier.op == "aten.cumsum"
    assert barrier.where.endswith(_line(_Mixing.forward, "x.cumsum(1)"))
    (gather,) = graph.gathers
    assert barrier.reason in gather.reasons[0]
    assert not _explained(_Attends()).graphs[0].barriers


def test_a_break_is_named_by_the_line_at_which_dynamo_stopped():
    report = _explained(_Breaking())
    assert len(report.graphs) == 2
    ((before, found),) = report.breaks
    assert before == 0
    assert found.where.endswith(_line(_Breaking.forward, ".item()"))
    assert found.code == "scale = x.sum().item()"
    assert "item" in found.reason
    # 12 tokens of 16 channels, of which the rank sends its half.
    assert (found.gathers, found.bytes_sent) == (1, 6 * 16 * 4)
    assert report.graphs[1].ends is None
    assert found.where in str(report) and "1 gather, 384 bytes sent" in str(report)


def test_a_break_in_an_inner_module_is_named_there_and_costs_only_what_leaves():
    first, second = _explained(_Around()).graphs[:2]
    assert first.ends is not None and second.ends is not None
    assert first.ends.where.endswith(_line(_Breaking.forward, ".item()"))
    # The first graph gathers for the op that mixes tokens, whose value leaves it whole.
    assert len(first.gathers) == 1 and (first.ends.gathers, first.ends.bytes_sent) == (0, 0)
    assert (second.ends.gathers, second.ends.bytes_sent) == (1, 6 * 16 * 4)


def test_a_function_that_dynamo_gave_up_is_named_by_the_call_in_it():
    # One graph serves all calls of the inner module, and each call gathers.
    ((_, found),) = _explained(_Looping()).breaks
    assert found.where.endswith(_line(_Looping.forward, "x = self.first(x)"))
    assert (found.gathers, found.bytes_sent) == (1, 6 * 16 * 4)


def test_a_model_of_one_graph_has_no_break():
    report = _explained(_Attends())
    assert report.breaks == [] and "graph break" not in str(report)


def test_the_breaks_of_a_published_model_are_named_with_what_they_cost():
    report = _plan("HunyuanVideo15Transformer3DModel")
    (_, first), *_ = report.breaks
    assert "transformer_hunyuan_video15.py:" in first.where and first.code.startswith("if ")
    assert first.gathers == 1 and first.bytes_sent > 0


# What the report adds up to


@pytest.mark.parametrize("name", CASES)
def test_modules_add_up_to_their_graph(name: str):
    for graph in _plan(name).graphs:
        assert sum(m.flops for m in graph.modules) == graph.flops
        assert sum(m.collectives for m in graph.modules) == graph.collectives
        assert sum(m.bytes_sent for m in graph.modules) == graph.bytes_sent
        once = (*graph.gathers, *graph.reductions)
        assert graph.collectives == sum(a.collectives for a in graph.attentions) + len(once)
        assert graph.bytes_sent == sum(part.bytes_sent for part in (*graph.attentions, *once))
        sharded = sum(m.flops_sharded for m in graph.modules)
        assert sharded == pytest.approx(graph.flops * graph.flops_sharded)
        assert {a.module for a in graph.attentions} <= {m.path for m in graph.modules}


def _documented() -> dict[str, list[str]]:
    """For each section of the page with a table of fields, their names."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in (ROOT / "docs" / "report.md").read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ").strip()
        elif match := re.match(r"\| `(\w+)` \|", line):
            found.setdefault(section, []).append(match[1])
    return found


def test_every_field_of_the_report_is_documented_and_no_other():
    classes = {n: c for n in reports.__all__ if is_dataclass(c := getattr(reports, n)) and n != "Report"}
    expected = {n: [f.name for f in fields(c)] for n, c in classes.items()}
    expected["Report"] = list(reports.Report(2, 1).to_dict())
    assert _documented() == expected


def test_the_dictionary_is_plain_data_with_the_documented_keys():
    documented = _documented()
    report = _plan("HunyuanVideo15Transformer3DModel").to_dict()
    assert json.loads(json.dumps(report)) == json.loads(json.dumps(report, default=str))
    assert list(report) == documented["Report"]
    inner = {"axes": "Segment", "attentions": "Attention", "gathers": "Gather", "barriers": "Barrier"}
    inner |= {"reductions": "Reduction", "modules": "Module"}
    for graph in report["graphs"]:
        assert list(graph) == documented["GraphReport"]
        for key, name in inner.items():
            assert all(list(entry) == documented[f"{name}Report"] for entry in graph[key])
        assert graph["ends"] is None or list(graph["ends"]) == documented["BreakReport"]


# The page


class _Page(HTMLParser):
    """Checks that tags nest, and keeps the text."""

    empty = frozenset({"meta", "br", "hr", "img"})

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.names: set[str] = set()
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.names |= {name for name, _ in attrs}
        if tag not in self.empty:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data + " "


@pytest.mark.parametrize("name", CASES)
def test_the_page_needs_nothing_but_itself(name: str):
    text = _plan(name).to_html(name)
    page = _Page(text)
    assert not page.tags & {"script", "link", "img", "iframe", "object"}
    assert not page.names & {"src", "href", "onload", "onclick"}
    assert "url(" not in text and "@import" not in text and "http" not in text


@pytest.mark.parametrize("name", CASES)
def test_the_page_shows_what_the_report_says(name: str):
    report = _plan(name)
    text = " ".join(_Page(report.to_html(name)).text.split())
    for graph in report.graphs:
        for part in (*graph.attentions, *graph.gathers, *graph.barriers, *graph.reductions):
            assert part.where in text
    for _, found in report.breaks:
        assert found.where in text and found.code in text


def test_the_page_draws_equal_blocks_once(tmp_path: Path):
    # The demo's own Flux has 2 double and 4 single blocks.
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        page = tmp_path / "plan.html"
        assert main(["explain", "--ulysses", "2", "--ring", "2", "--html", str(page)]) == 0
    text = " ".join(_Page(page.read_text()).text.split())
    assert "transformer_blocks.0 … 1 \N{MULTIPLICATION SIGN} 2" in text
    assert "single_transformer_blocks.0 … 3 \N{MULTIPLICATION SIGN} 4" in text
    assert text.count("unified 2 all-to-all, 1 ring exchange") == 2


def test_names_from_outside_cannot_become_markup():
    page = reports.Report(2, 1).to_html("<script>alert(1)</script>")
    assert "script" not in _Page(page).tags
