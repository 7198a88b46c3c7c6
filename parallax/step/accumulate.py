"""ACCUMULATE: one batch in several parts, exactly."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallax.core.lower import multiply_
from parallax.core.mesh import agree, device_of
from parallax.core.plan import Plan
from parallax.core.rewrite import Draft, LossFn, Room
from parallax.core.slices import cut, local
from parallax.core.step import MicroBatches, cut_rows, rows_of, to_device
from parallax.core.weigh import Window
from parallax.errors import DataError, ParallaxError, RuleError, StepError
from parallax.step.facts import Accumulation
from parallax.store.facts import Sharding

if TYPE_CHECKING:
    from parallax.core.boosted import Boosted

BATCHNORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def check(draft: Draft, plan: Plan) -> Iterable[ParallaxError]:
    """BatchNorm makes the parts of a batch depend on each other."""
    said = plan[Accumulation]
    found = [n for part in draft.parts for n, m in part.named_modules() if isinstance(m, BATCHNORM)]
    if found and said.batchnorm is None and (said.microbatches or 1) > 1:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        by = plan.said_by(Accumulation, "microbatches")
        yield RuleError(
            f"{by} runs a batch in parts, and the BatchNorm {found[0]}{more} of "
            f"{type(draft.parts[0]).__name__} normalises by the statistics of what it is given at "
            "once, which makes the parts another function than the whole.\n\nTrain on more ranks "
            "instead (their statistics are joined), use GroupNorm, or accept statistics of "
            f"micro-batches: accumulate({said.microbatches}, batchnorm='microbatch')."
        )


def build(draft: Draft, plan: Plan) -> tuple[Draft, Room]:
    """Carry out what the plan says; see `ACCUMULATE`."""
    said = plan[Accumulation]
    assert said.microbatches is not None, "accumulate(n) always says how many"
    each = plan[Sharding].stage in (2, 3)
    once = said.reduce == "step" if said.reduce is not None else not each
    windows = Windows(draft, said.microbatches, once=once)
    notes = {"microbatches": said.microbatches, "reduce": "step" if once else "microbatch"}
    # Saved, since float16 overflows or not by what sums are divided by.
    room = Room(state={"count": windows.count}, notes=notes, restart=windows.restart)
    return draft._replace(grad=windows.grad, sync=windows.sync), room


class Windows:
    """Runs `grad` over the parts of a batch.

    Args:
        draft: The pair, whose `grad` and `sync` are wrapped.
        microbatches: Number of parts.
        once: Whether only the last part's backward reduces gradients.
    """

    def __init__(self, draft: Draft, microbatches: int, *, once: bool) -> None:
        self._draft = draft
        self._wanted = microbatches
        self._once = once
        self._outside = (True, True)
        self.count = torch.zeros((), dtype=torch.float64, device=device_of(draft.mesh))
        # By now the parameters are those that stay; between forward and backward, the model shows
        # others.
        self._named = draft.names.parameters_of(*draft.parts)

    def restart(self) -> None:
        """Know of no window before."""
        self.count.zero_()

    def sync(self, reduce: bool, last: bool | None = None) -> None:
        """What the surroundings want: of the last part's backward."""
        self._outside = (reduce, reduce if last is None else last)
        self._draft.sync(*self._outside)

    def grad(self, loss_fn: LossFn, batch: Any) -> Tensor:
        """The gradient of a whole batch, or of a window of micro-batches."""
        draft, device = self._draft, device_of(self._draft.mesh)
        parts = self._given(batch) if isinstance(batch, MicroBatches) else self._cut(batch)
        if len(parts) == 1:
            return draft.grad(loss_fn, to_device(parts[0], device))
        reduce, last = self._outside
        waiting = any(key.endswith("/unreduced") for key in draft.gradients())
        if draft.weighing.scale is not None:
            draft.weighing.scale()  # so that what is put aside carries the scale of what will come
        before = self._put_aside()
        window = Window(draft.mesh, sum(map(_weight, parts)), self.count)
        draft.weighing.window = window
        try:
            for part in parts[:-1]:
                draft.sync(reduce and not self._once, False)
                draft.grad(loss_fn, to_device(part, device))
            draft.sync(reduce, last)
            draft.grad(loss_fn, to_device(parts[-1], device))
        finally:
            draft.weighing.window = None
            draft.sync(reduce, last)
        loss, correction = window.close()
        if correction is not None:
            if waiting:
                raise _waiting()
            multiply_(draft.gradients().values(), correction)
        self._put_back(before)
        return loss

    def _given(self, batch: MicroBatches) -> MicroBatches:
        numbers = [len(batch)]
        if dist.get_world_size() > 1:
            _, numbers = agree("", len(batch))
        if min(numbers) == max(numbers) and 0 < len(batch) <= self._wanted:
            return batch
        raise DataError(
            f"accumulate({self._wanted}) was given windows of {', '.join(map(str, numbers))} "
            f"micro-batches, by rank.\n\nGive every rank the same number, from 1 to {self._wanted}."
        )

    def _cut(self, batch: Any) -> MicroBatches:
        rows = rows_of(batch)
        if rows is None:
            raise DataError(
                f"accumulate({self._wanted}) cuts a batch along the first dim of its tensors, and "
                "this one holds no tensor with a dim.\n\nGive the parts yourself: "
                "parallax.MicroBatches([...])."
            )
        pieces = (cut(rows, self._wanted, i) for i in range(self._wanted))
        return MicroBatches(cut_rows(batch, rows, start, end) for start, end in pieces)

    def _put_aside(self) -> dict[str, Tensor]:
        named = self._named
        before = {name: p.grad for name, p in named.items() if p.grad is not None}
        for name in before:
            named[name].grad = None
        return before

    @torch.no_grad()
    def _put_back(self, before: dict[str, Tensor]) -> None:
        named = self._named
        for name, grad in before.items():
            now = named[name].grad
            if now is None:
                named[name].grad = grad
            else:
                local(now).add_(local(grad))


def windows(boosted: Boosted, batches: Iterable[Any]) -> Iterator[MicroBatches]:
    """Group batches into windows of `accumulate`'s number; the last may be shorter.

    Raises:
        StepError: Nothing is accumulated.
    """
    number = boosted.plan[Accumulation].microbatches
    if number is None:
        raise StepError(
            f"windows was called on {boosted!r}, which accumulates nothing.\n\nCompose it with "
            "accumulate(n)."
        )
    rest = iter(batches)
    return iter(lambda: MicroBatches(itertools.islice(rest, number)), ())


def _weight(part: Any) -> int:
    """The rows that a mean over a part counts for."""
    try:
        rows = rows_of(part)
    except DataError:
        return 0  # pairs count for themselves, and reading a mean will raise this again
    return 1 if rows is None else rows


def _waiting() -> StepError:
    return StepError(
        "a window of micro-batches with a loss of pairs (sum, count) was run while gradients from "
        "before wait for their reduction, inside no_sync(): the window's count is known at its end "
        "only.\n\nLeave no_sync() out: accumulate reduces as seldom by itself."
    )
