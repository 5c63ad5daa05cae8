"""The backend by name: ``torch.compile(model, backend="cp", options={"ulysses": 2})``.

torch finds :data:`cp` by the entry point ``torch_dynamo_backends`` and calls it with each graph and the options. The
degrees are known at that time only, so equal options share one backend here, as all graphs of one ``torch.compile``
must.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from .backend import CPBackend, cp_backend

__all__ = ["NamedBackend", "cp"]


class NamedBackend:
    """A torch.compile backend whose degrees come with ``options``."""

    def __init__(self) -> None:
        self._backends: list[tuple[dict[str, Any], CPBackend]] = []

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: dict[str, Any] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        """Compile one graph; torch calls this.

        Args:
            gm: as Dynamo gives it.
            example_inputs: as Dynamo gives them.
            options: arguments of :func:`~cp_compile.cp_backend` by name, ``options`` among them, which are Inductor's.
            mode: not taken.

        Raises:
            ValueError: a mode, an unknown option, or one that makes no sense.
        """
        return self.backend(options or {}, mode)(gm, example_inputs)

    def backend(self, options: dict[str, Any], mode: str | None = None) -> CPBackend:
        """The backend that serves these options. Its ``report`` tells what was compiled."""
        if mode is not None:
            raise ValueError(
                f"cp_compile: mode={mode!r} is Inductor's. Give what it stands for as Inductor's options: "
                f"options={{..., 'options': torch._inductor.list_mode_options({mode!r})}}."
            )
        for known, backend in self._backends:
            if known == options:
                return backend
        allowed = list(inspect.signature(cp_backend).parameters)
        for name in options:
            if name not in allowed:
                near = difflib.get_close_matches(name, allowed, n=1)
                raise ValueError(
                    f"cp_compile: torch.compile(backend='cp') has no option {name!r}"
                    f"{f'; did you mean {near[0]!r}?' if near else '.'} It takes {', '.join(allowed)}. "
                    "Inductor's own go into 'options': {...}."
                )
        if "ulysses" not in options and "ring" not in options:
            raise ValueError(
                "cp_compile: torch.compile(backend='cp') needs a degree: options={'ulysses': 2}, {'ring': 2} or both."
            )
        backend = cp_backend(**options)
        self._backends.append((dict(options), backend))
        return backend

    def reset(self) -> None:
        """Forgets all backends; ``torch._dynamo.reset()`` calls this."""
        self._backends.clear()


cp = NamedBackend()
