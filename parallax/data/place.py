"""The place in the data: how far a loop has come, and how a later run takes it up.

A batch counts as used once the loader has yielded it; what workers have read ahead does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from parallax.errors import DataError


class Place(NamedTuple):
    """An epoch, and how many samples of it all ranks together have been handed."""

    epoch: int
    samples: int


class Resumable(DataLoader[Any]):
    """A loader that knows its place in the global data, which is the same on every rank.

    Attributes:
        settings: What decides the order of the samples, by name; a place means nothing without.
        running: How far the running iteration has come; None when none is running.
        turn: Number of the iteration that counts: of several iterators the last.
    """

    settings: dict[str, Any]
    running: Place | None = None
    turn: int = 0

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.turn += 1
        self.running = self.begin()
        return _Counting(self, super().__iter__(), self.turn)

    # -- what a style of dataset says --------------------------------------------------------------

    @property
    def next_place(self) -> Place:
        """The place at which the next iteration begins."""
        raise NotImplementedError

    def begin(self) -> Place:
        """The place at which the iteration begins that is being made."""
        raise NotImplementedError

    def passed(self) -> int:
        """Samples of all ranks in the batch that was just yielded, at the running place."""
        raise NotImplementedError

    def go_to(self, place: Place, state: dict[str, Any]) -> None:
        """Let the next iteration begin at a place."""
        raise NotImplementedError

    # ----------------------------------------------------------------------------------------------

    @property
    def place(self) -> Place:
        """Where the loop is: as far as the running iteration came, or where the next begins."""
        return self.next_place if self.running is None else self.running

    @property
    def at_rest(self) -> bool:
        """Whether the loop is between epochs, so that nothing of one is lost or read again."""
        return self.place.samples == 0

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, the same on every rank: plain values."""
        place = self.place._asdict()
        return {**place, "at_rest": self.at_rest, "settings": dict(self.settings)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a place up: the next iteration begins there; one that is running is unchanged.

        Raises:
            DataError: The state is of other data, or of the same in another order.
        """
        kind = type(self).__name__
        try:
            place = Place(int(state_dict["epoch"]), int(state_dict["samples"]))
            saved = dict(state_dict["settings"])
            if min(place) < 0:
                raise ValueError(f"{place} is before the beginning")
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"a {kind} was given a state that is none of a loader: {type(error).__name__}: "
                f"{error}.\n\nGive what its state_dict() returned."
            ) from None
        other = [
            f"  {name}: {saved.get(name)!r} then, {self.settings.get(name)!r} now"
            for name in (*self.settings, *(n for n in saved if n not in self.settings))
            if saved.get(name) != self.settings.get(name)
        ]
        if other:
            raise DataError(
                "a place in other data was to be taken up, where samples would be lost or seen "
                "again:\n" + "\n".join(other) + "\n\nMake the loader as it was when the place was "
                "saved, or load without it: boosted.load_(directory, kinds=...) without 'attached'."
            )
        self.turn += 1  # an iterator that is running counts no more
        self.running = None
        self.go_to(place, state_dict)


class _Counting:
    """An iterator that notes in its loader what it has yielded, while it is the loader's last."""

    def __init__(self, loader: Resumable, inner: Iterator[Any], turn: int) -> None:
        self._loader, self._inner, self._turn = loader, inner, turn

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._inner)  # pyright: ignore[reportArgumentType]

    def __next__(self) -> Any:
        loader = self._loader
        try:
            batch = next(self._inner)
        except StopIteration:
            if loader.turn == self._turn:
                loader.running = None
            raise
        if loader.turn == self._turn and loader.running is not None:
            samples = loader.running.samples + loader.passed()
            loader.running = loader.running._replace(samples=samples)
        return batch
