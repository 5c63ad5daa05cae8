"""Where a node of a graph comes from in the user's model: source line and module."""

from __future__ import annotations

import re

from torch import fx

__all__ = ["module_of", "modules_of", "shown_path", "where_of"]


def where_of(node: fx.Node) -> str:
    """``file:line`` of the model's source that a node comes from, or nothing if it is not known."""
    frames = [
        line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip().startswith("File")
    ]
    if not frames:
        return ""
    file, line = frames[-1].split(", ")[:2]
    path = shown_path(file.removeprefix("File ").strip('"'))
    return f"{path}:{line.removeprefix('line ')}"


def shown_path(file: str) -> str:
    """A source file as a report names it: installed code by its package."""
    return file.rpartition("site-packages/")[2]


def module_of(node: fx.Node) -> str:
    """Path of the innermost module of a node, as ``transformer_blocks.0.attn``.

    Nothing for what the function that Dynamo compiled (a model's own ``forward``, say) does itself.
    """
    modules = modules_of(node)
    return modules[-1][0] if modules else ""


def modules_of(node: fx.Node) -> list[tuple[str, str]]:
    """Path and class of each module that a node is in, the outermost first."""
    found = []
    for path, kind, *_ in (node.meta.get("nn_module_stack") or {}).values():
        # Dynamo writes a path as an expression: L['self'].__dict__['_modules']['transformer_blocks'].0.attn
        words = re.findall(r"\w+", path)
        name = kind if isinstance(kind, str) else kind.__name__
        inner = ".".join(w for w in words if w not in ("L", "self", "fn", "__dict__", "_modules"))
        found.append((inner, name.rpartition(".")[2]))
    return found
