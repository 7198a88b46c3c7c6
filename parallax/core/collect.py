"""Whole tensors on rank 0, sent there part by part."""

from __future__ import annotations

from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallax.core.mesh import device_of
from parallax.core.slices import boxes


def collect(tree: Any, mesh: DeviceMesh) -> Any:
    """A tree's whole tensors on the CPU of rank 0; None on the other ranks. Collective.

    Cost:
        One tensor at a time: no rank but 0 holds more than its own part, rank 0 beside its result
        one part.
    """
    device = device_of(mesh)
    whole = optree.tree_map(lambda leaf: _collect(leaf, device), tree, none_is_leaf=True)
    return whole if dist.get_rank() == 0 else None


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
