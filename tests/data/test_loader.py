"""The loader: all samples once, the same global batches for any number of ranks, honest tails."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from parallax import DataError, Transform, compose, dp, tp, zero
from parallax.data.rows import GlobalBatches
from parallax.testing import World, pool

Rows = list[list[int]]


def joined(rows: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(rows))


def batches(samples: int, size: int, ranks: int, **options: Any) -> list[Rows]:
    """Each rank's parts."""
    return [
        list(GlobalBatches(samples, size, ranks=ranks, rank=r, **options)) for r in range(ranks)
    ]


@given(
    samples=st.integers(1, 60),
    ranks=st.integers(1, 5),
    times=st.integers(1, 4),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**31),
    drop_last=st.booleans(),
)
def test_parts_make_up_the_dataset(
    samples: int, ranks: int, times: int, shuffle: bool, seed: int, drop_last: bool
) -> None:
    size = ranks * times
    options = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    parts = batches(samples, size, ranks, **options)
    (alone,) = batches(samples, size, 1, **options)
    together = [joined(rows) for rows in zip(*parts, strict=True)]
    assert together == alone  # no number of ranks changes a global batch
    seen = joined(alone)
    kept = samples - samples % size if drop_last else samples
    assert len(seen) == len(set(seen)) == kept
    assert set(seen) <= set(range(samples))
    assert (sorted(seen) == seen) or shuffle
    assert all(len(row) == size for row in alone[:-1])
    for rows in zip(*parts, strict=True):
        lengths = list(map(len, rows))
        assert max(lengths) - min(lengths) <= 1
        assert lengths == sorted(lengths, reverse=True)
    assert all(len(part) == len(alone) for part in parts)
    sampler = GlobalBatches(samples, size, ranks=ranks, rank=0, **options)
    assert len(sampler) == len(alone)


@given(st.integers(8, 60), st.integers(0, 2**40))
def test_the_seed_is_honoured_and_epochs_reshuffle(samples: int, seed: int) -> None:
    def epochs(seed: int, shuffle: bool = True) -> list[Rows]:
        sampler = GlobalBatches(samples, 4, ranks=1, rank=0, shuffle=shuffle, seed=seed)
        return [list(sampler) for _ in range(3)]

    first = epochs(seed)
    assert first == epochs(seed)
    assert first[0] != first[1] != first[2] != first[0]
    assert first != epochs(seed + 1)
    assert all(sorted(joined(epoch)) == list(range(samples)) for epoch in first)
    still = epochs(seed, shuffle=False)
    assert still[0] == still[1] == still[2]


@given(st.integers(0, 5), st.integers(0, 4))
def test_an_epoch_can_be_taken_up_in_the_middle(epoch: int, skip: int) -> None:
    def fresh() -> GlobalBatches:
        return GlobalBatches(18, 4, ranks=2, rank=1, shuffle=True, seed=3)

    sampler, other = fresh(), fresh()
    for _ in range(epoch):
        list(sampler)
    whole = list(sampler)
    other.set_epoch(epoch, skip=skip)
    assert list(other) == whole[skip:]
    assert list(other) == list(sampler)  # the next epoch is whole again


# -- on ranks --------------------------------------------------------------------------------------


class Squares(Dataset[Any]):
    """Samples that say which they are, and which worker made them."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        worker = get_worker_info()
        return {"x": torch.tensor(float(index)), "i": index, "w": worker.id if worker else -1}


class Stream(IterableDataset[Any]):
    """A stream that shares itself out to workers, as torch asks for."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        start, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for i in range(start, self.length, step):
            yield torch.tensor(i)


def boosted(transform: Transform) -> Any:
    return transform(nn.Linear(1, 1))


def read(transform: Transform, dataset: Any, epochs: int, options: dict[str, Any]) -> list[Any]:
    """What this rank reads, epoch by epoch, batch by batch."""
    loader = boosted(transform).loader(dataset, **options)

    def numbers(batch: Any) -> list[int]:
        rows = batch["i"] if isinstance(batch, dict) else batch
        return rows.tolist()

    return [[numbers(b) for b in loader] for _ in range(epochs)]


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [0, 2])
def test_all_ranks_together_read_the_dataset(workers: int, world2: World, world4: World) -> None:
    options = {"batch_size": 4, "shuffle": True, "seed": 5, "num_workers": workers}
    (alone,) = pool(1).run(read, dp(), Squares(13), 2, options)
    for ranks in (world2, world4):
        parts = ranks.run(read, zero(2), Squares(13), 2, options)
        together = [
            [joined(p[e][b] for p in parts) for b in range(len(alone[e]))] for e in range(2)
        ]
        assert together == alone
    assert alone[0] != alone[1]
    assert all(sorted(joined(epoch)) == list(range(13)) for epoch in alone)
    assert [len(p[0][-1]) for p in parts] == [1, 0, 0, 0]


@pytest.mark.ranks
def test_ranks_of_one_tensor_group_read_the_same(world4: World) -> None:
    rules = tp(2, rules={"**": "replicate"})

    def both() -> list[Any]:
        model = nn.Sequential(nn.Linear(1, 1))
        loader = compose(rules, zero(2))(model).loader(Squares(8), batch_size=4)
        return [b["i"].tolist() for b in loader]

    rows = world4.run(both)
    assert rows[0] == rows[1] == [[0, 1], [4, 5]]
    assert rows[2] == rows[3] == [[2, 3], [6, 7]]


def shapes_of_tail(transform: Transform) -> list[dict[str, tuple[tuple[int, ...], str]]]:
    loader = boosted(transform).loader(Squares(5), batch_size=4)
    return [{k: (tuple(v.shape), str(v.dtype)) for k, v in b.items()} for b in loader]


@pytest.mark.ranks
def test_an_empty_part_has_the_structure_of_a_batch(world4: World) -> None:
    rows = world4.run(shapes_of_tail, dp())
    for rank, (whole, tail) in enumerate(rows):
        assert {k: dtype for k, (_, dtype) in whole.items()} == {
            k: dtype for k, (_, dtype) in tail.items()
        }
        assert {shape for shape, _ in whole.values()} == {(1,)}
        assert {shape for shape, _ in tail.values()} == {(int(rank == 0),)}


def train_over(dataset_length: int, options: dict[str, Any]) -> tuple[list[float], float]:
    torch.manual_seed(0)
    model = nn.Linear(1, 1).double()
    pair = dp()(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    losses = [
        float(pair.train_step(lambda m, b: m(b["x"][:, None].double()).square().mean(), batch))
        for batch in pair.loader(Squares(dataset_length), **options)
    ]
    return losses, float(model.weight.detach().full_tensor())


@pytest.mark.ranks
def test_an_epoch_with_tails_trains_like_one_process(world4: World) -> None:
    options = {"batch_size": 4, "shuffle": True, "seed": 1}
    ((losses, weight),) = pool(1).run(train_over, 9, options)
    assert len(losses) == 3
    for mine, theirs in world4.run(train_over, 9, options):
        # float64, sums in another order, losses of size 10 to 100.
        assert mine == pytest.approx(losses, rel=1e-12)
        assert theirs == pytest.approx(weight, rel=1e-12)


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("length", [8, 11])
def test_streams_are_read_once(length: int, workers: int, world2: World) -> None:
    options = {"batch_size": 4, "num_workers": workers}
    parts = world2.run(read, dp(), Stream(length), 2, options)
    assert [len(p[0]) for p in parts] == [len(parts[0][0])] * 2
    for epoch in range(2):
        assert sorted(joined(joined(p[epoch]) for p in parts)) == list(range(length))
        for rows in zip(*(p[epoch] for p in parts), strict=True):
            assert 0 <= len(rows[0]) - len(rows[1]) <= 1


@pytest.mark.ranks
def test_streams_drop_their_tail_when_asked(world2: World) -> None:
    options = {"batch_size": 4, "drop_last": True}
    parts = world2.run(read, dp(), Stream(11), 1, options)
    assert [p[0] for p in parts] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.ranks
def test_workers_share_a_stream_that_ends_unevenly(world2: World) -> None:
    """Eight samples over three workers: global batches of four exist only across workers."""
    options = {"batch_size": 4, "num_workers": 3}
    parts = world2.run(read, dp(), Stream(8), 1, options)
    assert sorted(joined(joined(p[0]) for p in parts)) == list(range(8))
    sizes = [sum(map(len, rows)) for rows in zip(*(p[0] for p in parts), strict=True)]
    assert sum(sizes) == 8


class Augmented(Squares):
    """Samples with random numbers in them."""

    def __getitem__(self, index: int) -> Any:
        return torch.rand(())


def augmented(transform: Transform) -> list[float]:
    rules = {"**": "replicate"}
    model = nn.Sequential(nn.Linear(1, 1))
    pair = compose(transform, tp(2, rules=rules))(model)
    return torch.cat(list(pair.loader(Augmented(8), batch_size=4, num_workers=2))).tolist()


@pytest.mark.ranks
def test_workers_of_one_tensor_group_draw_alike_and_of_others_differently(world4: World) -> None:
    rows = world4.run(augmented, dp())
    assert rows[0] == rows[1] != rows[2] == rows[3]
    assert len({*rows[0], *rows[2]}) == 8


def options_pass() -> tuple[list[int], str]:
    def collate(rows: list[Any]) -> Tensor:
        return torch.tensor([r["i"] for r in rows])

    loader = boosted(dp()).loader(Squares(4), batch_size=2, collate_fn=collate, num_workers=1)
    with_more = boosted(dp()).loader(
        Squares(4), batch_size=2, num_workers=1, persistent_workers=True, prefetch_factor=3
    )
    more = f"{with_more.persistent_workers} {with_more.prefetch_factor}"
    return [int(i) for b in loader for i in b], more


@pytest.mark.ranks
def test_options_of_torchs_loader_pass(world2: World) -> None:
    rows = world2.run(options_pass)
    assert [row[0] for row in rows] == [[0, 2], [1, 3]]
    assert {row[1] for row in rows} == {"True 3"}


# -- refusals --------------------------------------------------------------------------------------


def refusal(make: Callable[[Any], Any]) -> str:
    try:
        make(boosted(zero(2)))
    except DataError as error:
        return str(error)
    return "nothing was raised"


class Lazy:
    """Neither map-style nor a stream."""


CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "stream shuffled": (
        lambda b: b.loader(Stream(4), batch_size=2, shuffle=True),
        (
            "shuffle=True was asked for Stream, which is iterable-style and has no order to "
            "draw.\n\nShuffle inside the dataset, or use a map-style dataset."
        ),
    ),
    "no length": (
        lambda b: b.loader(Lazy(), batch_size=2),
        (
            "the dataset is a Lazy without a length.\n\nGive it __len__ and __getitem__ "
            "(map-style), or derive it from torch.utils.data.IterableDataset."
        ),
    ),
    "nothing left": (
        lambda b: b.loader(Squares(3), batch_size=4, drop_last=True),
        (
            "drop_last=True leaves no batch: 3 samples are fewer than one global batch of 4.\n\n"
            "Use drop_last=False or a batch size of at most 2."
        ),
    ),
    "own sampler": (
        lambda b: b.loader(Squares(4), batch_size=2, sampler=[0], generator=None),
        (
            "loader was given generator, sampler, which decides what each rank reads.\n\nLeave it "
            "out and use shuffle= and seed=, or build a torch DataLoader and cut each global "
            "batch with boosted.shard."
        ),
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", list(CASES))
def test_what_does_not_fit_is_named(name: str, world2: World) -> None:
    make, text = CASES[name]
    assert world2.run(refusal, make) == [text] * 2


@pytest.mark.ranks
def test_the_largest_batch_size_that_is_named_works(world2: World) -> None:
    """Three samples on two ranks: a batch of three would not be shared evenly."""
    (text, _) = world2.run(refusal, CASES["nothing left"][0])
    size = int(text.rpartition("at most ")[2].rstrip("."))
    make = lambda b: b.loader(Squares(3), batch_size=size, drop_last=True)  # noqa: E731
    assert world2.run(refusal, make) == ["nothing was raised"] * 2


def test_tensor_datasets_work() -> None:
    def numbers() -> list[list[int]]:
        data = TensorDataset(torch.arange(5), torch.arange(5))
        return [x.tolist() for x, _ in boosted(dp()).loader(data, batch_size=2)]

    assert pool(1).run(numbers) == [[[0, 1], [2, 3], [4]]]
