"""The device mesh of a world, and small exchanges over its axes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallax.core.axes import AXES, DATA_AXES
from parallax.core.plan import Plan

T = TypeVar("T")

_MESHES: dict[tuple[object, str, tuple[int, ...]], DeviceMesh] = {}
_PLACES: dict[tuple[DeviceMesh, str], tuple[int, int, dist.ProcessGroup]] = {}


def device_type() -> str:
    """`"cuda"` when the running process group moves GPU memory, else `"cpu"`."""
    return "cuda" if "nccl" in str(dist.get_backend_config()) else "cpu"


def mesh_of(plan: Plan) -> DeviceMesh:
    """The mesh of a plan over the running ranks; one mesh for each shape in a process group's life.

    Process groups are a scarce resource (each holds sockets or device buffers), so a second boost
    with the same layout reuses the first one's mesh.
    """
    sizes = tuple(size for _, size in plan.sizes)
    key = (dist.group.WORLD, device_type(), sizes)
    for known in [k for k in _MESHES if k[0] is not dist.group.WORLD]:
        del _MESHES[known]  # of a process group that was destroyed
    if key not in _MESHES:
        _MESHES[key] = init_device_mesh(device_type(), sizes, mesh_dim_names=AXES)
    return _MESHES[key]


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def axis_of(mesh: DeviceMesh, axis: str) -> tuple[int, int, dist.ProcessGroup]:
    """Size of an axis, this rank's place on it, and its group.

    Kept, since slicing a mesh costs a tenth of a millisecond and is asked for several times a step.
    Not by lru_cache, of which torch.compile warns when it meets one.
    """
    known = _PLACES.get((mesh, axis))
    if known is None:
        submesh = mesh[axis]
        known = submesh.size(), submesh.get_local_rank(), submesh.get_group()
        _PLACES[mesh, axis] = known
    return known


def size_of(mesh: DeviceMesh, *axes: str) -> int:
    """Product of the sizes of axes; of the data axes when none is named."""
    return math.prod(axis_of(mesh, axis)[0] for axis in axes or DATA_AXES)


def rank_on(mesh: DeviceMesh, *axes: str) -> int:
    """This rank's place along axes, the last fastest; along the data axes when none is named."""
    rank = 0
    for axis in axes or DATA_AXES:
        size, place, _ = axis_of(mesh, axis)
        rank = rank * size + place
    return rank


def total(value: Tensor, mesh: DeviceMesh, axes: Iterable[str] = DATA_AXES) -> Tensor:
    """Sum a small tensor over axes, in place; axes of size 1 cost nothing."""
    for axis in axes:
        size, _, group = axis_of(mesh, axis)
        if size > 1:
            dist.all_reduce(value, group=group)
    return value


def agree(statement: str, fault: T) -> tuple[list[str], list[T]]:
    """Exchange a statement and the faults found over all ranks, before anything is changed.

    Args:
        statement: What must be the same on every rank.
        fault: What this rank found wrong, in any form that pickles.

    Returns:
        Every rank's statement and every rank's fault, in rank order.
    """
    if dist.get_world_size() == 1:
        return [statement], [fault]
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, (statement, fault))
    return [row[0] for row in rows], [row[1] for row in rows]


def on_any(names: Iterable[str]) -> str:
    """What any rank names, for a message: the first eight, and how many more. Collective."""
    _, rows = agree("", list(names))
    found = list(dict.fromkeys(name for row in rows for name in row))
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return ", ".join(found[:8]) + more


def digest(text: str) -> str:
    """A short fingerprint, to compare long descriptions between ranks."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], mesh: DeviceMesh, bucket: int = 1 << 24) -> None:
    """Make every rank's tensors those of rank 0, in place, in buckets of `bucket` elements.

    Tensors may live on another device than the mesh's; at most one bucket is copied at a time, or
    one tensor when it is larger. Meta tensors have no values and are passed over.
    """
    if dist.get_world_size() == 1:
        return
    device = device_of(mesh)
    rows: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_meta or tensor.numel() == 0:
            continue
        row = rows.setdefault(tensor.dtype, [])
        row.append(tensor)
        if sum(t.numel() for t in row) >= bucket:
            _broadcast_bucket(rows.pop(tensor.dtype), device)
    for row in rows.values():
        _broadcast_bucket(row, device)


def _broadcast_bucket(row: list[Tensor], device: torch.device) -> None:
    flat = torch.cat([t.detach().reshape(-1).to(device) for t in row])
    # As bytes: gloo and NCCL do not know every dtype.
    dist.broadcast(flat.view(torch.uint8), src=0)
    for tensor, part in zip(row, flat.split([t.numel() for t in row]), strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
