"""What the tests of faults have in common."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["attempt", "mesh_of_seconds"]


def attempt(model: Any, *args: Any) -> tuple[str, Any, float]:
    """Call a compiled model. Returns ``"Kind: message"`` of the error or nothing, the output or None, and seconds."""
    start = time.monotonic()
    try:
        return "", model(*args), time.monotonic() - start
    except Exception as error:
        text = str(error)
        # Dynamo puts a compiler's error into one of its own.
        text = text.partition(" raised:\n")[2] or f"{type(error).__name__}: {text}"
        return text.partition("\n\nSet TORCHDYNAMO_VERBOSE")[0], None, time.monotonic() - start


def mesh_of_seconds(seconds: float) -> DeviceMesh:
    """All ranks as ``ulysses``, in a group whose collectives may take so long."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    return DeviceMesh.from_group(group, "cpu", torch.arange(dist.get_world_size()), mesh_dim_names=("ulysses",))
