"""Whole tensors on rank 0, sent there part by part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallax.core.mesh import device_of
from parallax.core.slices import boxes


def collect(tree: Any, mesh: DeviceMesh, *, owners: Mapping[str, int] | None = None) -> Any:
    """A tree's whole tensors on the CPU of rank 0; None on the other ranks. Collective.

    Args:
        tree: The same on every rank but for what has an owner.
        mesh: The world's mesh.
        owners: Of `tree["moments"]`, the entries that one rank holds whole, and which.

    Cost:
        One tensor at a time: no rank but 0 holds more than its own part, rank 0 beside its result
        one part.
    """
    device = device_of(mesh)
    moments = tree["moments"] if owners else {}
    if owners:
        tree = {**tree, "moments": {n: row for n, row in moments.items() if n not in owners}}
    whole: Any = optree.tree_map(lambda leaf: _collect(leaf, device), tree, none_is_leaf=True)
    if owners:
        owned = {n: row for n, row in moments.items() if owners.get(n) == dist.get_rank()}
        whole["moments"].update(_collect_owned(owned, owners, device))
    return whole if dist.get_rank() == 0 else None


@torch.no_grad()
def _collect_owned(
    owned: dict[str, dict[str, Any]], owners: Mapping[str, int], device: torch.device
) -> dict[str, dict[str, Any]]:
    """State that its owners hold whole, on rank 0's CPU: first what there is, then the tensors."""
    first = dist.get_rank() == 0
    told = {
        name: {
            key: _Sent(value.shape, value.dtype) if type(value) is Tensor else value
            for key, value in row.items()
        }
        for name, row in owned.items()
    }
    rows: list[Any] | None = [None] * dist.get_world_size() if first else None
    dist.gather_object(told, rows, dst=0)
    if rows is None:
        for name in owners:
            for value in owned.get(name, {}).values():
                if type(value) is Tensor:
                    dist.send(value.contiguous().to(device), dst=0)
        return {}
    found: dict[str, dict[str, Any]] = {}
    for name, owner in owners.items():
        found[name] = rows[owner].get(name, {})
        for key, value in found[name].items():
            if isinstance(value, _Sent):
                mine = owned[name][key] if owner == 0 else value.receive(owner, device)
                found[name][key] = mine.cpu().clone()
    return {name: row for name, row in found.items() if row}


class _Sent(NamedTuple):
    """A tensor that follows."""

    shape: torch.Size
    dtype: torch.dtype

    def receive(self, source: int, device: torch.device) -> Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype, device=device)
        dist.recv(tensor, src=source)
        return tensor


@torch.no_grad()
def _collect(leaf: Any, device: torch.device) -> Any:
    """A whole leaf on rank 0's CPU, sent there part by part."""
    rank = dist.get_rank()
    if not isinstance(leaf, DTensor):
        return leaf.detach().cpu().clone() if isinstance(leaf, Tensor) and rank == 0 else leaf
    parts = boxes(leaf)
    if 0 not in parts:
        return None  # rank 0 has its own copy: this rank stands elsewhere on a replicated axis
    mine = leaf.to_local()
    if rank != 0:
        if rank in parts and not parts[rank].empty:
            dist.send(mine.contiguous().to(device), dst=0)
        return None
    whole = torch.empty(leaf.shape, dtype=leaf.dtype)
    for source, block in parts.items():
        if block.empty:
            continue
        part = mine
        if source != 0:
            part = torch.empty(block.lengths, dtype=leaf.dtype, device=device)
            dist.recv(part, src=source)
        whole[block.window] = part.cpu()
    return whole
