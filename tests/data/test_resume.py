"""The place in the data: taken up exactly, by any number of ranks, with workers and without."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from parallax import DataError, dp, tp, zero
from parallax.checkpoint.plain import back, plain
from parallax.data.place import Place
from parallax.data.rows import GlobalBatches
from parallax.testing import World, pool

Transform = Any


def joined(rows: Any) -> list[Any]:
    return list(itertools.chain.from_iterable(rows))


@given(
    samples=st.integers(1, 40),
    times=st.integers(1, 3),
    ranks=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_any_ranks_take_up_any_place(
    samples: int,
    times: int,
    ranks: tuple[int, int],
    shuffle: bool,
    drop_last: bool,
    data: st.DataObject,
) -> None:
    """Ranks and batch size change in the middle of an epoch; the global order does not."""

    def parts(n: int, place: Place) -> tuple[list[int], list[Place]]:
        """What ranks read together from a place on, and the place after each batch."""
        size = n * times
        rows, found = [], [place]
        options: Any = {"shuffle": shuffle, "drop_last": drop_last, "seed": 3}
        samplers = [GlobalBatches(samples, size, ranks=n, rank=r, **options) for r in range(n)]
        for sampler in samplers:
            sampler.place = place
        for batch in zip(*samplers, strict=True):
            rows += joined(batch)
            found.append(found[-1]._replace(samples=found[-1].samples + len(joined(batch))))
        return rows, found

    whole, _ = parts(1, Place(2, 0))
    alone = GlobalBatches(samples, samples, ranks=1, rank=0, shuffle=shuffle, seed=3)
    alone.place = Place(2, 0)
    order = joined(alone)
    assert order[: len(whole)] == whole
    read, stops = parts(ranks[0], Place(2, 0))
    stop = data.draw(st.sampled_from(stops))
    rest, _ = parts(ranks[1], stop)
    both = read[: stop.samples] + rest
    assert both == order[: len(both)]
    assert drop_last or len(both) == samples


# -- loaders ---------------------------------------------------------------------------------------


class Noisy(Dataset[Any]):
    """Samples with random numbers of all generators in them."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        noise = torch.rand(()) + random.random() + np.random.rand()
        return torch.tensor([float(index), float(noise)], dtype=torch.float64)


class Counting(IterableDataset[Any]):
    """A stream with random numbers in it, shared out to workers."""

    def __init__(self, length: int) -> None:
        self.length, self.at = length, 0

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        start, step = (worker.id, worker.num_workers) if worker else (0, 1)
        self.at = self.at or start
        while self.at < self.length:
            value, self.at = self.at, self.at + step
            yield torch.tensor([float(value), float(torch.rand(()))], dtype=torch.float64)
        self.at = 0


class Stateful(Counting):
    """The same, which says where it is; a counter shows that nothing is read again."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.reads = 0

    def __iter__(self) -> Iterator[Tensor]:
        for sample in super().__iter__():
            self.reads += 1
            yield sample

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class ByIterator(IterableDataset[Any]):
    """A stream whose iterator has the state."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return _Iterator(self.length)


class _Iterator:
    def __init__(self, length: int) -> None:
        self.length, self.at = length, 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Tensor:
        if self.at >= self.length:
            raise StopIteration
        self.at += 1
        return torch.tensor([self.at - 1.0, float(torch.rand(()))], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def loader(transform: Transform, dataset: Any, options: dict[str, Any]) -> Any:
    return transform(nn.Linear(1, 1)).loader(dataset, **options)


def through(transform: Transform, dataset: Any, options: dict[str, Any], epochs: int) -> Any:
    """All batches of this rank."""
    torch.manual_seed(0)
    made = loader(transform, dataset, options)
    return [[b.tolist() for b in made] for _ in range(epochs)]


def until(
    transform: Transform, dataset: Any, options: dict[str, Any], stop: int
) -> tuple[list[Any], Any]:
    """The first batches of this rank, over epochs, and the state after them, as files hold it."""
    made = loader(transform, dataset, options)
    batches: list[Any] = []
    while len(batches) < stop:
        for batch in made:
            batches.append(batch.tolist())
            if len(batches) == stop:
                break
    return batches, plain(made.state_dict(), "the loader")


def after(
    transform: Transform, dataset: Any, options: dict[str, Any], state: Any, count: int
) -> tuple[list[Any], int]:
    """What comes next, and how many samples the dataset was asked for in this process."""
    made = loader(transform, dataset, options)
    made.load_state_dict(back(state))
    batches: list[Any] = []
    while len(batches) < count:
        for batch in made:
            batches.append(batch.tolist())
            if len(batches) == count:
                break
    return batches, getattr(dataset, "reads", 0)


def together(rows: list[Any]) -> list[Any]:
    """The samples of ranks' batches in the global order."""
    return joined(joined(batch) for batch in zip(*rows, strict=True))


LENGTH, SIZE = 11, 4
PER_EPOCH = 3


@pytest.mark.ranks
@pytest.mark.parametrize("stop", range(7))
def test_rows_go_on_after_any_batch(stop: int) -> None:
    """Every place of two epochs, on other ranks each time; the samples are those of one process."""
    options = {"batch_size": SIZE, "shuffle": True, "seed": 5}
    first, then = [(1, 2), (2, 4), (4, 1)][stop % 3]
    whole = joined(joined(pool(1).run(through, dp(), Noisy(LENGTH), options, 3)[0]))
    read = pool(first).run(until, dp(), Noisy(LENGTH), options, stop)
    assert all(state == read[0][1] for _, state in read)  # the place is every rank's
    rest = pool(then).run(after, dp(), Noisy(LENGTH), options, read[0][1], 3)
    both = together([batches for batches, _ in read]) + together([batches for batches, _ in rest])
    assert [row[0] for row in both] == [row[0] for row in whole][: len(both)]
    assert len(both) > 8


@pytest.mark.ranks
@pytest.mark.parametrize(("workers", "others", "stop"), [(2, 1, 1), (1, 2, 2), (2, 2, 4)])
def test_augmentation_in_workers_is_that_of_one_run(
    workers: int, others: int, stop: int, world2: World
) -> None:
    """Bit for bit, with other workers and ranks: a sample's noise is its own."""

    def options(workers: int) -> dict[str, Any]:
        return {"batch_size": SIZE, "shuffle": True, "seed": 5, "num_workers": workers}

    whole = joined(joined(pool(1).run(through, dp(), Noisy(LENGTH), options(1), 3)[0]))
    read = world2.run(until, dp(), Noisy(LENGTH), options(workers), stop)
    rest = pool(1).run(after, dp(), Noisy(LENGTH), options(others), read[0][1], 3)
    both = together([batches for batches, _ in read]) + joined(rest[0][0])
    assert both == whole[: len(both)]
    assert len({row[1] for row in whole}) == 3 * LENGTH  # of each epoch and sample another


@pytest.mark.ranks
def test_what_workers_read_ahead_does_not_count(world2: World) -> None:
    options = {"batch_size": 2, "num_workers": 2, "prefetch_factor": 4}
    for _, state in world2.run(until, dp(), Noisy(40), options, 3):
        assert back(state)["samples"] == 6


@pytest.mark.ranks
def test_counting_what_is_drawn_would_be_seen(world2: World) -> None:
    """The plausible way to be wrong: the sampler's place, which runs ahead with the workers."""

    def drawn() -> tuple[int, int]:
        made = loader(dp(), Noisy(40), {"batch_size": 2, "num_workers": 2})
        ahead: list[int] = []
        batches = made.batch_sampler
        inner = batches._parts

        def parts(place: Place) -> Iterator[list[int]]:
            for part in inner(place):
                ahead.append(1)
                yield part

        batches._parts = parts
        iterator = iter(made)
        next(iterator)
        return len(ahead) * 2, made.state_dict()["samples"]

    for ahead, place in world2.run(drawn):
        assert ahead > place == 2


@pytest.mark.ranks
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [Counting, Stateful, ByIterator])
def test_streams_go_on_after_any_batch(kind: Any, stop: int, world2: World, world4: World) -> None:
    options = {"batch_size": SIZE, "seed": 7}
    whole = joined(joined(pool(1).run(through, dp(), kind(LENGTH), options, 3)[0]))
    read = world2.run(until, dp(), kind(LENGTH), options, stop)
    rest = world4.run(after, dp(), kind(LENGTH), options, read[0][1], 3)
    both = together([batches for batches, _ in read]) + together([batches for batches, _ in rest])
    assert both == whole[: len(both)]
    assert len(both) > 12
    if kind is Stateful:
        # What came after, and no sample before it: its own state was used. At an epoch's end one
        # is read to see that it has passed.
        after_it = len(together([b for b, _ in rest]))
        assert {reads for _, reads in rest} == {after_it + (stop == PER_EPOCH)}


@pytest.mark.ranks
@pytest.mark.parametrize("stop", [1, 2, 3])
@pytest.mark.parametrize("kind", [Counting, Stateful])
def test_streams_of_workers_go_on_after_any_batch(kind: Any, stop: int, world2: World) -> None:
    pytest.importorskip("torchdata")
    options = {"batch_size": SIZE, "num_workers": 2, "seed": 7}
    whole = pool(1).run(through, dp(), kind(18), options, 2)[0]
    assert sorted(row[0] for row in joined(whole[0])) == list(range(18))
    read = world2.run(until, dp(), kind(18), options, stop)
    rest = pool(1).run(after, dp(), kind(18), options, read[0][1], 4)
    both = together([batches for batches, _ in read]) + joined(rest[0][0])
    assert both == joined(joined(whole))[: len(both)]


@pytest.mark.ranks
def test_without_torchdata_a_place_among_workers_is_refused(
    world2: World,
) -> None:
    def run() -> list[str]:
        import parallax.data.stream as module

        real, module.find_spec = module.find_spec, lambda name: None
        found = []
        try:
            made = loader(dp(), Counting(8), {"batch_size": 2, "num_workers": 1})
            made.state_dict()  # between epochs there is nothing to ask workers for
            next(iter(made))
            made.state_dict()
        except DataError as error:
            found.append(str(error))
        finally:
            module.find_spec = real
        return found

    for found in world2.run(run):
        assert found == [
            (
                "the place in a stream that 1 workers read was to be saved, and torchdata, which "
                "asks "
                "them for it, is not installed.\n\nInstall parallax-torch[data], save between "
                "epochs, "
                "or use num_workers=0."
            )
        ]


def refusals() -> list[str]:
    options: dict[str, Any] = {"batch_size": 2, "shuffle": True, "seed": 1}
    made = loader(dp(), Noisy(8), options)
    others = [
        loader(dp(), Noisy(9), {**options, "seed": 2}),
        loader(dp(), Counting(8), {"batch_size": 2}),
        made,
    ]
    states = [made.state_dict(), made.state_dict(), {"at": 3}]
    found = []
    for other, state in zip(others, states, strict=True):
        try:
            other.load_state_dict(state)
        except DataError as error:
            found.append(str(error))
    return found


@pytest.mark.ranks
def test_a_place_in_other_data_is_refused(world2: World) -> None:
    head = "a place in other data was to be taken up, where samples would be lost or seen again:\n"
    tail = (
        "\n\nMake the loader as it was when the place was saved, or load without it: "
        "boosted.load_(directory, kinds=...) without 'attached'."
    )
    for found in world2.run(refusals):
        assert found == [
            f"{head}  samples: 8 then, 9 now\n  seed: 1 then, 2 now{tail}",
            f"{head}  workers: None then, 0 now\n  drop_last: False then, False now\n"
            f"  samples: 8 then, None now\n  shuffle: True then, None now\n"
            f"  seed: 1 then, None now{tail}".replace("  drop_last: False then, False now\n", ""),
            (
                "a RowLoader was given a state that is none of a loader: KeyError: "
                "'epoch'.\n\nGive "
                "what its state_dict() returned."
            ),
        ]


@pytest.mark.ranks
def test_with_tensor_groups_and_changed_batch_size(world4: World) -> None:
    rules: Any = {"**": "replicate"}
    first = {"batch_size": 2, "shuffle": True}
    transform = tp(2, rules=rules)

    def run(state: Any) -> Any:
        model = nn.Sequential(nn.Linear(1, 1))
        from parallax import compose

        pair = compose(transform, zero(2))(model)
        made = pair.loader(
            Noisy(LENGTH), **(first if state is None else {**first, "batch_size": 4})
        )
        if state is None:
            batches = [b.tolist() for _, b in zip(range(3), made, strict=False)]
            return batches, made.state_dict()
        made.load_state_dict(state)
        return [b.tolist() for b in made], None

    read = world4.run(run, None)
    assert read[0][1]["samples"] == 6
    rest = world4.run(run, read[0][1])
    whole = joined(joined(pool(1).run(through, dp(), Noisy(LENGTH), first, 1)[0]))
    both = together([read[0][0], read[2][0]]) + together([rest[0][0], rest[2][0]])
    assert [row[0] for row in both] == [row[0] for row in whole]
