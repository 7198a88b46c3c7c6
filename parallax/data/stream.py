"""Iterable-style datasets: one global stream, cut over the ranks, taken up where it was left."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
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
        self._began: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Part]:
        resume, self._resume = self._resume, None
        start = resume or self._at("start", self.next_epoch, 0, self._left())
        self._epoch, self._samples = start["epoch"], 0
        self.next_epoch = self._epoch + 1
        self._ended = start["at"] == "end"
        with self._randomness():
            if resume and resume["at"] != "middle":
                self._finish(resume["inner"])
            inner = resume["inner"] if resume and resume["at"] == "middle" else None
            self._iterator = iter(()) if self._ended else self._begun(inner)
        if start["at"] == "middle" and inner is None:
            self._read_again(start["samples"])
        self._samples = start["samples"]
        self._began = start
        return self._parts()

    def _parts(self) -> Iterator[Part]:
        while True:
            rows = self._read(self.batch_size)
            if not rows or (self.drop_last and len(rows) < self.batch_size):
                return
            start, end = cut(len(rows), self.ranks, self.rank)
            yield Part(rows[start:end], rows[0])

    def _read(self, count: int) -> list[Any]:
        self._began = None
        with self._randomness():
            rows = list(islice(self._iterator, count))
        self._samples += len(rows)
        self._ended = len(rows) < count
        return rows

    def _read_again(self, samples: int) -> None:
        while self._samples < samples:
            self._read(min(self.batch_size, samples - self._samples))
            if self._ended:
                raise DataError(
                    f"the place in a stream after {samples} samples was to be taken up, and "
                    f"{type(self.dataset).__name__} ended after {self._samples}.\n\nGive the "
                    "dataset that it was saved with."
                )

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

    def _finish(self, inner: Any) -> None:
        """Bring the dataset to where it was after an epoch.

        The state of a dataset at its end is to some the end, which an iteration has to pass, and to
        others the beginning of what comes next.
        """
        if inner is None or not _has_state(self.dataset):
            return
        self.dataset.load_state_dict(inner)
        for _ in self.dataset:
            self.dataset.load_state_dict(inner)
            break

    def _left(self) -> Any:
        """The dataset's own state as the iterations in this process left it."""
        used = self._iterator is not None and _has_state(self.dataset)
        return deepcopy(self.dataset.state_dict()) if used else None

    @staticmethod
    def _at(at: str, epoch: int, samples: int, inner: Any) -> dict[str, Any]:
        return {"at": at, "epoch": epoch, "samples": samples, "inner": inner}

    def state_dict(self) -> dict[str, Any]:
        """As far as this process has read: after the last global batch that was handed out."""
        # Before anything is read, a dataset may still tell of what it read last.
        known = self._resume or self._began
        if known is not None:
            return known
        holder = self.dataset if _has_state(self.dataset) else self._iterator
        # Copied, since torchdata finds out what has changed by comparing with the last.
        inner = deepcopy(holder.state_dict()) if _has_state(holder) else None
        return self._at("end" if self._ended else "middle", self._epoch, self._samples, inner)

    def state_between(self) -> dict[str, Any] | None:
        """What an epoch left for the next one; None when that begins as if it were the first."""
        if self._resume is not None:
            return self._resume
        left = self._left()
        return None if left is None else self._at("start", self.next_epoch, 0, left)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Let the next iteration go on from there; None: begin.

        Raises:
            DataError: The dataset keeps a state, and cannot be brought back to its beginning.
        """
        if state is None and self._left() is not None:
            raise DataError(
                f"the beginning of a stream was to be taken up, and its "
                f"{type(self.dataset).__name__}, which keeps a state of its own, has been read "
                "from.\n\nMake the dataset and the loader anew."
            )
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
        # Here and not in workers, whose copies may share the number: Hugging Face's datasets do.
        if callable(tell := getattr(self._stream.dataset, "set_epoch", None)):
            tell(place.epoch)
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
        between = self.at_rest and self.running is None
        stream = self._state_between() if between else self._state()
        return {**super().state_dict(), "stream": stream}

    def _state(self) -> Any:
        return self._stream.state_dict()

    def _state_between(self) -> Any:
        return self._stream.state_between()

    def _take_up(self, state: Any) -> None:
        self._stream.load_state_dict(state)


class ForgetfulStreamLoader(StreamLoader):
    """A loader over a stream read by workers, whose place nobody keeps inside an epoch."""

    def _state(self) -> Any:
        raise DataError(
            f"the place in a stream that {self.num_workers} workers read was to be saved, and "
            "torchdata, which asks them for it, is not installed.\n\nInstall "
            "parallax-torch[data], save between epochs, or use num_workers=0."
        )

    def _state_between(self) -> Any:
        # Workers that stay hold what their copies of the dataset keep from one epoch to the next.
        if self.persistent_workers and _has_state(self._stream.dataset) and self.place.epoch:
            raise DataError(
                f"the place in a stream was to be saved, of which {self.num_workers} workers that "
                "stay keep a state, and torchdata, which asks them for it, is not installed.\n\n"
                "Install parallax-torch[data], or use persistent_workers=False."
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

        def __init__(self, stream: Stream, **options: Any) -> None:
            with warnings.catch_warnings():
                # Of torch to torchdata 0.11, about something that no caller can change.
                warnings.filterwarnings("ignore", "'set_vital' is deprecated")
                super().__init__(stream, **options)
            if self.snapshot_every_n_steps != 1:
                # Batches since the last snapshot are read again, and have to be the same ones.
                self.settings["batch_size"] = stream.batch_size

        def _state(self) -> Any:
            # Asking torchdata for what it was given would start workers.
            return self.next_iter_state or StatefulDataLoader.state_dict(self)

        def _state_between(self) -> Any:
            # Workers that end with the epoch leave nothing; each begins with a new copy.
            if self.next_iter_state or (self.persistent_workers and self._iterator is not None):
                return self._state()
            return None

        def _take_up(self, state: Any) -> None:
            StatefulDataLoader.load_state_dict(self, state or {})

    return WorkerStreamLoader
