"""State that goes along with a pair into its checkpoints without being the pair's own, by name."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container
from typing import Any

from parallax.errors import CheckpointError


class Along:
    """Things with `state_dict()` and `load_state_dict(state)`: schedulers, loaders, a user's own.

    Their state is taken to be the same on every rank. A thing with an attribute `at_rest`, which
    its state holds too, may begin anew where that is true: a loader between epochs.

    Attributes:
        waiting: State that was loaded before the thing that it belongs to was attached.
        again: Puts the optimizer's settings where the checkpoint has them, once more: a scheduler
            that is made after loading has set its own first rate. None once training goes on.

    Example:
        >>> class Counter:
        ...     n = 0
        ...     def state_dict(self): return {"n": self.n}
        ...     def load_state_dict(self, state): self.n = state["n"]
        >>> along = Along()
        >>> undo = along.load({"Counter": {"n": 3}})
        >>> counter = Counter()
        >>> along.add(counter), counter.n, along.states()
        ('Counter', 3, {'Counter': {'n': 3}})
    """

    def __init__(self) -> None:
        self._things: dict[str, Callable[[], Any]] = {}
        self._counts: dict[str, int] = {}
        self.waiting: dict[str, Any] = {}
        self.again: Callable[[], None] | None = None

    @property
    def things(self) -> dict[str, Any]:
        """What is attached and still there, by name."""
        found = {name: thing() for name, thing in self._things.items()}
        return {name: thing for name, thing in found.items() if thing is not None}

    def add(self, thing: Any, name: str | None = None, *, weak: bool = False) -> str:
        """Let a thing go along; it takes the state that waits for its name.

        Args:
            thing: What has the state.
            name: Its name; by default that of its class, with a number from the second on.
            weak: Whether it is forgotten when nobody else holds it.

        Returns:
            Its name.

        Raises:
            CheckpointError: It cannot be saved, or something else has the name.
        """
        kind = type(thing).__name__
        lacks = [m for m in ("state_dict", "load_state_dict") if not callable(getattr(thing, m, 0))]
        if lacks:
            raise CheckpointError(
                f"attach was given a {kind} without {' and '.join(lacks)}.\n\nWhat goes along into "
                "checkpoints has state_dict() and load_state_dict(state)."
            )
        known = [n for n, other in self.things.items() if other is thing]
        if known:
            return known[0]
        numbered = name is None
        if name is None:
            count = self._counts.get(kind, 0) + 1
            name = kind if count == 1 else f"{kind}-{count}"
        elif not isinstance(name, str) or not name or "/" in name:
            raise CheckpointError(
                f"attach was given name={name!r}.\n\nGive a text without a slash."
            )
        if name in self.things:
            raise CheckpointError(
                f"attach was given a {kind} as {name!r}, and a "
                f"{type(self.things[name]).__name__} has this name.\n\nGive name= another one."
            )
        if name in self.waiting:
            thing.load_state_dict(self.waiting[name])
            del self.waiting[name]
            if self.again is not None:
                self.again()
        self._counts[kind] = self._counts.get(kind, 0) + numbered
        self._things[name] = weakref.ref(thing) if weak else lambda: thing
        return name

    def states(self) -> dict[str, Any]:
        """The state of everything attached that has any worth keeping."""
        # What waits was not used yet, and belongs to this run all the same.
        return {**self.waiting, **{name: t.state_dict() for name, t in self.things.items()}}

    def load(self, states: dict[str, Any]) -> Callable[[], None]:
        """Hand states to what is attached; the rest waits.

        Returns:
            Takes all of it back.

        Raises:
            ParallaxError: A thing refuses its state; all others are as they were.
        """
        before: list[tuple[Any, Any]] = []
        waiting = self.waiting

        def undo() -> None:
            for thing, state in before:
                thing.load_state_dict(state)
            self.waiting = waiting

        try:
            for name, thing in self.things.items():
                if name in states:
                    before.append((thing, thing.state_dict()))
                    thing.load_state_dict(states[name])
        except Exception:
            undo()
            raise
        self.waiting = {name: s for name, s in states.items() if name not in self.things}
        return undo

    def missing(self, states: Container[str]) -> list[str]:
        """What is attached, with no state among these: a thing that can be at rest needs none."""
        things = self.things.items()
        return [n for n, thing in things if n not in states and not hasattr(thing, "at_rest")]

    def overdue(self) -> list[str]:
        """Names of waiting state that training cannot go on without: that is not at rest."""
        return [
            name
            for name, state in self.waiting.items()
            if not (isinstance(state, dict) and state.get("at_rest"))
        ]
