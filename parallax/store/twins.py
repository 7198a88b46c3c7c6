"""Parameters that every rank of a tensor group holds whole, kept equal under compression."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallax.core.mesh import size_of, total
from parallax.core.rewrite import Draft
from parallax.core.slices import local


def twins_of(draft: Draft) -> list[nn.Parameter]:
    """Parameters that every rank of a tensor group holds whole."""
    if size_of(draft.mesh, "tp") == 1:
        return []
    found = []
    for parameter in draft.names.parameters_of(*draft.parts).values():
        if not isinstance(parameter, DTensor):
            continue  # loose, and not compressed
        axes = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
        cut = any(axis == "tp" and hasattr(p, "dim") for axis, p in axes)
        if parameter.requires_grad and not cut:
            found.append(parameter)
    return found


@torch.no_grad()
def average_twins(twins: list[nn.Parameter], mesh: DeviceMesh) -> None:
    """Make the gradients of one parameter equal over a tensor group.

    They differ in the last bit, which decides how compression rounds: copies would drift apart.
    """
    grads = [local(p.grad) for p in twins if p.grad is not None]
    if not grads:
        return
    flat = torch.cat([g.reshape(-1) for g in grads])
    total(flat, mesh, ("tp",)).div_(size_of(mesh, "tp"))
    for grad, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(mean.view_as(grad))
