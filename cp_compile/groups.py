"""From process groups to a :class:`~cp_compile.mesh.Mesh`."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .errors import MeshError
from .mesh import Mesh

__all__ = ["RING", "ULYSSES", "build_mesh", "check_ranks"]

RING, ULYSSES = "ring", "ulysses"


def build_mesh(ring: int, ulysses: int, device_mesh: DeviceMesh | None, device_type: str) -> Mesh:
    """This rank's view of the mesh. Every rank of the mesh must call this: it may create process groups.

    Args:
        ring: degree of the ring dim.
        ulysses: degree of the ulysses dim.
        device_mesh: the user's mesh, of any number of dims, among them ``ring`` and ``ulysses`` (one that has degree 1
            may be missing). None for the default process group.
        device_type: where the collectives' tensors live, as in ``"cuda"``.

    Raises:
        MeshError: there is no process group, or the degrees do not fit it or the mesh.
    """
    check_ranks(ring, ulysses, device_mesh)
    if device_mesh is None:
        device_mesh = init_device_mesh(device_type, (ring, ulysses), mesh_dim_names=(RING, ULYSSES))
    return _view(device_mesh, ring, ulysses)


def check_ranks(ring: int, ulysses: int, device_mesh: DeviceMesh | None) -> None:
    """Whether :func:`build_mesh` would succeed, without making anything.

    Raises:
        MeshError: as of :func:`build_mesh`.
    """
    if not dist.is_initialized():
        raise MeshError(
            f"cp_compile: ulysses={ulysses} ring={ring} needs {ring * ulysses} ranks, and there is no process group. "
            "Call torch.distributed.init_process_group() before the first run of the compiled model (torchrun sets up "
            "what it needs)."
        )
    if device_mesh is not None:
        _check_dims(device_mesh, ring, ulysses)
        return
    world = dist.get_world_size()
    if world != ring * ulysses:
        raise MeshError(
            f"cp_compile: ulysses={ulysses} * ring={ring} is {ring * ulysses}, but the default process group has "
            f"{world} ranks (this is rank {dist.get_rank()}). Choose degrees whose product is {world}, or pass "
            "mesh=DeviceMesh(...) with dims 'ring' and 'ulysses' beside your other dims."
        )


def _check_dims(device_mesh: DeviceMesh, ring: int, ulysses: int) -> None:
    names = device_mesh.mesh_dim_names or ()
    degrees = {RING: ring, ULYSSES: ulysses}
    for name, degree in degrees.items():
        size = device_mesh.size(names.index(name)) if name in names else None
        if size is None and degree > 1:
            raise MeshError(
                f"cp_compile: {name}={degree} needs a mesh dim called {name!r}; the mesh has {names or 'no names'}. "
                f"Name the dims: init_device_mesh(..., mesh_dim_names=(..., 'ring', 'ulysses'))."
            )
        if size is not None and size != degree:
            raise MeshError(f"cp_compile: {name}={degree}, but the mesh's dim {name!r} has {size} ranks.")
    if RING in names and ULYSSES in names and names.index(RING) > names.index(ULYSSES):
        raise MeshError(
            f"cp_compile: the mesh has dims {names}; 'ring' must come before 'ulysses', since the ulysses ranks of one "
            "ring rank hold neighbouring tokens."
        )


def _view(device_mesh: DeviceMesh, ring: int, ulysses: int) -> Mesh:
    names = device_mesh.mesh_dim_names or ()
    used = tuple(n for n in (RING, ULYSSES) if n in names)
    part = device_mesh[used] if used != names else device_mesh
    ranks = tuple(int(r) for r in part.mesh.flatten())
    if list(ranks) != sorted(ranks):
        raise MeshError(f"cp_compile: the mesh's ranks {ranks} are not in increasing order along ring, then ulysses.")
    groups: dict[str, str] = {n: part.get_group(n).group_name for n in used}
    whole = _whole_group(part, ranks, groups)
    return Mesh(
        ring, ulysses, ranks.index(dist.get_rank()), whole, groups.get(RING, whole), groups.get(ULYSSES, whole), ranks
    )


def _whole_group(part: DeviceMesh, ranks: tuple[int, ...], groups: dict[str, str]) -> str:
    """The group of all ranks of the mesh, made only if none is there yet."""
    for name, group in groups.items():
        # Before the default group, so that a mesh of one dim runs all of its collectives in one communicator.
        if part.size(part.mesh_dim_names.index(name)) == len(ranks):  # type: ignore[union-attr]
            return group
    world = dist.group.WORLD
    if world is not None and ranks == tuple(range(dist.get_world_size())):
        return world.group_name
    return part._flatten().get_group().group_name
