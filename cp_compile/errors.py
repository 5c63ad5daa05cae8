"""What goes wrong, in words for a person."""

from __future__ import annotations

__all__ = ["CPError", "InputError", "MeshError", "PeerError", "ScheduleError"]


class CPError(RuntimeError):
    """Base of all errors that cp_compile raises on purpose.

    Attributes:
        everywhere: every rank raises it, so that none has to be told.
    """

    everywhere = False


class MeshError(CPError):
    """No process group, or degrees that do not fit the ranks at hand."""


class ScheduleError(CPError):
    """Ranks that would run different collectives, or a rank that never arrived."""


class InputError(CPError):
    """Ranks that were given different inputs, or that hold different weights."""


class PeerError(CPError):
    """Another rank failed, or a collective did; the message says which rank and what it said last."""
