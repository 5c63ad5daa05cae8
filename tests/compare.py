"""A zoo case on real ranks through our backend, compared with the unmodified model on one process.

The reference is always the model itself, run eagerly: never a twin of it that could share an error with the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from cp_compile import zoo
from cp_compile.agreement import digest, relative_error
from tests.ranks import Pool

__all__ = ["Comparison", "Source", "compare"]

_GUARDS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad": torch.enable_grad,
}


class Source(Protocol):
    """Where a model and its inputs come from: a case of the zoo, or anything like it that can be pickled."""

    def model(self, seed: int, dtype: torch.dtype) -> torch.nn.Module:
        """The module, the same for the same seed."""

    def kwargs(self, seed: int, dtype: torch.dtype) -> dict[str, Any]:
        """Fresh arguments of ``forward``, the same for the same seed."""


@dataclass(frozen=True)
class Comparison:
    """What came out of one case on one mesh.

    Attributes:
        error: largest relative error over outputs, ranks and calls.
        ranks_agree: whether all ranks hold the same bits, at every call.
        reference_agrees: whether the one-process reference is the same on all ranks (if not, distrust ``error``).
        graphs: how many graphs Dynamo made of the model.
        report: ``backend.report.to_dict()`` of rank 0.
        texts: ``str(backend.report)`` of each rank.
    """

    error: float
    ranks_agree: bool
    reference_agrees: bool
    graphs: int
    report: dict[str, Any]
    texts: tuple[str, ...]

    def check(self, tolerance: float = 1e-5) -> Comparison:
        """Asserts that the answer is the same, and returns the comparison to ask it more."""
        assert self.reference_agrees, "the unmodified model differs between ranks: the case is not deterministic"
        assert self.error <= tolerance, f"relative error {self.error:.3g}, expected at most {tolerance:g}"
        assert self.ranks_agree, "ranks differ from each other"
        return self


def compare(
    pool: Pool,
    case: str | Source,
    *,
    ulysses: int = 1,
    ring: int = 1,
    inner: str = "aot_eager",
    dtype: torch.dtype = torch.float32,
    mode: str = "no_grad",
    calls: int = 1,
    seed: int = 0,
    compile_options: dict[str, Any] | None = None,
    timeout: float = 300.0,
    **options: Any,
) -> Comparison:
    """Runs one case on every rank of ``pool``.

    Args:
        pool: the ranks.
        case: name of a zoo case, or a case itself.
        ulysses: degree, as of ``cp_backend``.
        ring: degree, as of ``cp_backend``.
        inner: compiler, as of ``cp_backend``.
        dtype: of parameters and floating inputs.
        mode: ``"no_grad"``, ``"inference_mode"`` or ``"grad"``.
        calls: how often the compiled model is called, each time with other numbers.
        seed: of parameters and inputs.
        compile_options: further arguments of ``torch.compile``, such as ``fullgraph``.
        timeout: seconds for all of it.
        options: further arguments of ``cp_backend``.
    """
    degrees = {"ulysses": ulysses, "ring": ring, "inner": inner, **options}
    answers = pool.run(_on_rank, case, degrees, dtype, mode, calls, seed, compile_options or {}, timeout=timeout)
    return Comparison(
        error=max(a["error"] for a in answers),
        ranks_agree=len({a["digests"] for a in answers}) == 1,
        reference_agrees=len({a["reference"] for a in answers}) == 1,
        graphs=answers[0]["graphs"],
        report=answers[0]["report"],
        texts=tuple(a["text"] for a in answers),
    )


def _on_rank(
    source: str | Source,
    degrees: dict[str, Any],
    dtype: torch.dtype,
    mode: str,
    calls: int,
    seed: int,
    compile_options: dict[str, Any],
) -> dict[str, Any]:
    from cp_compile import cp_backend

    case = zoo.case(source) if isinstance(source, str) else source
    backend = cp_backend(**degrees)
    plain = case.model(seed, dtype)
    compiled = torch.compile(case.model(seed, dtype), backend=backend, **compile_options)
    errors, digests, references = [], [], []
    with _GUARDS[mode]():
        for call in range(calls):
            expected = plain(**case.kwargs(seed + call, dtype))
            actual = compiled(**case.kwargs(seed + call, dtype))
            errors.append(relative_error(actual, expected))
            digests.append(digest(actual))
            references.append(digest(expected))
    # No rank may leave while another still needs it, for instance in a call that only one of them makes.
    dist.barrier()
    return {
        "error": max(errors),
        "digests": tuple(digests),
        "reference": tuple(references),
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "report": backend.report.to_dict(),
        "text": str(backend.report),
    }
