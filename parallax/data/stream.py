"""Iterable-style datasets: one global stream, cut over the ranks, taken up where it was left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from parallax.core.slices import cut
from parallax.data.part import Part
from parallax.data.place import Place, Resumable
from parallax.data.randomness import apart
from parallax.errors import DataError


class Stream(IterableDataset[Any]):
    """An iterable dataset, grouped into global batches of which one part is kept.

    Every data rank reads the whole stream, so all must read the same: each global batch is read
    with generators seeded from the seed, the epoch, the worker and the batch's number.

    It is taken up by the dataset's own state, where the dataset or its iterator has `state_dict()`
    and `load_state_dict(state)`; else by reading again what was read, which costs the time that it
    takes.

    Args:
        dataset: The dataset.
        batch_size: Samples of a global batch.
        drop_last: Whether to leave out a short last batch.
        ranks: Number of data ranks.
        rank: This rank's place among them.
        seed: Seed of random streams.

    Attributes:
        next_epoch: The epoch of the next iteration.
    """

    def __init__(
        self, dataset: Any, batch_size: int, *, drop_last: bool, ranks: int, rank: int, seed: int
    ) -> None:
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.ranks, self.rank, self.seed = ranks, rank, seed
        self.next_epoch = 0
        self._epoch = self._samples = 0
        self._ended = False
        self._iterator: Any = None
        self._resume: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Part]:
        resume, self._resume = self._resume, None
        self._epoch = resume["epoch"] if resume else self.next_epoch
        self.next_epoch = self._epoch + 1
        self._samples = 0
        self._ended = bool(resume and resume["ended"])
        with self._randomness():
            self._iterator = self._begun(resume["inner"] if resume else None)
        if self._ended:
            self._iterator = iter(())
        elif resume and resume["inner"] is None:
            while self._samples < resume["samples"]:
                self._read(min(self.batch_size, resume["samples"] - self._samples))
        elif resume:
            self._samples = resume["samples"]
        return self._parts()

    def _parts(self) -> Iterator[Part]:
        while True:
            rows = self._read(self.batch_size)
            if not rows or (self.drop_last and len(rows) < self.batch_size):
                return
            start, end = cut(len(rows), self.ranks, self.rank)
            yield Part(rows[start:end], rows[0])

    def _read(self, count: int) -> list[Any]:
        with self._randomness():
            rows = list(islice(self._iterator, count))
        self._samples += len(rows)
        # The state of a dataset that is at its end may be that of one at its beginning.
        self._ended = len(rows) < count
        return rows

    def _randomness(self) -> Any:
        worker = get_worker_info()
        number = self._samples // self.batch_size
        return apart(self.seed, self._epoch, worker.id if worker else 0, number)

    def _begun(self, inner: Any) -> Iterator[Any]:
        if inner is not None and _has_state(self.dataset):
            self.dataset.load_state_dict(inner)
        iterator = iter(self.dataset)
        if inner is not None and not _has_state(self.dataset):
            if not _has_state(iterator):
                raise DataError(
                    f"the place in a stream was saved with its own state, and "
                    f"{type(self.dataset).__name__} takes none.\n\nGive the dataset that it was "
                    "saved with, or one with state_dict() and load_state_dict(state)."
                )
            iterator.load_state_dict(inner)  # pyright: ignore[reportAttributeAccessIssue]
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """As far as this process has read: after the last global batch that was handed out."""
        if self._resume is not None:
            return self._resume
        holder = self.dataset if _has_state(self.dataset) else self._iterator
        inner = holder.state_dict() if _has_state(holder) else None
        told = {"epoch": self._epoch, "samples": self._samples, "ended": self._ended}
        return {**told, "inner": inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on from there."""
        self._resume = state


def _has_state(thing: Any) -> bool:
    return all(callable(getattr(thing, m, None)) for m in ("state_dict", "load_state_dict"))


class StreamLoader(Resumable):
    """A loader over a stream, read in this process; made by `parallax.data.loader`."""

    def __init__(self, stream: Stream, **options: Any) -> None:
        self._next = Place(0, 0)
        self._stream = stream
        self.settings = {"workers": options.get("num_workers", 0), "drop_last": stream.drop_last}
        super().__init__(stream, batch_size=None, **options)

    @property
    def next_place(self) -> Place:
        """The place at which the next iteration begins."""
        return self._next

    def begin(self) -> Place:
        """The place at which the iteration begins that is being made."""
        place, self._next = self._next, Place(self._next.epoch + 1, 0)
        self._stream.next_epoch = place.epoch  # of workers, the copies that start now
        return place

    def passed(self) -> int:
        """Samples of all ranks in a batch, the last of an epoch counting as a whole one."""
        return self._stream.batch_size

    def go_to(self, place: Place, state: dict[str, Any]) -> None:
        """Let the next iteration begin at a place."""
        self._next = place
        self._take_up(state.get("stream"))

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, the same on every rank."""
        return {**super().state_dict(), "stream": None if self.at_rest else self._state()}

    def _state(self) -> Any:
        return self._stream.state_dict()

    def _take_up(self, state: Any) -> None:
        if state is not None:
            self._stream.load_state_dict(state)


class ForgetfulStreamLoader(StreamLoader):
    """A loader over a stream read by workers, whose place nobody keeps inside an epoch."""

    def _state(self) -> Any:
        raise DataError(
            f"the place in a stream that {self.num_workers} workers read was to be saved, and "
            "torchdata, which asks them for it, is not installed.\n\nInstall "
            "parallax-torch[data], save between epochs, or use num_workers=0."
        )

    def _take_up(self, state: Any) -> None:
        if state is not None:
            self._state()


def stream_loader(workers: int) -> Callable[..., StreamLoader]:
    """The kind of loader that a stream needs: with workers, torchdata's knows how far each is."""
    if workers == 0:
        return StreamLoader
    if find_spec("torchdata") is None:
        return ForgetfulStreamLoader
    from torchdata.stateful_dataloader import StatefulDataLoader

    class WorkerStreamLoader(StreamLoader, StatefulDataLoader):
        """A loader over a stream read by workers, each of which says how far it is."""

        def _state(self) -> Any:
            return StatefulDataLoader.state_dict(self)

        def _take_up(self, state: Any) -> None:
            StatefulDataLoader.load_state_dict(self, state or {})

    return WorkerStreamLoader
