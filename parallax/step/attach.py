"""What goes along with a pair: schedulers, which know of skipped updates, and others' state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parallax.core.spell import one_of
from parallax.errors import StepError

if TYPE_CHECKING:
    from parallax.core.boosted import Boosted


def attach(boosted: Boosted, thing: Any, *, name: str | None = None, per: str = "update") -> Any:
    """Let a scheduler, or anything else with state, go along with a pair.

    What is attached is saved and loaded with the pair: anything that has `state_dict()` and
    `load_state_dict(state)`, where the state is made of plain values and tensors and is the same on
    every rank. State that was loaded before the thing is attached is handed to it now.

    Any scheduler of torch or transformers works on `boosted.optimizer` as it stands. Where updates
    can be skipped (`fp16`, `clip(..., nonfinite="skip")`) a schedule by updates must not go on
    without them: after `attach`, `scheduler.step()` does nothing when the last update was skipped.

    Args:
        boosted: The pair; that whose optimizer the scheduler was made on.
        thing: A scheduler, which is changed in place, or any other thing with state.
        name: What it is called in checkpoints; by default its class's name, with a number from the
            second of a class on.
        per: Of a scheduler: `"update"` when it is stepped once an update, `"epoch"` when less
            often: such a schedule goes on whatever became of the last update.

    Returns:
        The thing.

    Raises:
        StepError: It is a scheduler that drives another optimizer.
        CheckpointError: It has no state to save, or its name is taken.
        ValueError: `per` is neither.

    Example:
        >>> scheduler = boosted.attach(parallax.schedules.cosine(  # doctest: +SKIP
        ...     boosted.optimizer, steps=1000, warmup=100))
    """
    one_of("attach", "per", per, ("update", "epoch"))
    driven = getattr(thing, "optimizer", None)
    schedules = driven is not None and callable(getattr(thing, "step", None))
    if schedules and driven is not boosted.optimizer:
        raise StepError(
            f"attach was given a {type(thing).__name__} that drives another optimizer.\n\n"
            "Make the scheduler on boosted.optimizer."
        )
    before = any(known is thing for known in boosted.along.things.values())
    boosted.along.add(thing, name)
    if not schedules or before or per == "epoch":
        return thing
    kind = type(thing)

    def step(self: Any, *args: Any, **options: Any) -> None:
        if boosted.took_place:
            kind.step(self, *args, **options)

    # A class of the same name, since state_dict() takes everything that is set on the object.
    thing.__class__ = type(kind.__name__, (kind,), {"step": step, "__doc__": kind.__doc__})
    return thing
