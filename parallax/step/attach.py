"""Learning-rate schedulers that know of skipped updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parallax.core.spell import one_of
from parallax.errors import StepError

if TYPE_CHECKING:
    from parallax.core.boosted import Boosted


def attach(boosted: Boosted, scheduler: Any, *, per: str = "update") -> Any:
    """Let a scheduler know of skipped updates.

    Any scheduler of torch or transformers works on `boosted.optimizer` as it stands. Where updates
    can be skipped (`fp16`, `clip(..., nonfinite="skip")`) a schedule by updates must not go on
    without them: after `attach`, `scheduler.step()` does nothing when the last update was skipped.

    Args:
        boosted: The pair whose optimizer the scheduler was made on.
        scheduler: The scheduler; changed in place.
        per: `"update"` when it is stepped once an update, `"epoch"` when less often: such a
            schedule goes on whatever became of the last update.

    Returns:
        The scheduler.

    Raises:
        StepError: It drives another optimizer, or is no scheduler.
        ValueError: `per` is neither.

    Example:
        >>> scheduler = boosted.attach(parallax.schedules.cosine(  # doctest: +SKIP
        ...     boosted.optimizer, steps=1000, warmup=100))
    """
    one_of("attach", "per", per, ("update", "epoch"))
    driven = getattr(scheduler, "optimizer", None)
    if driven is None or not callable(getattr(scheduler, "step", None)):
        raise StepError(
            f"attach was given {scheduler!r}, which has no optimizer and step().\n\nGive a "
            "scheduler of torch.optim.lr_scheduler made on boosted.optimizer."
        )
    if driven is not boosted.optimizer:
        raise StepError(
            f"attach was given a {type(scheduler).__name__} that drives another optimizer.\n\n"
            "Make the scheduler on boosted.optimizer."
        )
    if id(scheduler) in boosted.attached:
        return scheduler
    boosted.attached[id(scheduler)] = scheduler
    if per == "epoch":
        return scheduler
    kind = type(scheduler)

    def step(self: Any, *args: Any, **options: Any) -> None:
        if boosted.took_place:
            kind.step(self, *args, **options)

    # A class of the same name, since state_dict() takes everything that is set on the object.
    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step, "__doc__": kind.__doc__})
    return scheduler
