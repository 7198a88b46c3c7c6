"""SCALE: a loss scale that follows what float16 can hold."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from parallax.core.lower import multiply_, norms
from parallax.core.mesh import on_any
from parallax.core.plan import Plan
from parallax.core.rewrite import Draft, Room
from parallax.errors import StepError
from parallax.store.facts import Scaling


def build(draft: Draft, plan: Plan) -> tuple[Draft, Room]:
    """Carry out what the plan says; see `SCALE`."""
    scaler = Scaler(draft, plan[Scaling])
    draft.weighing.scale = scaler.begin
    draft = draft._replace(update=scaler.update, settle=scaler.settle, forget=scaler.forget)
    return draft, scaler.room


class Scaler:
    """The dynamic loss scale of one pair (arXiv:1710.03740).

    Attributes:
        room: Its state, the scale and the number of updates since it last changed, and `notes` with
            the number of updates skipped so far.
    """

    def __init__(self, draft: Draft, said: Scaling) -> None:
        self._draft = draft
        self._growth = said.growth or 2.0
        self._backoff = said.backoff or 0.5
        self._interval = said.interval or 2000
        self._least = said.least or 1.0
        self._most = said.most or 2.0**24
        self._start = said.start or 2.0**16
        self._scale = torch.full((), self._start, dtype=torch.float64)
        self._good = torch.zeros((), dtype=torch.int64)
        # Whether the gradients that are there carry the scale, and whether they are all finite.
        self._scaled = False
        self._clean = False
        self._bad: list[Tensor] | None = None
        self.room = Room(
            state={"scale": self._scale, "good": self._good},
            notes={"skipped": 0},
            restart=self.restart,
            skips=True,
        )

    def restart(self) -> None:
        """Begin anew with the first scale."""
        self._scale.fill_(self._start)
        self._good.zero_()

    def begin(self) -> float:
        """The scale for a backward that comes now."""
        scale = float(self._scale)
        if self._clean:
            # Gradients were read or settled, and more are added: all must carry one scale. It is a
            # power of two, so nothing is rounded.
            multiply_(self._draft.gradients().values(), scale)
            self._clean = False
        self._scaled = True
        return scale

    def settle(self) -> None:
        """Bring gradients to their true size."""
        self._draft.settle()
        if self._scaled:
            multiply_(self._draft.gradients().values(), 1.0 / float(self._scale))
            self._scaled, self._clean = False, True

    def forget(self) -> None:
        """Note that there are no gradients."""
        self._draft.forget()
        self._scaled = self._clean = False

    def update(self) -> bool | Tensor | None:
        """Update if all gradients are finite on all ranks, and adjust the scale."""
        grads = self._draft.gradients()
        each = norms(list(grads.values()), math.inf)
        if self._finite(each):
            took_place = self._draft.update()
            if took_place is not False:
                self._advance()
            return took_place
        scale = float(self._scale)
        if scale <= self._least:
            self._raise(list(grads), each)
        self._scale.fill_(max(scale * self._backoff, self._least))
        self._good.zero_()
        self.room.notes["skipped"] += 1
        return False

    def _advance(self) -> None:
        self._good += 1
        if int(self._good) >= self._interval:
            self._scale.fill_(min(float(self._scale) * self._growth, self._most))
            self._good.zero_()

    def _finite(self, each: list[Tensor]) -> bool:
        device = self._draft.mesh.device_type
        bad = torch.zeros((), device=device)
        if each:
            bad = (~torch.stack([n.double() for n in each]).isfinite()).any().float()
        if dist.get_world_size() > 1:
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        return not float(bad)

    def _raise(self, names: list[str], each: list[Tensor]) -> None:
        what = on_any(n for n, x in zip(names, each, strict=True) if not math.isfinite(x))
        raise StepError(
            f"the gradients of {what} are not finite although the loss scale "
            f"is at its least, {float(self._scale):g}. Nothing was updated.\n\nNo scale cures "
            "this: lower the learning rate, look at the batch and the loss, or use bf16, which has "
            "float32's range."
        )
