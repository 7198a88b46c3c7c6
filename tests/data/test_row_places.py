"""Map-style places beyond the plain case: subsets, tails, lasting workers, a user's own seeds."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, get_worker_info

from parallax import DataError, dp
from parallax.data.place import Place
from parallax.data.rows import GlobalBatches, Rows
from parallax.testing import World, pool

pytestmark = pytest.mark.ranks

Options = dict[str, Any]


class Noisy(Dataset[Any]):
    """Samples with random numbers in them."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), float(torch.rand(()))], dtype=torch.float64)


class InBatches(Noisy):
    """The same, a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[i] for i in indices]


def loader(dataset: Any, options: Options) -> Any:
    return dp()(nn.Linear(1, 1)).loader(dataset, **options)


def samples(dataset: Any, options: Options) -> list[list[float]]:
    return [row for batch in loader(dataset, options) for row in batch.tolist()]


OPTIONS: Options = {"batch_size": 4, "shuffle": True, "seed": 3, "num_workers": 1}


def test_samples_of_a_subset_have_noise_of_their_own(world2: World) -> None:
    """torch's Subset reads batches at once, which would tie the noise to how a batch is cut."""
    subset = Subset(Subset(Noisy(30), range(20)), range(5, 17))
    (alone,) = pool(1).run(samples, subset, OPTIONS)
    parts = world2.run(samples, subset, OPTIONS)
    assert sorted(parts[0] + parts[1]) == sorted(alone)


def test_noise_of_batches_read_at_once_is_tied_to_the_cut(world2: World) -> None:
    """What the documentation says, and why subsets are looked through."""
    (alone,) = pool(1).run(samples, InBatches(12), OPTIONS)
    parts = world2.run(samples, InBatches(12), OPTIONS)
    assert sorted(r[0] for r in parts[0] + parts[1]) == sorted(r[0] for r in alone)
    assert sorted(parts[0] + parts[1]) != sorted(alone)
    assert pool(1).run(samples, InBatches(12), {**OPTIONS, "num_workers": 2}) == [alone]


def test_a_tail_too_short_for_the_new_batch_size_ends_the_epoch() -> None:
    def run() -> tuple[Place, list[float], Place]:
        options = {"batch_size": 2, "drop_last": True}
        first = loader(Noisy(11), options)
        iterator = iter(first)
        for _ in range(4):
            next(iterator)
        then = loader(Noisy(11), {**options, "batch_size": 4})
        then.load_state_dict(first.state_dict())
        place = then.place
        return place, [row[0] for row in next(iter(then)).tolist()], then.place

    assert pool(1).run(run) == [(Place(1, 0), [0.0, 1.0, 2.0, 3.0], Place(1, 4))]


def test_a_whole_batch_after_the_place_is_no_tail() -> None:
    batches = GlobalBatches(11, 4, ranks=1, rank=0, drop_last=True)
    batches.place = Place(0, 4)
    assert list(batches) == [[4, 5, 6, 7]]


@pytest.mark.parametrize("options", [{"persistent_workers": True}, {"prefetch_factor": 5}, {}])
def test_workers_resume_in_place_and_anew(options: Options) -> None:
    """The same loader, and a new one, go on after a batch exactly, into the next epochs."""

    def run() -> list[bool]:
        given = {**OPTIONS, "num_workers": 2, **options}
        made = loader(Noisy(14), given)
        whole = [batch.tolist() for _ in range(3) for batch in made]
        found = []
        for stop in (2, 4, 5):
            made = loader(Noisy(14), given)
            read: list[Any] = []
            while len(read) < stop:
                for batch in made:
                    read.append(batch.tolist())
                    if len(read) == stop:
                        break
            state = made.state_dict()
            anew = loader(Noisy(14), given)
            for other in (made, anew):
                other.load_state_dict(state)
                rest = list(read)
                while len(rest) < len(whole):
                    rest += [batch.tolist() for batch in other]
                found.append(rest == whole)
        return found

    assert pool(1).run(run) == [[True] * 6]


class Seeded(Noisy):
    """Tells what a worker's own start was."""

    own: Any = None

    def __getitem__(self, index: int) -> Tensor:
        worker = get_worker_info()
        assert worker is not None
        return torch.tensor([worker.id, worker.seed, Seeded.own])


def start(worker: int) -> None:
    Seeded.own = torch.initial_seed()


def test_a_workers_own_start_sees_its_own_seed(world2: World) -> None:
    options = {**OPTIONS, "num_workers": 2, "worker_init_fn": start}
    found = world2.run(samples, Seeded(16), options)
    rows = {tuple(row) for part in found for row in part}
    assert all(seed == own for _, seed, own in rows)
    assert len({own for _, _, own in rows}) == len(rows) == 4  # of each rank and worker another


def test_an_old_iterator_counts_no_more(world2: World) -> None:
    def run() -> tuple[int, int, int]:
        made = loader(Noisy(12), {"batch_size": 2})
        old = iter(made)
        next(old)
        saved = made.state_dict()
        next(old)
        made.load_state_dict(saved)
        next(old)
        before = made.place.samples
        next(iter(made))
        return saved["samples"], before, made.place.samples

    assert world2.run(run) == [(2, 2, 4)] * 2


def test_no_worker_outlives_its_iteration() -> None:
    def run() -> list[int]:
        made = loader(Noisy(16), {**OPTIONS, "num_workers": 2})
        counts = []
        iterator = iter(made)
        next(iterator)
        counts.append(len(multiprocessing.active_children()))
        made.load_state_dict(made.state_dict())
        list(iterator)
        counts.append(len(multiprocessing.active_children()))
        return counts

    assert pool(1).run(run) == [[2, 0]]


def test_batches_out_of_order_are_refused() -> None:
    def run() -> str:
        try:
            loader(Noisy(8), {**OPTIONS, "in_order": False})
        except DataError as error:
            return str(error)
        return "nothing was raised"

    (said,) = pool(1).run(run)
    assert said == (
        "loader was given in_order=False, under which each rank takes batches as its own workers "
        "finish them; ranks would train on parts of different global batches, and no place in the "
        "data could be told.\n\nLeave it out."
    )


def test_subsets_are_looked_through() -> None:
    """In this process nothing is seeded: a sample is what the dataset makes of its generators."""
    rows = Rows(Subset(Noisy(10), [7, 3]), seed=0)
    torch.manual_seed(0)
    part = rows.__getitems__([0, 1])
    torch.manual_seed(0)
    assert [row.tolist() for row in part.samples] == [[i, float(torch.rand(()))] for i in (7, 3)]
