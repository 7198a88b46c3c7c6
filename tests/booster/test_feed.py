"""Loaders that Booster hands out: who reads what, and what cannot be cut over the ranks."""

from __future__ import annotations

import itertools
from collections import UserDict
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, WeightedRandomSampler

from parallax import DataError, MeshError, OptimizerError, StepError, Transform, compose, tp, zero
from parallax.booster import Booster
from parallax.booster.feed import Feed, Whole, rebuilding_fault
from parallax.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from parallax.testing import World, toys

ZERO2 = LowLevelZeroPlugin(stage=2, precision="fp32")
HALVES = compose(tp(2), zero(2))


def pair() -> tuple[nn.Module, SGD]:
    torch.manual_seed(0)
    model = toys.Gpt()
    return model, SGD(model.parameters(), lr=0.1)


def read(plugin: Transform, rows: int, epochs: int = 1, **options: Any) -> list[list[list[int]]]:
    """This rank's samples by epoch and batch, through boost."""
    model, optimizer = pair()
    loader: Any = DataLoader(list(range(rows)), batch_size=4, **options)
    *_, feed, _ = Booster(plugin=plugin).boost(model, optimizer, dataloader=loader)
    assert isinstance(feed, DataLoader)
    assert len(feed) == len(loader)
    return [[batch.tolist() for batch in feed] for _ in range(epochs)]


def flat(rows: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(rows))


def merged(results: list[list[list[list[int]]]]) -> list[list[list[int]]]:
    """Global batches by epoch out of what the data ranks read."""
    epochs = zip(*results, strict=True)
    return [[flat(parts) for parts in zip(*ranks, strict=True)] for ranks in epochs]


@pytest.mark.ranks
def test_a_plain_loader_is_cut_over_the_data_ranks(world2: World, world4: World) -> None:
    plain = [batch.tolist() for batch in DataLoader(list(range(11)), batch_size=4)]
    assert merged(world2.run(read, ZERO2, 11)) == [plain]
    assert merged(world2.run(read, ZERO2, 11, drop_last=True)) == [plain[:-1]]
    halves = world4.run(read, HALVES, 11)
    assert halves[0] == halves[1]
    assert halves[2] == halves[3]
    assert merged(halves[::2]) == [plain]


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [0, 1])
def test_shuffled_batches_are_one_order_cut(workers: int, world2: World) -> None:
    order: dict[str, Any] = {
        "shuffle": True,
        "generator": torch.Generator().manual_seed(5),
        "num_workers": workers,
    }
    two = merged(world2.run(read, ZERO2, 8, 2, **order))
    one = merged([read(compose(), 8, 2, **order)])
    assert two == one
    assert two[0] != two[1]
    assert [sorted(flat(epoch)) for epoch in two] == [list(range(8))] * 2


def shuffled_after(seed: int) -> list[list[list[int]]]:
    torch.manual_seed(seed + torch.distributed.get_rank())
    model, optimizer = pair()
    torch.manual_seed(
        seed + torch.distributed.get_rank()
    )  # ranks are seeded differently on purpose
    loader = DataLoader(list(range(8)), batch_size=4, shuffle=True)
    *_, feed, _ = Booster(plugin=ZERO2).boost(model, optimizer, dataloader=loader)
    return [[batch.tolist() for batch in feed]]


@pytest.mark.ranks
def test_an_order_without_a_generator_follows_the_seed_of_rank_0(world2: World) -> None:
    first, again, other = (merged(world2.run(shuffled_after, seed)) for seed in (1, 1, 7))
    assert first == again != other
    assert sorted(flat(first[0])) == list(range(8))


def prepared(plugin: Any, rows: int, **options: Any) -> Any:
    feed = plugin.prepare_dataloader(list(range(rows)), batch_size=2, **options)
    first = [batch[: feed.rows].tolist() for batch in feed]
    feed.sampler.set_epoch(0)
    again = [batch[: feed.rows].tolist() for batch in feed]
    return first, again, feed.batch_sampler.batch_size


@pytest.mark.ranks
def test_a_prepared_loader_has_a_batch_size_for_each_rank(world2: World) -> None:
    results = world2.run(prepared, ZERO2, 9, shuffle=True, seed=3)
    assert [size for *_, size in results] == [4, 4]
    assert [first for first, *_ in results] == [again for _, again, _ in results]
    assert sorted(x for first, *_ in results for batch in first for x in batch) == list(range(9))
    other = world2.run(prepared, ZERO2, 9, shuffle=True, seed=4)
    assert [first for first, *_ in other] != [first for first, *_ in results]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(11)


def stream() -> list[list[int]]:
    model, optimizer = pair()
    loader = DataLoader(Stream(), batch_size=4)
    *_, feed, _ = Booster(plugin=ZERO2).boost(model, optimizer, dataloader=loader)
    assert feed.uneven
    return [batch.tolist() for batch in feed]


@pytest.mark.ranks
def test_a_stream_is_cut_too(world2: World) -> None:
    parts = world2.run(stream)
    assert parts == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]]


def encode(rows: list[int]) -> UserDict[str, Tensor]:
    return UserDict(ids=torch.tensor(rows))


def counted() -> list[int]:
    feed: Any = ZERO2.prepare_dataloader(list(range(9)), batch_size=2, collate_fn=encode)  # type: ignore[attr-defined]
    counts = []
    for batch in feed:
        assert isinstance(batch, UserDict)
        assert len(batch["ids"]) == max(feed.rows, 1)
        counts.append(feed.rows)
    return counts


@pytest.mark.ranks
def test_samples_are_counted_whatever_the_batch_is(world2: World) -> None:
    assert world2.run(counted) == [[2, 2, 1], [2, 2, 0]]


def uneven(rows: int, **options: Any) -> bool:
    return ZERO2.prepare_dataloader(list(range(rows)), 2, **options).uneven  # type: ignore[attr-defined]


@pytest.mark.ranks
def test_batches_are_weighed_only_where_they_differ(world2: World) -> None:
    assert world2.run(uneven, 9) == [True, True]
    assert world2.run(uneven, 10) == [False, False]  # a tail of 1 + 1
    assert world2.run(uneven, 9, drop_last=True) == [False, False]
    assert uneven(9) is False  # a world of one


REMEDY = (
    ".\n\nGive a plain DataLoader(dataset, batch_size, shuffle=...), whose batches are then the "
    "global ones, or one made by plugin.prepare_dataloader(dataset, batch_size, ...); or leave it "
    "out and cut each global batch with booster.boosted(model).shard(batch)."
)
ROWS = list(range(8))


class Loader(DataLoader[Any]):
    pass


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([1, 2], "a builtins.list, whose order parallax does not know"),
        (
            Loader(ROWS),
            f"a {Loader.__module__}.Loader, whose order parallax does not know",
        ),
        (
            DataLoader(ROWS, batch_size=None),
            "a DataLoader with batch_size=None, whose batches parallax cannot cut",
        ),
        (
            DataLoader(ROWS, batch_sampler=[[0, 1], [2]]),
            (
                "a DataLoader with a batch_sampler of its own (list), whose batches parallax "
                "cannot cut"
            ),
        ),
        (
            DataLoader(ROWS, sampler=DistributedSampler(ROWS, num_replicas=2, rank=0)),
            "a DataLoader with a DistributedSampler, which has already chosen what each rank reads",
        ),
        (
            DataLoader(ROWS, sampler=WeightedRandomSampler([1.0] * 8, 8)),
            "a DataLoader with a WeightedRandomSampler, whose order parallax does not know",
        ),
        (
            DataLoader(ROWS, sampler=torch.utils.data.RandomSampler(ROWS, replacement=True)),
            "a DataLoader that draws with replacement, or not each sample once an epoch",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(given: Any, found: str) -> None:
    fault = rebuilding_fault(given)
    assert str(fault) == f"boost was given as dataloader {found}{REMEDY}"
    model, optimizer = pair()
    with pytest.raises(DataError) as caught:
        Booster(plugin=TorchDDPPlugin()).boost(model, optimizer, dataloader=given)
    assert str(caught.value) == str(fault)
    TorchDDPPlugin()(model, optimizer)  # nothing was changed: it can be boosted still


def message(kind: type[Exception], call: Any) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was refused")


def boost_refusals() -> list[str]:
    model, optimizer = pair()
    booster = Booster(plugin=ZERO2)
    odd = DataLoader(ROWS, batch_size=3)
    other = TorchDDPPlugin().prepare_dataloader(ROWS, 2)
    _, elsewhere = pair()
    scheduler = StepLR(elsewhere, 1)
    found = [
        message(DataError, lambda: booster.boost(model, optimizer, dataloader=odd)),
        message(MeshError, lambda: booster.boost(model, optimizer, dataloader=other)),
        message(OptimizerError, lambda: booster.boost(model, optimizer, lr_scheduler=scheduler)),
        message(MeshError, lambda: Booster("cuda", plugin=ZERO2).boost(model, optimizer)),
        message(DataError, lambda: ZERO2.prepare_dataloader(ROWS, 2, distributed_sampler_cls=int)),
        message(StepError, lambda: booster.backward(torch.zeros(()), optimizer)),
        message(StepError, booster.no_sync),
    ]
    booster.boost(model, optimizer)  # nothing was changed
    return found


@pytest.mark.ranks
def test_what_boost_refuses(world2: World) -> None:
    results = world2.run(boost_refusals)
    assert results[0] == results[1]
    assert results[0] == [
        (
            "a global batch of 3 samples cannot be shared by 2 data ranks (data_replicate x "
            "data_shard).\n\nUse a multiple of 2: 2 or 4."
        ),
        (
            "the dataloader was prepared for other data ranks than those of compose(fp32, "
            "zero(2)).\n\nPrepare it with the plugin that the Booster was given."
        ),
        (
            "boost was given a StepLR that steps another optimizer.\n\n"
            "Give the optimizer that the scheduler was made on."
        ),
        (
            "Booster was given device='cuda', and this rank computes on cpu.\n\nLeave device out: "
            "it follows from the process group, which launch(backend=...) makes."
        ),
        (
            "prepare_dataloader was given distributed_sampler_cls=<class 'int'>, and what each "
            "rank reads follows from the mesh.\n\nLeave it out and use shuffle= and seed=; "
            "loader.batch_sampler.set_epoch(n, skip=k) continues within an epoch."
        ),
        (
            "Booster was asked about a SGD that it did not boost.\n\nPass the model or the "
            "optimizer that boost returned."
        ),
        (
            "Booster was asked about neither a model nor an optimizer.\n\n"
            "Pass one that boost returned."
        ),
    ]


def different() -> str:
    plugin = ZERO2 if torch.distributed.get_rank() else TorchDDPPlugin()
    return message(StepError, lambda: plugin.prepare_dataloader(ROWS, 2))


@pytest.mark.ranks
def test_ranks_with_different_plugins_are_told(world2: World) -> None:
    assert world2.run(different) == 2 * [
        (
            "the ranks prepare data for different compositions:\n"
            "  rank 0: dp()\n  rank 1: compose(fp32, zero(2))\n\nBuild the same plugin on every "
            "rank."
        )
    ]


def of_something_else() -> str:
    model, optimizer = pair()
    booster = Booster(plugin=ZERO2)
    loader = DataLoader(toys.tokens(9)["tokens"], batch_size=4)  # type: ignore[arg-type]
    model, optimizer, _, feed, _ = booster.boost(model, optimizer, dataloader=loader)
    next(iter(feed))
    loss = model(toys.tokens(5)["tokens"]).mean()
    text = message(StepError, lambda: booster.backward(loss, optimizer))
    booster.backward(loss, optimizer, rows=5)  # the remedy
    optimizer.step()
    Feed.latest = None
    return text


@pytest.mark.ranks
def test_a_batch_from_elsewhere_cannot_be_weighed(world2: World) -> None:
    assert world2.run(of_something_else) == 2 * [
        (
            "the loader's batches hold 2 samples on this rank, and the model ran on tensors whose "
            "first dims are 5. The last batch holds different numbers on different ranks, so the "
            "loss must be weighed, and it cannot be told by what.\n\nSay how many samples the loss "
            "is the mean of, which dataloader.rows holds when a batch is taken: "
            "booster.backward(loss, optimizer, rows=...); or leave the short batch out with "
            "drop_last=True."
        )
    ]


def ahead_of_one_row() -> str:
    model, optimizer = pair()
    booster = Booster(plugin=ZERO2)
    loader = DataLoader(toys.tokens(3)["tokens"], batch_size=2)  # type: ignore[arg-type]
    model, optimizer, _, feed, _ = booster.boost(model, optimizer, dataloader=loader)
    first, second = feed  # fetched ahead: the second stands in on rank 1
    loss = model(first).mean()
    text = ""
    if torch.distributed.get_rank():
        text = message(StepError, lambda: booster.backward(loss, optimizer))
        booster.backward(loss, optimizer, rows=1)
    else:
        booster.backward(loss, optimizer)
    optimizer.zero_grad()
    for batch in feed:  # one after the other, it can be told
        booster.backward(model(batch).mean(), optimizer)
    assert feed.rows == 1 - torch.distributed.get_rank()
    assert len(second) == 1
    Feed.latest = None
    return text


@pytest.mark.ranks
def test_a_row_that_may_stand_in_is_not_guessed_at(world2: World) -> None:
    texts = world2.run(ahead_of_one_row)
    assert texts[1] == (
        "the model ran on one row, and the loader had yielded another batch before: it cannot be "
        "told whether the row is a sample or stands in on a rank without one.\n\nSay how many "
        "samples the loss is the mean of, which dataloader.rows holds when a batch is taken: "
        "booster.backward(loss, optimizer, rows=...); or leave the short batch out with "
        "drop_last=True."
    )


BATCHNORM = (
    "the last global batch may hold fewer samples than there are data ranks, and body.1 would "
    "count the rows that stand in for them in its batch's statistics.\n\nUse drop_last=True, or a "
    "batch size that leaves a longer rest."
)


def statistics() -> list[str]:
    model = toys.ConvNet()
    optimizer = SGD(model.parameters(), lr=0.1)
    booster = Booster(plugin=ZERO2)
    images, labels = toys.images(5)
    rows = list(zip(images, labels, strict=True))
    loader = DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
    found = [message(DataError, lambda: booster.boost(model, optimizer, dataloader=loader))]
    prepared = ZERO2.prepare_dataloader(rows, 2)
    booster.boost(model, optimizer)  # nothing was changed; a prepared loader need not be given
    loss = nn.functional.cross_entropy(model(next(iter(prepared))[0]), labels[:2])
    found.append(message(DataError, lambda: booster.backward(loss, optimizer)))
    Feed.latest = None
    return found


@pytest.mark.ranks
def test_statistics_over_rows_that_stand_in_are_refused(world2: World) -> None:
    assert world2.run(statistics) == 2 * [[BATCHNORM, BATCHNORM]]


@pytest.mark.parametrize("make", [dict, UserDict, lambda pairs: list(dict(pairs).values())])
def test_pinning_reaches_every_tensor(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self + 1)
    pinned = Whole(make({"a": torch.zeros(2), "b": "text"})).pin_memory().batch
    values = list(pinned) if isinstance(pinned, list) else list(pinned.values())
    assert type(pinned) is type(make({}))
    assert values[0].tolist() == [1, 1]
    assert values[1] == "text"


def test_a_model_without_a_loss_needs_a_criterion() -> None:
    model, optimizer = pair()
    *_, criterion, _, _ = Booster().boost(model, optimizer)
    assert criterion is not None
    with pytest.raises(StepError) as caught:
        criterion(model(toys.tokens(2)["tokens"]))
    assert str(caught.value) == (
        "the model returned a Tensor without a loss, and boost was given no criterion.\n\n"
        "Give one: booster.boost(model, optimizer, criterion=...)."
    )


def test_what_comes_later_says_so() -> None:
    booster = Booster()
    found = [
        message(ValueError, lambda: booster.execute_pipeline(iter(()), nn.Linear(1, 1), print)),  # type: ignore[arg-type]
        message(ValueError, lambda: booster.enable_lora(nn.Linear(1, 1), quantize=True)),
        message(ValueError, lambda: booster.save_lora_as_pretrained(nn.Linear(1, 1), "adapter")),
    ]
    assert found == [
        (
            "execute_pipeline was called, and pipelines are not there yet.\n\nCall the model and "
            "booster.backward(loss, optimizer) until then."
        ),
        (
            "enable_lora was called, and LoRA is not there yet.\n\nFreeze parameters with "
            "requires_grad_(False) until then; frozen parameters take no optimizer state."
        ),
        (
            "save_lora_as_pretrained was called, and LoRA is not there yet.\n\nSave the whole "
            "model with save_model until then."
        ),
    ]
