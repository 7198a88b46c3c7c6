"""CLIP: one global norm over any mix of meshes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from parallax.core.axes import AXES
from parallax.core.plan import Plan
from parallax.core.rewrite import Draft, Room
from parallax.core.slices import held_once, local
from parallax.step.facts import Clipping


def build(draft: Draft, plan: Plan) -> tuple[Draft, Room]:
    """Carry out what the plan says; see `CLIP`."""
    max_norm = plan[Clipping].max_norm
    assert max_norm is not None, "CLIP is named by clip(max_norm) alone"
    parameters = list(draft.names.parameters_of(*draft.parts).values())
    coordinate = draft.mesh.get_coordinate()
    assert coordinate is not None, "every rank of the world is in the mesh"
    once = [held_once(p, coordinate, AXES) for p in parameters]
    room = Room(notes={"norm": None})
    step = draft.update

    @torch.no_grad()
    def update() -> None:
        grads = [
            (local(p.grad), mine)
            for p, mine in zip(parameters, once, strict=True)
            if p.grad is not None
        ]
        norm = global_norm([g for g, mine in grads if mine], draft.mesh.device_type)
        room.notes["norm"] = norm
        # torch.nn.utils.clip_grad_norm_'s own formula, so that one process gives the same step.
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        if grads:
            torch._foreach_mul_([g for g, _ in grads], factor.to(grads[0][0].dtype))
        step()

    return draft._replace(update=update), room


def global_norm(parts: list[Tensor], device_type: str) -> Tensor:
    """L2 norm over all ranks of tensors that one rank each answers for: 0-dim, float64."""
    here = get_total_norm(parts) if parts else torch.zeros(())
    # float64, since ranks whose parts have other dtypes must all get the very same factor.
    square = here.to(device_type, torch.float64).square()
    if dist.get_world_size() > 1:
        dist.all_reduce(square)
    return square.sqrt()
