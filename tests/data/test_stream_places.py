"""Streams with a state of their own: every convention of such states, over the ends of epochs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info

from parallax import DataError, dp
from parallax.checkpoint.plain import back, plain
from parallax.testing import World, pool

pytestmark = pytest.mark.ranks

Options = dict[str, Any]
Epochs = list[list[list[int]]]

ALONE: Options = {"batch_size": 2}
WORKERS: Options = {"batch_size": 2, "num_workers": 2}
LASTING: Options = {**WORKERS, "persistent_workers": True}


def share() -> tuple[int, int]:
    worker = get_worker_info()
    return (worker.id, worker.num_workers) if worker else (0, 1)


class Consumed(IterableDataset[Any]):
    """The next iteration uses a loaded state up; until its first sample, state_dict() is stale."""

    def __init__(self, length: int) -> None:
        self.length, self.at = length, 0
        self.loaded: int | None = None

    def __iter__(self) -> Iterator[Tensor]:
        first, step = share()
        start, self.loaded = first if self.loaded is None else self.loaded, None
        for i in range(start, self.length, step):
            self.at = i + step
            yield torch.tensor(i)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["at"]


class Turning(IterableDataset[Any]):
    """At its end it turns to the next epoch, in which its samples are others."""

    def __init__(self, length: int) -> None:
        self.length, self.at, self.epoch = length, 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        first, step = share()
        while self.at * step + first < self.length:
            value, self.at = self.at * step + first, self.at + 1
            yield torch.tensor(100 * self.epoch + value)
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class Told(IterableDataset[Any]):
    """The epoch is told from outside; a state counts in its own epoch only, but there for ever."""

    def __init__(self, length: int) -> None:
        self.length, self.at, self.epoch = length, 0, 0
        self.loaded: dict[str, Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        first, step = share()
        known = self.loaded is not None and self.loaded["epoch"] == self.epoch
        for i in range(self.loaded["at"] if known and self.loaded else first, self.length, step):
            self.at = i + step
            yield torch.tensor(100 * self.epoch + i)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class Buffered(IterableDataset[Any]):
    """Its state is an object that it goes on changing."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.seen: list[int] = []

    def __iter__(self) -> Iterator[Tensor]:
        first, step = share()
        for i in range(first + step * len(self.seen), self.length, step):
            self.seen.append(i)
            yield torch.tensor(i)
        self.seen.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


def loader(dataset: Any, options: Options) -> Any:
    return dp()(nn.Linear(1, 1)).loader(dataset, **options)


def epochs(made: Any, count: int) -> Epochs:
    return [[batch.tolist() for batch in made] for _ in range(count)]


def cut_at(kind: Any, length: int, options: Options, stop: tuple[int, int], ends: bool) -> Any:
    """The first batches, epoch by epoch, and the state: inside an epoch, or after its end."""
    made, read = loader(kind(length), options), []
    for epoch in range(stop[0] + 1):
        rows: list[list[int]] = []
        for batch in made:
            rows.append(batch.tolist())
            if not ends and (epoch, len(rows)) == stop:
                break
        read.append(rows)
    return read, plain(made.state_dict(), "the loader", [])


def gone_on(
    kind: Any, length: int, options: Options, stop: tuple[int, int], ends: bool, count: int
) -> Epochs:
    """As many epochs as asked for, cut there; the state is written and read once more at once."""
    read, state = cut_at(kind, length, options, stop, ends)
    made = loader(kind(length), options)
    made.load_state_dict(back(state))
    assert plain(made.state_dict(), "the loader", []) == state
    if not ends:
        read[-1] += epochs(made, 1)[0]
    return read + epochs(made, count - len(read))


def wrong(kind: Any, lengths: list[int], options: Options, every: int) -> list[Any]:
    """The places after which another order follows than without an interruption."""
    found: list[Any] = []
    for length in lengths:
        whole = epochs(loader(kind(length), options), 3)
        stops = [(e, b + 1) for e in range(2) for b in range(len(whole[e]))]
        last = [(e, len(whole[e])) for e in range(2)]
        for stop in sorted({*stops[::every], *last}):
            found += [
                (length, stop, ends)
                for ends in sorted({False, stop in last})
                if gone_on(kind, length, options, stop, ends, 3) != whole
            ]
    return found


@pytest.mark.parametrize("kind", [Consumed, Turning, Told, Buffered])
def test_every_place_in_three_epochs_is_taken_up(kind: Any) -> None:
    assert pool(1).run(wrong, kind, [3, 7, 8], ALONE, 1) == [[]]


@pytest.mark.parametrize("options", [WORKERS, LASTING], ids=["workers", "lasting workers"])
@pytest.mark.parametrize("kind", [Consumed, Turning, Buffered])
def test_places_among_workers_are_taken_up(kind: Any, options: Options) -> None:
    pytest.importorskip("torchdata")
    assert pool(1).run(wrong, kind, [7], options, 3) == [[]]


def test_a_dataset_left_at_its_end_would_be_seen() -> None:
    """The plausible way to be wrong: to hand a dataset its last state and let it begin there."""

    def run() -> list[Any]:
        from parallax.data.stream import Stream

        def begin_there(self: Stream, inner: Any) -> None:
            if inner is not None:
                self.dataset.load_state_dict(inner)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Stream, "_finish", begin_there)
            return wrong(Consumed, [7], ALONE, 1)

    ends = [(7, (epoch, 4), ends) for epoch in range(2) for ends in (False, True)]
    assert pool(1).run(run) == [ends]


def test_a_state_that_is_asked_for_before_the_first_sample_would_be_stale() -> None:
    """What the loader is there to avoid: a dataset that tells of what it read last."""
    dataset = Consumed(8)
    dataset.load_state_dict({"at": 5})
    iter(dataset)
    assert dataset.state_dict() == {"at": 0}


@pytest.mark.parametrize("options", [ALONE, WORKERS], ids=["alone", "workers"])
def test_a_place_is_kept_over_two_restarts_in_a_row(options: Options) -> None:
    """After the first restart one batch is read, by one of the workers; the other has read none."""
    pytest.importorskip("torchdata")

    def run() -> Epochs:
        read, state = cut_at(Consumed, 16, options, (0, 2), False)
        made = loader(Consumed(16), options)
        made.load_state_dict(back(state))
        read[0].append(next(iter(made)).tolist())
        state = made.state_dict()
        made = loader(Consumed(16), options)
        made.load_state_dict(state)
        return [read[0] + epochs(made, 1)[0]]

    assert pool(1).run(run) == pool(1).run(lambda: epochs(loader(Consumed(16), options), 1))


def test_asking_for_a_place_starts_no_workers() -> None:
    pytest.importorskip("torchdata")

    def run() -> tuple[int, int, int]:
        state = cut_at(Consumed, 8, WORKERS, (0, 1), False)[1]
        made = loader(Consumed(8), WORKERS)
        made.load_state_dict(back(state))
        made.state_dict()
        before = len(multiprocessing.active_children())
        iterator = iter(made)
        next(iterator)
        while_reading = len(multiprocessing.active_children())
        list(iterator)
        return before, while_reading, len(multiprocessing.active_children())

    assert pool(1).run(run) == [(0, 2, 0)]


def test_the_place_among_workers_is_the_same_on_every_rank(world2: World) -> None:
    pytest.importorskip("torchdata")
    first, second = world2.run(cut_at, Consumed, 16, WORKERS, (0, 2), False)
    assert first[1] == second[1]
    assert first[0] != second[0]


class Drawing(IterableDataset[Any]):
    """A stream from a generator of its own, which each worker seeds as torch tells it to."""

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        assert worker is not None
        own = torch.Generator().manual_seed(worker.seed)
        for _ in range(4):
            yield torch.randint(1 << 40, (), generator=own)


def test_workers_of_all_ranks_read_the_same_stream(world2: World) -> None:
    """Whatever they seed: otherwise a global batch would be made of two."""

    def run(ranks_differ: bool) -> list[int]:
        made = loader(Drawing(), {"batch_size": 4, "num_workers": 1})
        if ranks_differ:  # as those of a map-style dataset do
            made.generator.manual_seed(torch.distributed.get_rank())
        made.dataset.ranks, made.dataset.rank = 1, 0
        return [int(x) for batch in made for x in batch]

    first, second = world2.run(run, False)
    assert first == second
    assert len(set(first)) == 4
    first, second = world2.run(run, True)
    assert first != second


def test_the_epoch_is_told_to_a_dataset_that_asks() -> None:
    def run() -> list[int]:
        made = loader(Told(2), ALONE)
        made.load_state_dict({**made.state_dict(), "epoch": 5})
        return [int(batch[0]) for _ in range(2) for batch in made]

    assert pool(1).run(run) == [[500, 600]]


def test_reading_leaves_the_generators_of_the_process_and_its_gpu_alone() -> None:
    """Otherwise every batch would begin the same dropout masks again, on every rank."""

    def run() -> tuple[bool, list[int]]:
        seeds: list[int] = []
        made = loader(Turning(4), ALONE)
        torch.manual_seed(3)
        before = torch.get_rng_state()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "manual_seed_all", seeds.append)
            epochs(made, 1)
            same = torch.equal(torch.get_rng_state(), before)
            seen = list(seeds)
            torch.manual_seed(4)
        assert seeds == [4]  # what torch does, and would be seen
        return same, seen

    assert pool(1).run(run) == [(True, [])]


# -- refusals --------------------------------------------------------------------------------------


class Plain(IterableDataset[Any]):
    """A stream without a state."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(self.length))


def refused(run: Any) -> str:
    try:
        run()
    except DataError as error:
        return str(error)
    return "nothing was raised"


def shorter() -> None:
    state = cut_at(Plain, 9, ALONE, (0, 4), False)[1]
    made = loader(Plain(5), ALONE)
    made.load_state_dict(back(state))
    iter(made)


def without_its_state() -> None:
    state = cut_at(Turning, 9, ALONE, (0, 2), False)[1]
    made = loader(Plain(9), ALONE)
    made.load_state_dict(back(state))
    iter(made)


def back_to_the_beginning() -> None:
    made = loader(Turning(9), ALONE)
    state = made.state_dict()
    next(iter(made))
    made.load_state_dict(state)


def other_batches_between_snapshots() -> None:
    options = {**WORKERS, "snapshot_every_n_steps": 3}
    state = cut_at(Turning, 16, options, (0, 2), False)[1]
    loader(Turning(16), {**options, "batch_size": 4}).load_state_dict(back(state))


def lasting_workers_that_nobody_asks() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parallax.data.stream.find_spec", lambda name: None)
        made = loader(Turning(4), LASTING)
    made.state_dict()  # before the first epoch they have nothing to tell
    list(made)
    made.state_dict()


CASES = {
    shorter: (
        "the place in a stream after 8 samples was to be taken up, and Plain ended after 5.\n\n"
        "Give the dataset that it was saved with."
    ),
    without_its_state: (
        "the place in a stream was saved with its own state, and Plain takes none.\n\nGive the "
        "dataset that it was saved with, or one with state_dict() and load_state_dict(state)."
    ),
    back_to_the_beginning: (
        "the beginning of a stream was to be taken up, and its Turning, which keeps a state of its "
        "own, has been read from.\n\nMake the dataset and the loader anew."
    ),
    other_batches_between_snapshots: (
        "a place in other data was to be taken up, where samples would be lost or seen again:\n"
        "  batch_size: 2 then, 4 now\n\nMake the loader as it was when the place was saved, or "
        "load without it: boosted.load_(directory, kinds=...) without 'attached'."
    ),
    lasting_workers_that_nobody_asks: (
        "the place in a stream was to be saved, of which 2 workers that stay keep a state, and "
        "torchdata, which asks them for it, is not installed.\n\nInstall parallax-torch[data], or "
        "use persistent_workers=False."
    ),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_cannot_be_taken_up_is_named(case: Any) -> None:
    assert pool(1).run(refused, case) == [CASES[case]]
