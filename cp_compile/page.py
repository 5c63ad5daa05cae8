"""The report as a page: one file of HTML that needs no network and no script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from .blocks import Block, blocks_of
from .report_text import attention_calls, barrier_counts, break_cost, gather_place, lengths_text, shape_text, share_text

if TYPE_CHECKING:
    from .report import AttentionReport, GatherReport, GraphReport, ReductionReport, Report, SegmentReport

__all__ = ["as_html"]

_MOST_CELLS = 64
"""Ranks that are drawn one by one."""


_MOST_OPS = 2
"""Names of barriers that stand in a row of the drawing; the table has all of them."""


def as_html(report: Report, title: str) -> str:
    """The whole page."""
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    ranks = report.ulysses * report.ring
    main = "".join(_graph(report, i) for i in range(len(report.graphs)))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>{escape(title)}</title><style>\n{style}</style></head>\n<body><header>'
        f'<p class="eyebrow">context parallel plan</p><h1>{escape(title)}</h1>'
        f'<p class="lead">ulysses {report.ulysses} &times; ring {report.ring} = {ranks} ranks, '
        f"{_count(len(report.graphs), 'graph')}</p>{_summary(report)}{_legend()}</header>\n<main>"
        f"{main or '<p>Nothing is compiled yet: run the model once.</p>'}{_breaks(report)}</main></body></html>\n"
    )


def _summary(report: Report) -> str:
    graphs = report.graphs
    flops = sum(g.flops for g in graphs)
    sharded = sum(g.flops * g.flops_sharded for g in graphs)
    tiles = [
        (share_text(sharded / flops) if flops else "-", "of the FLOPs run sharded"),
        (str(report.collectives), "collectives in one forward"),
        (_bytes(report.bytes_per_rank), "sent by each rank"),
    ]
    single = max((g.peak_bytes_single for g in graphs), default=0)
    if single and all(g.peak_bytes is not None for g in graphs):
        peak = max(g.peak_bytes or 0 for g in graphs)
        tiles.append((_bytes(peak), f"peak activations, {peak / single:.0%} of one process"))
    items = "".join(f"<div><dt>{escape(what)}</dt><dd>{escape(number)}</dd></div>" for number, what in tiles)
    return f'<dl class="tiles">{items}</dl>'


def _legend() -> str:
    return (
        '<p class="legend"><span class="key sharded"></span> on a shard of the tokens'
        '<span class="key whole"></span> on all tokens, on every rank'
        '<span class="key sends"></span> communicates</p>'
    )


def _graph(report: Report, i: int) -> str:
    g = report.graphs[i]
    head = f"Graph {g.number}" if len(report.graphs) > 1 else "The model"
    parts = [f'<section><h2>{head} <span class="where">{escape(g.where)}</span></h2>']
    if g.note:
        parts.append(f'<p class="note">{escape(_sentence(g.note))}</p>')
    if g.axes:
        parts += ['<h3>Token axes</h3><div class="axes">', *(_axis(a, report) for a in g.axes), "</div>"]
    if g.attentions:
        parts.append("<h3>Modules, in order of use</h3>")
        parts.append(f'<ol class="flow">{"".join(_flow(g))}</ol>')
    elif g.modules:
        blocks = ", ".join(escape(b.name) for b in blocks_of(g))
        parts.append(f'<p class="quiet">{blocks}</p>')
    parts.append(_tables(g))
    ends = dict(report.breaks).get(i)
    if ends is not None:
        parts.append(
            f'<div class="break"><p><strong>Graph break</strong> at <code>{escape(ends.where)}</code></p>'
            f"<pre>{escape(ends.code)}</pre><p>{escape(_sentence(ends.reason))}</p>"
            f'<p class="quiet">Cost: {escape(break_cost(report, [i]))}.</p></div>'
        )
    return "".join([*parts, "</section>\n"])


def _axis(axis: SegmentReport, report: Report) -> str:
    """Each segment as a bar, cut where the ranks' rows begin."""
    ranks = report.ulysses * report.ring
    weights = [n if isinstance(n, int) else 1024 for n in axis.lengths]
    cells = "".join(f'<i class="{"mine" if r == 0 else ""}"></i>' for r in range(min(ranks, _MOST_CELLS)))
    bars = "".join(
        f'<div class="segment" style="flex-grow:{w}"><span>{escape(str(n))}</span>'
        f'<div class="cells" aria-hidden="true">{cells}</div></div>'
        for n, w in zip(axis.lengths, weights)
    )
    cut = ", zigzag (a first and a last part for each rank)" if axis.zigzag else ""
    text = f"{lengths_text(axis.lengths)} tokens, {lengths_text(axis.local)} on each of {ranks} ranks{cut}"
    return f'<figure class="axis"><div class="bars">{bars}</div><figcaption>{escape(text)}</figcaption></figure>'


def _flow(g: GraphReport) -> Iterable[str]:
    cut = f"{_count(g.inputs_sharded, 'input')} cut to the rank's rows <em>no communication</em>"
    yield f'<li class="edge">{cut if g.inputs_sharded else "inputs whole on every rank"}</li>'
    for block in blocks_of(g):
        yield _card(block)
        for gather in block.gathers:
            yield f'<li class="edge sends">{_gather(gather, block.times)}</li>'
        for reduction in block.reductions:
            yield f'<li class="edge sends">{_reduction(reduction, block.times)}</li>'
    yield '<li class="edge">outputs whole on every rank</li>'


def _card(block: Block) -> str:
    rows = "".join(_row(c) for c in _shown_children(block))
    return f'<li class="card {_tone(block.share)}">{_row(block, "div")}{f"<ul>{rows}</ul>" if rows else ""}</li>'


def _shown_children(block: Block) -> list[Block]:
    """One level of what is inside, and where that is a single module, what is inside that."""
    while len(block.children) == 1:
        block = block.children[0]
    return block.children


def _row(block: Block, tag: str = "li") -> str:
    name = escape(block.name) + (f" &hellip; {escape(block.last.rpartition('.')[2])}" if block.times > 1 else "")
    times = f'<span class="times">&times; {block.times}</span>' if block.times > 1 else ""
    flops = _flops(block.flops) if block.flops else ""
    badges = _badges(block, [] if tag == "li" else _shown_children(block))
    share = f"{block.share:.0%}"
    return (
        f'<{tag} class="row"><span class="name">{name}{times}</span><span class="kind">{escape(block.kind)}</span>'
        f'<span class="badges">{badges}</span><span class="flops">{flops}</span>'
        f'<span class="bar" role="img" aria-label="{share} sharded" title="{share} sharded">'
        f'<i style="width:{block.share * 100:.3g}%"></i></span></{tag}>'
    )


def _badges(block: Block, below: Sequence[Block]) -> str:
    """What happens in a block that the rows below it do not show."""
    attentions = [a for a in block.attentions if not any(a in b.attentions for b in below)]
    badges = "".join(map(_attention, attentions[:1]))
    if len(attentions) > 1:
        calls, sent = sum(a.collectives for a in attentions), sum(a.bytes_sent for a in attentions)
        text = f"{_count(len(attentions), 'attention')}, {_count(calls, 'collective')}, {_bytes(sent)}"
        badges = f'<span class="badge">{text}</span>'
    ops = list(dict.fromkeys(b.op for b in block.barriers if not any(b in c.barriers for c in below)))
    if ops:
        names = ", ".join(op.removeprefix("aten.") for op in ops[:_MOST_OPS])
        more = f" and {len(ops) - _MOST_OPS} more" if len(ops) > _MOST_OPS else ""
        badges += f'<span class="badge barrier"><b>barrier</b> {escape(names)}{more}</span>'
    return badges


def _attention(a: AttentionReport) -> str:
    calls = attention_calls(a.variant, a.collectives)
    sent = f", {_bytes(a.bytes_sent)}" if a.collectives else ""
    quiet = "" if a.collectives else " silent"
    return f'<span class="badge{quiet}"><b>{escape(a.variant)}</b> {escape(calls)}{sent}</span>'


def _gather(g: GatherReport, times: int) -> str:
    where = f" <code>{escape(g.where)}</code>" if g.where else ""
    each = f" in each of {times}" if times > 1 else ""
    barrier = "<b>gather inside</b>" if g.inside else "<b>gather</b>"
    why = escape("; ".join(g.reasons))
    return f"{barrier} of <code>{escape(g.op)}</code>{each}, {_bytes(g.bytes_sent)} <em>{why}</em>{where}"


def _reduction(r: ReductionReport, times: int) -> str:
    each = f" in each of {times}" if times > 1 else ""
    return (
        f"<b>all-reduce</b> of <code>{escape(r.op)}</code>{each}, {_bytes(r.bytes_sent)} "
        f"<em>partial sums over tokens</em> <code>{escape(r.where)}</code>"
    )


def _tables(g: GraphReport) -> str:
    parts = []
    if g.attentions:
        rows = [
            [a.module or a.name, a.variant, shape_text(a.query), shape_text(a.key), shape_text(a.mask),
             "yes" if a.causal else "-", str(a.collectives), f"{a.bytes_sent:,}", a.kernel, a.where]
            for a in g.attentions
        ]  # fmt: skip
        head = ["attention", "variant", "query", "key", "mask", "causal", "collectives", "bytes", "kernel", "source"]
        parts.append(_table(_count(len(rows), "attention"), head, rows))
    if g.gathers:
        rows = [
            [x.op, gather_place(x.output, x.inside), "; ".join(x.reasons), f"{x.bytes_sent:,}", x.where]
            for x in g.gathers
        ]
        parts.append(_table(_count(len(rows), "gather"), ["value", "place", "reason", "bytes", "source"], rows))
    if g.barriers:
        rows = [
            [op, reason, f"{flops:,}", str(times), where]
            for (op, reason, flops, where), times in barrier_counts(g.barriers).items()
        ]
        parts.append(
            _table(_count(len(g.barriers), "barrier"), ["op", "reason", "FLOPs each", "times", "source"], rows)
        )
    if g.reductions:
        rows = [[r.op, f"{r.bytes_sent:,}", r.where] for r in g.reductions]
        parts.append(_table(_count(len(rows), "all-reduce"), ["op", "bytes", "source"], rows))
    if g.unknown_ops:
        parts.append(f'<p class="note">No rule for {escape(", ".join(g.unknown_ops))}: run on all tokens.</p>')
    return "".join(parts)


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(h)}</th>' for h in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return (
        f'<details><summary>{escape(caption)}</summary><div class="scroll"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></details>"
    )


def _breaks(report: Report) -> str:
    if not report.breaks:
        return ""
    rows = [
        [str(report.graphs[i].number), b.where, b.code, b.reason, break_cost(report, [i])] for i, b in report.breaks
    ]
    head = ["after graph", "source", "line", "reason", "cost"]
    return f"<section><h2>Graph breaks</h2>{_table(_count(len(rows), 'break'), head, rows)}</section>"


def _tone(share: float) -> str:
    return "sharded" if share > 0.95 else "whole" if share < 0.05 else "mixed"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _bytes(n: int) -> str:
    return _scaled(n, ("B", "kB", "MB", "GB", "TB"))


def _flops(n: int) -> str:
    return _scaled(n, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def _scaled(n: float, units: Sequence[str]) -> str:
    for unit in units:
        if n < 1000 or unit == units[-1]:
            return f"{n:.3g} {unit}"
        n /= 1000
    raise AssertionError
