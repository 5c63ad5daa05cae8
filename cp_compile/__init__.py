"""Context parallelism for unmodified models, as a torch.compile backend.

::

    from cp_compile import cp_backend
    model = torch.compile(model, backend=cp_backend(ulysses=2, ring=2))
"""

from ._version import __version__
from .backend import CPBackend, cp_backend
from .errors import CPError, InputError, MeshError, PeerError, ScheduleError
from .parallelize import from_pretrained, parallelize, report_of, unparallelize
from .passes.rules import register_rule
from .report import Report

__all__ = [
    "CPBackend",
    "CPError",
    "InputError",
    "MeshError",
    "PeerError",
    "Report",
    "ScheduleError",
    "__version__",
    "cp_backend",
    "from_pretrained",
    "parallelize",
    "register_rule",
    "report_of",
    "unparallelize",
]
