"""CLIP: one global norm over any mix of meshes, and what to do when it is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallax.core.axes import AXES
from parallax.core.lower import clamp_, multiply_, norms
from parallax.core.mesh import on_any
from parallax.core.phase import Phase
from parallax.core.plan import Plan
from parallax.core.rewrite import Draft, Room
from parallax.core.slices import held_once, local
from parallax.errors import StepError
from parallax.step.facts import Clipping


def build(draft: Draft, plan: Plan) -> tuple[Draft, Room]:
    """Carry out what the plan says; see `CLIP`."""
    alone = not any(r.phase is Phase.AVERAGE for r in plan.rewrites)
    clip = Clip(draft, plan[Clipping], guarded=alone and on_device_guard(draft))
    return draft._replace(update=clip.update), clip.room


def on_device_guard(draft: Draft) -> bool:
    """Whether the optimizer's own kernels can leave an update out without the host knowing.

    torch's fused optimizers read `found_inf` in the kernel: that is how GradScaler skips steps. SGD
    is none of these: a momentum whose first step is left out is never written, and used next time.
    """
    optimizer = draft.optimizer
    return (
        optimizer is not None
        and draft.mesh.device_type == "cuda"
        and type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        and all(group.get("fused") for group in optimizer.param_groups)
    )


class Clip:
    """Bounds gradients before an update.

    Args:
        draft: The pair, whose update is wrapped.
        said: The bounds.
        guarded: Whether a bad update is left out by the optimizer's kernels. The host then learns
            of it one update later, without ever having waited.
    """

    def __init__(self, draft: Draft, said: Clipping, *, guarded: bool) -> None:
        self._said = said
        self._order = math.inf if said.norm_type == "inf" else 2.0
        self._nonfinite = said.nonfinite or "raise"
        self._guarded = guarded and self._nonfinite != "zero"
        self._optimizer: Any = draft.optimizer
        self._device = draft.mesh.device_type
        self._step = draft.update
        coordinate = draft.mesh.get_coordinate()
        assert coordinate is not None, "every rank of the world is in the mesh"
        self._parameters = [
            (name, p, held_once(p, coordinate, AXES))
            for name, p in draft.names.parameters_of(*draft.parts).items()
        ]
        self._late: Callable[[], None] | None = None
        self.room = Room(
            notes={"norm": None, "guarded": self._guarded},
            skips=self._nonfinite == "skip",
            overdue=self._overdue,
        )

    @torch.no_grad()
    def update(self) -> bool | Tensor | None:
        """Bound the gradients, then update."""
        self._overdue(True)
        held = [(n, local(p.grad), once) for n, p, once in self._parameters if p.grad is not None]
        grads = [grad for _, grad, _ in held]
        each = norms(grads, self._order)
        norm = total_norm(
            [n for n, (_, _, once) in zip(each, held, strict=True) if once],
            self._order,
            self._device,
        )
        self.room.notes["norm"] = norm
        names = [name for name, _, _ in held]
        if self._nonfinite == "zero":
            for grad in grads:
                grad.masked_fill_(~norm.isfinite(), 0)
        guarded = self._guarded and all(g.get("fused") for g in self._optimizer.param_groups)
        if self._nonfinite != "zero" and not guarded and not math.isfinite(norm):
            if self._nonfinite == "skip":
                return False
            raise_not_finite(norm, names, each, "Nothing was updated.")
        self._bound(grads, norm)
        if not guarded:
            return self._step()
        return self._step_unless(~norm.isfinite(), norm, names, each)

    def _overdue(self, tell: bool) -> None:
        """Say what became of the last update, where the kernels decided it."""
        check, self._late = self._late, None
        if check is not None and tell:
            check()

    def _bound(self, grads: list[Tensor], norm: Tensor) -> None:
        bound = self._said.max_norm
        if bound is not None:
            # torch.nn.utils.clip_grad_norm_'s factor, but 1 exactly for any norm within the bound.
            multiply_(grads, torch.where(norm > bound, bound / (norm + 1e-6), 1.0))
        if self._said.value is not None:
            clamp_(grads, self._said.value)

    def _step_unless(
        self, bad: Tensor, norm: Tensor, names: list[str], each: list[Tensor]
    ) -> Tensor:
        self._optimizer.grad_scale, self._optimizer.found_inf = None, bad.float()
        try:
            self._step()
        finally:
            del self._optimizer.grad_scale, self._optimizer.found_inf
        if self._nonfinite == "raise":
            self._late = _read_later(bad, norm, names, each)
        return ~bad


def _read_later(
    bad: Tensor, norm: Tensor, names: list[str], each: list[Tensor]
) -> Callable[[], None]:
    """A check that raises if `bad` turns out to be true; its copy to the host starts now."""
    seen = torch.empty((), dtype=torch.bool, pin_memory=True)
    seen.copy_(bad, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def check() -> None:
        copied.synchronize()  # a whole step ago: nothing is left to wait for
        if seen:
            raise_not_finite(norm, names, each, "The update before this one was left out for it.")

    return check


def total_norm(parts: list[Tensor], order: float, device_type: str) -> Tensor:
    """The norm over all ranks of norms that one rank each answers for: 0-dim, float64."""
    # float64, since ranks whose parts have other dtypes must all get the very same factor.
    here = torch.zeros((), dtype=torch.float64, device=device_type)
    if parts:
        here = torch.linalg.vector_norm(torch.stack([p.double() for p in parts]), order)
    if dist.get_world_size() == 1:
        return here
    if order == math.inf:
        # A maximum may lose what is no number: which of two comes out is not defined.
        here = here.nan_to_num(nan=math.inf, posinf=math.inf)
        dist.all_reduce(here, dist.ReduceOp.MAX)
        return here
    square = here.square()
    dist.all_reduce(square)
    return square.sqrt()


def raise_not_finite(norm: Tensor, names: list[str], each: list[Tensor], outcome: str) -> None:
    """Raise, on every rank alike, naming the parameters whose gradients are not finite."""
    what = on_any(n for n, x in zip(names, each, strict=True) if not math.isfinite(x))
    raise StepError(
        f"the norm of the gradients is {float(norm)}: not finite are those of {what or 'none'}. "
        f"{outcome}\n\nLower the learning rate, look at the batch and the loss, or go on without "
        "such steps: clip(..., nonfinite='skip')."
    )
