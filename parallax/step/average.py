"""AVERAGE: an exponential moving average of the parameters, on each rank's own part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parallax.core.lower import approach_
from parallax.core.plan import Plan
from parallax.core.rewrite import Draft, Room
from parallax.core.slices import like, local
from parallax.errors import StepError
from parallax.step.facts import Averaging

if TYPE_CHECKING:
    from parallax.core.boosted import Boosted


def build(draft: Draft, plan: Plan) -> tuple[Draft, Room]:
    """Carry out what the plan says; see `AVERAGE`."""
    average = Average(draft, plan[Averaging])
    return draft._replace(update=average.update), average.room


class Average:
    """The averages of one model's trained parameters.

    The average starts from the parameters as they are before the first update, also where a
    checkpoint without averages was loaded meanwhile.
    """

    def __init__(self, draft: Draft, said: Averaging) -> None:
        assert said.decay is not None, "ema(decay) always says it"
        self._decay = said.decay
        self._warmup = bool(said.warmup)
        self._step = draft.update
        named = draft.names.parameters_of(*draft.parts)
        trained = {n: p for n, p in named.items() if p.requires_grad and p.is_floating_point()}
        # At least float32: in bfloat16 a step of 1 - 0.999 would round to no step.
        averages = {n: like(_wide(local(p.detach())), p) for n, p in trained.items()}
        self._parts = [(p, local(averages[n])) for n, p in trained.items()]
        self._updates = torch.zeros((), dtype=torch.int64)
        self.room = Room(
            state={"updates": self._updates, "averages": averages},
            notes={"average": self},
            restart=self.restart,
        )

    def restart(self) -> None:
        """Begin anew at the parameters of the next update."""
        self._updates.zero_()

    def update(self) -> bool | Tensor | None:
        """Update, then move the averages, if the update took place."""
        if self.room.busy:
            raise StepError(
                "an update was asked for inside boosted.averaged(), where the model holds the "
                "averaged weights.\n\nLeave the block first."
            )
        self._begin()
        took_place = self._step()
        if took_place is False:
            return False
        self._updates += 1
        count = int(self._updates)
        decay = min(self._decay, (1 + count) / (10 + count)) if self._warmup else self._decay
        with torch.no_grad():
            values = [local(p.detach()).to(a.dtype) for p, a in self._parts]
            approach_([a for _, a in self._parts], values, 1 - decay)
        return took_place

    @torch.no_grad()
    def _begin(self) -> None:
        if not int(self._updates):
            for parameter, average in self._parts:
                average.copy_(local(parameter))

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange parameters and averages; twice is nothing."""
        self._begin()
        for parameter, average in self._parts:
            part = local(parameter)
            kept = average.clone()
            average.copy_(part)
            part.copy_(kept)
        self.room.busy = "" if self.room.busy else "inside boosted.averaged()"


def _wide(part: Tensor) -> Tensor:
    return part.to(torch.promote_types(part.dtype, torch.float32), copy=True)


@contextmanager
def averaged(boosted: Boosted) -> Iterator[None]:
    """Let a model compute with its averaged weights, for evaluation or to gather and export them.

    Args:
        boosted: A pair composed with `ema`.

    Raises:
        StepError: There is no average, or the block is entered twice.

    Cost:
        Two copies of this rank's part; beside the average, one parameter's part of memory.
    """
    room: Any = boosted.rooms.get("ema")
    if room is None:
        raise StepError(
            f"averaged() was called on {boosted!r}, which keeps no average.\n\nCompose it with "
            "ema(0.999)."
        )
    average: Average = room.notes["average"]
    if room.busy:
        raise StepError("averaged() was entered twice.\n\nLeave the block before entering again.")
    average.swap()
    try:
        yield
    finally:
        average.swap()
