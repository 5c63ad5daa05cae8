"""From the plan and the rewritten graph to a report for a person."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from ..attention import AttentionSpec, collectives, elements_sent, variant
from ..attention.heads import plan_heads
from ..attention.kernel import MATH
from ..attention.ring import plan_ring
from ..mesh import Mesh
from ..placement import Placement
from ..report import AttentionReport, GatherReport, GraphReport, ReductionReport, SegmentReport
from .barriers import barriers
from .breaks import break_after
from .capture import Captured
from .costs import bytes_of, flops_of, number
from .memory import peak_bytes, values_of
from .modules import sum_by_module
from .plan import Plan
from .provenance import module_of, where_of
from .relation import Op, is_tensor, shape_of
from .rewrite import Gathered, Options, Rewritten
from .rules.attention import ATTENTION
from .rules.registry import find_rule
from .segments import Word, leaves

__all__ = ["explain", "explain_unchanged"]


def explain(
    captured: Captured, plan: Plan, rewritten: Rewritten, mesh: Mesh, options: Options, n: int, seconds: float
) -> GraphReport:
    """Describe one compiled graph. To be called while Dynamo waits for the backend."""
    graph = captured.module.graph
    learned = _learned(captured) if torch.is_grad_enabled() else set()
    sites = [node for node in graph.nodes if node.target is ATTENTION]
    attentions = {node: _attention(node, plan, mesh, options, learned) for node in sites}
    last = max((i for i, node in enumerate(graph.nodes) if node in attentions and node in plan.modes), default=-1)
    place = {node: i for i, node in enumerate(graph.nodes)}
    gathers = {g.value: _gather(g, plan, place, last) for g in rewritten.gathers}
    leaving = [gathers[g.value] for g in rewritten.gathers if any(user.op == "output" for user in g.users)]
    reductions = {node: _reduction(node, mesh) for node in rewritten.reduced}
    sent: dict[fx.Node, tuple[int, int]] = {node: (a.collectives, a.bytes_sent) for node, a in attentions.items()}
    parts: list[tuple[fx.Node, GatherReport | ReductionReport]] = [*gathers.items(), *reductions.items()]
    for node, part in parts:
        calls, before = sent.get(node, (0, 0))
        sent[node] = calls + 1, before + part.bytes_sent
    work = {node: flops_of(node) for node in graph.nodes}
    total = sum(work.values())
    words = {leaves(m.word) for m in plan.modes.values()}
    longest = [w for w in words if not any(w != o and _contains(o, w) for o in words)]
    values = values_of(rewritten.module)
    return GraphReport(
        number=n,
        axes=tuple(_axis(w, plan) for w in sorted(longest, key=lambda w: -sum(number(s.length) for s in w))),
        attentions=tuple(attentions.values()),
        gathers=tuple(gathers.values()),
        barriers=barriers(plan.axes),
        reductions=tuple(reductions.values()),
        inputs_sharded=len({s.value for s in rewritten.shards if s.value.op == "placeholder"}),
        unknown_ops=tuple(sorted(_unknown(graph, plan))),
        flops=total,
        flops_sharded=sum(work[node] for node in plan.modes) / total if total else 0.0,
        collectives=sum(calls for calls, _ in sent.values()),
        bytes_sent=sum(b for _, b in sent.values()),
        peak_bytes=None if values is None else peak_bytes(rewritten.module.graph, values.__getitem__),
        peak_bytes_single=peak_bytes(graph),
        modules=sum_by_module(graph, plan.modes, sent),
        ends=break_after(captured.dynamo, leaving),
        seconds=seconds,
        where=_first_line(graph),
    )


def explain_unchanged(captured: Captured, n: int) -> GraphReport:
    """Describe a graph without attention, which is compiled as it is. To be called while Dynamo waits."""
    graph = captured.module.graph
    note = "no attention in this graph: it is compiled unchanged, every rank runs all of it"
    unentered = _higher_order_ops(graph)
    peak = peak_bytes(graph)
    return GraphReport(
        number=n,
        note=f"{note} ({', '.join(sorted(unentered))} included)" if unentered else note,
        flops=sum(map(flops_of, graph.nodes)),
        peak_bytes=peak,
        peak_bytes_single=peak,
        modules=sum_by_module(graph, (), {}),
        ends=break_after(captured.dynamo),
        where=_first_line(graph),
    )


def _first_line(graph: fx.Graph) -> str:
    return next((where for node in graph.nodes if node.op == "call_function" and (where := where_of(node))), "")


def _op_name(node: fx.Node) -> str:
    return node.name if node.op == "placeholder" else str(node.target).removesuffix(".default")


def _learned(captured: Captured) -> set[fx.Node]:
    """Values that a gradient flows through."""
    found = {n for n, trained in zip(captured.placeholders, captured.trained) if trained}
    for node in captured.module.graph.nodes:
        if any(v in found for v in node.all_input_nodes):
            found.add(node)
    return found


def _attention(node: fx.Node, plan: Plan, mesh: Mesh, options: Options, learned: set[fx.Node]) -> AttentionReport:
    op = plan.axes.ops[node]
    mode = plan.modes.get(node)
    kind, kernel, calls, sent = "whole", "sdpa", 0, 0
    if mode is not None:
        kind = "batch"
    if mode is not None and mode.attends:
        spec = _spec(node, plan, mesh, options, lambda p: p)
        kind = variant(spec)
        calls = collectives(spec)
        shapes = [tuple(map(number, shape_of(op.args[s]))) for s in ("query", "key", "value")]
        sent = int(elements_sent(_spec(node, plan, mesh, options, _hinted), *shapes)) * node.meta["val"].dtype.itemsize
        kernel = _kernel(op, spec, learned) if kind in ("ring", "unified") else "sdpa"
    mask = op.args["attn_mask"]
    return AttentionReport(
        name=node.name,
        variant=kind,
        query=_shape(op.args["query"]),
        key=_shape(op.args["key"]),
        mask=None if mask is None else _shape(mask),
        causal=bool(op.args["is_causal"]),
        collectives=calls,
        bytes_sent=sent,
        kernel=kernel,
        where=where_of(node),
        module=module_of(node),
    )


def _spec(
    node: fx.Node, plan: Plan, mesh: Mesh, options: Options, change: Callable[[Placement], Placement]
) -> AttentionSpec:
    mode = plan.modes[node]
    args = plan.axes.ops[node].args
    kv = mode.keys[1] if mode.keys and node in plan.keys_sharded else None
    return AttentionSpec(
        mesh,
        change(plan.placement(mode.word)),
        None if kv is None else change(plan.placement(kv)),
        causal=bool(args["is_causal"]),
        scale=args["scale"],
        dropout_p=args["dropout_p"],
        rotate=options.rotate,  # type: ignore[arg-type]
        convert_to_fp32=options.convert_to_fp32,
    )


def _hinted(p: Placement) -> Placement:
    return Placement(tuple(number(n) for n in p.lengths), p.ring, p.ulysses, p.zigzag)


def _kernel(op: Op, spec: AttentionSpec, learned: set[fx.Node]) -> str:
    """The kernel of a ring's blocks."""
    q, v = (_four_dims(op.args[slot].meta["val"]) for slot in ("query", "value"))
    mask = op.args["attn_mask"]
    if mask in learned:
        return MATH.name  # no other kernel gives the gradient of the scores
    heads = plan_heads(int(q.shape[1]), int(v.shape[1]), spec.mesh.ulysses)
    return plan_ring(q, v, None if mask is None else mask.meta["val"], heads, spec).kernel.name


def _four_dims(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, -4) if x.dim() > 4 else x[(None,) * (4 - x.dim())]


def _gather(g: Gathered, plan: Plan, place: dict[fx.Node, int], last: int) -> GatherReport:
    """``last`` is the place of the last sharded attention."""
    return GatherReport(
        name=g.value.name,
        op=_op_name(g.value),
        reasons=tuple(dict.fromkeys(_reason(g.value, user, plan) for user in g.users)),
        bytes_sent=_gather_bytes(g.value, plan),
        output=place[g.value] > last,
        inside=any(place[user] < last for user in g.users),
        where=where_of(g.value),
        module=module_of(g.value),
    )


def _reduction(node: fx.Node, mesh: Mesh) -> ReductionReport:
    sent = 2 * bytes_of(node) * (mesh.degree - 1) // mesh.degree
    return ReductionReport(_op_name(node), sent, where_of(node), module_of(node))


def _shape(node: fx.Node) -> tuple[int | str, ...]:
    return tuple(n if isinstance(n, int) else str(n) for n in shape_of(node))


def _gather_bytes(node: fx.Node, plan: Plan) -> int:
    """Each rank's rows go to every other rank."""
    placement = _hinted(plan.placement(plan.modes[node].word))
    rows = sum(placement.chunks) / sum(placement.lengths)
    return int(bytes_of(node) * rows * (placement.degree - 1))


def _reason(value: fx.Node, user: fx.Node, plan: Plan) -> str:
    if user.op == "output":
        return "it is an output"
    name = _op_name(user)
    relation = plan.axes.relations.get(user)
    if relation is None:
        return f"{name}: no rule for it"
    if user in plan.modes:
        return f"{name} needs it whole or cut along another dim"
    if _could_shard(user, plan):
        return f"{name}: cheaper on all tokens"
    return f"{name}: {relation.reason}"


def _could_shard(user: fx.Node, plan: Plan) -> bool:
    return any(plan.axes.inputs_at(user, at) is not None for at in plan.axes.positions.get(user, ()))


def _higher_order_ops(graph: fx.Graph) -> set[str]:
    """Ops with child graphs (FlexAttention, ``cond``, ...) that were not entered: they run on all tokens."""
    return {str(n.target) for n in graph.nodes if isinstance(n.target, torch._ops.HigherOrderOperator)}


def _unknown(graph: fx.Graph, plan: Plan) -> set[str]:
    found = _higher_order_ops(graph)
    for node in graph.nodes:
        known = not hasattr(node.target, "_schema") or find_rule(node.target) is not None
        if not known and any(v in plan.axes.positions for v in node.all_input_nodes if is_tensor(v)):
            found.add(str(node.target).removesuffix(".default"))
    return found


def _axis(word: Word, plan: Plan) -> SegmentReport:
    p = plan.placement(word)
    parts = 2 * p.degree if p.zigzag else p.degree
    local = tuple(
        (-(-n // parts) * (2 if p.zigzag else 1)) if isinstance(n, int) else f"ceil(({n})/{p.degree})"
        for n in p.lengths
    )
    return SegmentReport(tuple(n if isinstance(n, int) else str(n) for n in p.lengths), local, p.zigzag)


def _contains(outer: Word, inner: Word) -> bool:
    return any(outer[i : i + len(inner)] == inner for i in range(len(outer) - len(inner) + 1))
