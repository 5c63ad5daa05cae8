"""The whole zoo on several meshes, and ``docs/models.md`` from it.

    python -m tests.models.sweep [--only NAME ...] [--mesh 2x1 1x2 4x1 2x2] [--state FILE]

Each case runs on real gloo ranks with ``inner="aot_eager"`` and is compared with the unmodified model on one process.
Results are kept in a file as they come, so a sweep that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from cp_compile import zoo
from tests.compare import compare
from tests.ranks import Ranks

TOLERANCE = 1e-5
ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="cases (default: all)")
    parser.add_argument("--mesh", nargs="*", default=["2x1", "1x2", "4x1", "2x2"], help="ulysses x ring")
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "sweep.json", help="results so far")
    args = parser.parse_args()
    args.state.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = json.loads(args.state.read_text()) if args.state.exists() else {}
    names = args.only or [n for n in zoo.case_names() if zoo.case(n).cls not in zoo.UNAVAILABLE]
    pools = Ranks()
    for i, name in enumerate(names):
        for mesh in args.mesh:
            if mesh in results.get(name, {}):
                continue
            result = _run(pools, name, mesh)
            results.setdefault(name, {})[mesh] = result
            args.state.write_text(json.dumps(results))
            print(f"[{i + 1}/{len(names)}] {name} {mesh}: {result.get('failed') or result['error']}", flush=True)
    pools.close()
    (ROOT / "docs" / "models.md").write_text(_page(results, args.mesh))
    wrong = [n for n, by_mesh in results.items() if any(not _fine(r) for r in by_mesh.values())]
    print(f"{len(results) - len(wrong)} passed, {len(wrong)} failed" + "".join(f"\n  {n}" for n in wrong))
    return 1 if wrong else 0


def _run(pools: Ranks, name: str, mesh: str) -> dict[str, Any]:
    ulysses, ring = map(int, mesh.split("x"))
    try:
        found = compare(pools(ulysses * ring), name, ulysses=ulysses, ring=ring, timeout=300.0)
    except Exception as error:  # the sweep reports a case that fails, and goes on
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    graphs = [g for g in found.report["graphs"] if g["attentions"]]
    inside = [g for graph in graphs for g in graph["gathers"] if g["inside"]]
    return {
        "error": found.error,
        "agree": found.ranks_agree,
        "graphs": len(found.report["graphs"]),
        "variants": [a["variant"] for g in graphs for a in g["attentions"]],
        "sharded": max((g["flops_sharded"] for g in graphs), default=0.0),
        "gathers": len(inside),
        "reasons": sorted({r for g in inside for r in g["reasons"]}),
        "unknown": sorted({op for g in graphs for op in g["unknown_ops"]}),
    }


def _fine(result: dict[str, Any]) -> bool:
    return "failed" not in result and result["agree"] and result["error"] <= TOLERANCE


def _page(results: dict[str, dict[str, Any]], meshes: list[str]) -> str:
    head = f"| case | {' | '.join(meshes)} | graphs | attentions | FLOPs sharded | gathers inside | why |"
    lines = [
        "# Models",
        "",
        "For whoever asks whether a model works. Written by `python -m tests.models.sweep`: every case of the zoo",
        "(tiny configurations, random weights) on real ranks, compared with the unmodified model on one process. A",
        "cell is the largest relative error in fp32 on ulysses x ring ranks. *Gathers inside* stand between the first",
        "and the last attention of a graph; the columns after the errors are of the first mesh.",
        "",
        head,
        "|" + "---|" * (len(meshes) + 6),
    ]
    for name, by_mesh in sorted(results.items()):
        first = by_mesh[meshes[0]]
        cells = [_cell(by_mesh[m]) if m in by_mesh else "" for m in meshes]
        if "failed" in first:
            rest = ["", "", "", "", first["failed"].replace("|", "/")]
        else:
            kinds = ", ".join(f"{first['variants'].count(v)} {v}" for v in sorted(set(first["variants"]))) or "none"
            why = "; ".join([*first["reasons"], *(f"no rule: {op}" for op in first["unknown"])])
            rest = [str(first["graphs"]), kinds, f"{first['sharded']:.0%}", str(first["gathers"]), why]
        lines.append(f"| {name} | {' | '.join([*cells, *rest])} |")
    return "\n".join(lines) + "\n"


def _cell(result: dict[str, Any]) -> str:
    if "failed" in result:
        return "fails"
    return f"{result['error']:.0e}" + ("" if result["agree"] else ", ranks differ")


if __name__ == "__main__":
    sys.exit(main())
