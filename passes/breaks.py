"""Where a graph ends because Dynamo stopped, and why: the lines to change for a model that compiles as one graph.

Dynamo cuts a model in two ways. It may stop at a line, compile what came before, and go on after it: the graph itself
knows the line and the reason. Or it may give up a whole function (one with a break inside a loop, say) and compile the
functions that this one calls, each alone: then the function is on the Python stack while its callees are compiled.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import fx

from ..report import BreakReport, GatherReport
from . import _torch
from .provenance import shown_path

__all__ = ["break_after"]

_RETURNS = "it returns to a function that Dynamo has cut or given up (TORCH_LOGS=graph_breaks tells why)"
_TORCH = str(Path(torch.__file__).parent)


def break_after(dynamo: fx.GraphModule, leaving: Sequence[GatherReport] = ()) -> BreakReport | None:
    """The break that ends a graph, or None where the model itself ends.

    Must be called while Dynamo waits for the backend: the functions above are found on the stack.

    Args:
        dynamo: the graph as Dynamo gave it.
        leaving: gathers of values that leave the graph, which is what the break costs.
    """
    reason = _torch.why_graph_ended(dynamo)
    if reason is None:
        return None
    stack = [(f.filename, f.lineno or 0) for f in reason.user_stack if not f.filename.startswith(_TORCH)]
    if reason.graph_break and stack:
        (file, line), why = stack[-1], _in_short(reason.reason)
    else:
        caller = _caller(reason.user_stack[-1].name if reason.user_stack else "")
        if caller is None:
            return None
        (file, line), why = caller, _RETURNS
    return BreakReport(
        where=f"{shown_path(file)}:{line}",
        code=linecache.getline(file, line).strip(),
        reason=why,
        gathers=len(leaving),
        bytes_sent=sum(g.bytes_sent for g in leaving),
    )


def _caller(compiled: str) -> tuple[str, int] | None:
    """File and line of the function that called the one being compiled, if that is code of the user's.

    Args:
        compiled: name of the function being compiled. The rest of a function after a break is one of its own, called by
            the first part with nothing after it; then the caller of the first part is meant.
    """
    above = iter(traceback.walk_stack(None))
    for frame, _ in above:  # this backend, and Dynamo
        if frame.f_code.co_filename == _torch.CONVERT_FRAME:
            break
    for frame, line in above:
        if frame.f_code.co_filename == _torch.EVAL_FRAME:
            return None  # where torch.compile was entered
        if frame.f_code.co_filename.startswith(_TORCH):
            continue
        if not compiled.startswith(_torch.RESUMED):
            return frame.f_code.co_filename, line
        compiled = frame.f_code.co_name
    return None


def _in_short(reason: str) -> str:
    """Dynamo's reason on one line, without links, and of its hints only that of a setting that would mend it."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    explanation = next((line for line in lines if line.startswith("Explanation:")), "")
    if not explanation:
        return f"Dynamo cannot trace this line ({lines[0] if lines else 'it does not say why'})"
    hints = (line.removeprefix("Hint:").strip() for line in lines if line.startswith("Hint:"))
    settings = [hint for hint in hints if "torch._dynamo.config." in hint]
    return " ".join([f"{lines[0]}: {explanation.removeprefix('Explanation:').strip()}", *settings])
