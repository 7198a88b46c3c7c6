"""Loops as scripts for ColossalAI write them train as one process on the global batches does.

A bound on float32 runs is measured: the one-process loop is run in float32 and in float64. Several
ranks add the same numbers up in another order, which rounds as much again, so they may be off by a
small multiple of the distance between the two.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import parallax
from parallax import Transform, bf16, compose, dp, tp, zero
from parallax.booster import Booster
from parallax.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from parallax.testing import World, toys

SUMMING_ORDERS = 8.0


class Scored(toys.Gpt):
    """A model that returns its own loss, as transformers' models do."""

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        tokens = tokens.view(len(tokens), -1)  # which torch refuses on no rows
        logits = super().forward(tokens)
        flat = logits.flatten(0, 1), targets.clamp(min=0).flatten()
        return {"loss": nn.functional.cross_entropy(*flat), "logits": logits}


def samples(rows: int) -> list[dict[str, Tensor]]:
    batch = toys.tokens(rows)
    return [{key: value[i] for key, value in batch.items()} for i in range(rows)]


def parts(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Optimizer, StepLR]:
    torch.manual_seed(3)
    model = Scored().to(dtype)
    optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    return model, optimizer, StepLR(optimizer, step_size=2, gamma=0.5)


def alone(rows: int, dtype: torch.dtype, epochs: int = 2) -> tuple[list[float], dict[str, Tensor]]:
    """The plain loop in this process: batches of four, in order."""
    model, optimizer, lr_scheduler = parts(dtype)
    losses = []
    for _ in range(epochs):
        for batch in DataLoader(samples(rows), batch_size=4):
            loss = model(**batch)["loss"]
            loss.backward()
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses, {name: p.detach().double() for name, p in model.named_parameters()}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def loop(plugin: Transform, rows: int, epochs: int = 2, *, prepare: bool = False) -> Any:
    """The same loop through a Booster, on every rank; the loss of each batch counts its rows."""
    model, optimizer, lr_scheduler = parts()
    booster = Booster(plugin=plugin)
    train_dataloader: Any = DataLoader(samples(rows), batch_size=4)
    if prepare:
        train_dataloader = plugin.prepare_dataloader(samples(rows), batch_size=2)  # type: ignore[attr-defined]

    model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(
        model=model, optimizer=optimizer, dataloader=train_dataloader, lr_scheduler=lr_scheduler
    )
    losses = []
    for _ in range(epochs):
        for batch in dataloader:
            outputs = model(**batch)
            loss = criterion(outputs)
            booster.backward(loss, optimizer)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            losses.append((float(loss.detach()), dataloader.rows))
    whole = booster.boosted(model).gather()
    return losses, whole and whole["params"]


def joined(results: list[Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Global losses out of every rank's means, and the weights that rank 0 gathered."""
    steps = zip(*(losses for losses, _ in results), strict=True)
    means = [
        sum(loss * rows for loss, rows in step if rows) / sum(rows for _, rows in step)
        for step in steps
    ]
    return means, results[0][1]


def check(results: list[Any], rows: int, world: int) -> None:
    wide, narrow = alone(rows, torch.float64), alone(rows, torch.float32)
    losses, weights = joined(results)
    bound = SUMMING_ORDERS * distance(narrow[1], wide[1])
    assert 0 < bound < 1e-4
    assert distance(weights, wide[1]) <= bound
    off = SUMMING_ORDERS * max(abs(a - b) for a, b in zip(narrow[0], wide[0], strict=True))
    assert losses == pytest.approx(wide[0], rel=0, abs=off)
    assert len(losses) == 2 * -(-rows // 4)


@pytest.mark.ranks
@pytest.mark.parametrize("rows", [8, 11, 9])  # even; tails of 2 + 1 and of 1 + 0 rows
def test_the_zero_loop_trains_as_one_process_does(rows: int, world2: World) -> None:
    plugin = LowLevelZeroPlugin(stage=2, precision="fp32")
    check(world2.run(loop, plugin, rows), rows, 2)


@pytest.mark.ranks
@pytest.mark.parametrize("rows", [8, 9])
def test_a_prepared_loader_trains_the_same(rows: int, world2: World) -> None:
    check(world2.run(loop, GeminiPlugin(precision="fp32"), rows, prepare=True), rows, 2)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "plugin", [TorchDDPPlugin(), TorchFSDPPlugin(), LowLevelZeroPlugin(precision="fp32")], ids=repr
)
def test_the_other_plugins_train_as_one_process_does(plugin: Transform, world2: World) -> None:
    check(world2.run(loop, plugin, 11), 11, 2)


@pytest.mark.ranks
@pytest.mark.parametrize("make", [HybridParallelPlugin, MoeHybridParallelPlugin])
def test_the_hybrid_loop_trains_as_one_process_does(make: Any, world4: World) -> None:
    experts = {} if make is HybridParallelPlugin else {"ep_size": 1}
    plugin = make(tp_size=2, pp_size=1, sp_size=1, zero_stage=1, precision="fp32", **experts)
    check(world4.run(loop, plugin, 11), 11, 4)


def half(plugin: Transform) -> tuple[list[bool], int, int]:
    """A loop in float16 whose scale overflows at first: updates made, and the scheduler's steps."""
    model, optimizer, lr_scheduler = parts()
    booster = Booster(plugin=plugin)
    model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(
        model, optimizer, None, DataLoader(samples(16), batch_size=4), lr_scheduler
    )
    made = []
    for _ in range(3):
        for batch in dataloader:
            booster.backward(criterion(model(**batch)), optimizer)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            made.append(booster.boosted(model).took_place)
    return made, booster.boosted(model).step, lr_scheduler.last_epoch


@pytest.mark.ranks
def test_fp16_is_the_default_and_skipped_updates_advance_no_scheduler(world2: World) -> None:
    plugin = LowLevelZeroPlugin(stage=2, initial_scale=2**20, max_norm=1.0)
    for made, step, epochs in world2.run(half, plugin):
        assert not made[0]
        assert made[-4:] == [True] * 4
        assert step == epochs == sum(made)


@pytest.mark.ranks
def test_the_examples_run_in_bf16(world2: World, world4: World) -> None:
    for world, plugin in (
        (world2, LowLevelZeroPlugin(stage=2, precision="bf16")),
        (world4, HybridParallelPlugin(2, 1, sp_size=1, zero_stage=1, precision="bf16")),
    ):
        losses, _ = joined(world.run(loop, plugin, 16, 4))
        assert losses[-1] < losses[0] - 0.1


def test_the_pipeline_example_says_that_pipelines_come_later() -> None:
    with pytest.raises(parallax.ParallaxError) as caught:
        HybridParallelPlugin(
            tp_size=2, pp_size=2, sp_size=1, zero_stage=1, precision="bf16", microbatch_size=4
        )
    assert str(caught.value) == (
        "HybridParallelPlugin was given pp_size=2, and pipelines are not there yet.\n\n"
        "Use pp_size=1 until then, with the ranks in tp_size or left to the data axis."
    )


def planted(plugin: Transform, rows: int) -> Any:
    from parallax.booster.pair import Pair

    kept = Pair.rows
    Pair.rows = lambda self: 1  # type: ignore[method-assign]
    try:
        return loop(plugin, rows)
    finally:
        Pair.rows = kept  # type: ignore[method-assign]


@pytest.mark.ranks
def test_equal_weights_of_an_uneven_tail_are_caught(world2: World) -> None:
    results = world2.run(planted, LowLevelZeroPlugin(stage=2, precision="fp32"), 11)
    with pytest.raises(AssertionError):
        check(results, 11, 2)


def accumulated(rows: int) -> Any:
    model, optimizer, _ = parts()
    booster = Booster(plugin=LowLevelZeroPlugin(stage=2, precision="fp32"))
    loader = DataLoader(samples(rows), batch_size=4)
    model, optimizer, criterion, dataloader, _ = booster.boost(model, optimizer, None, loader)
    batches = list(zip(*[iter(dataloader)] * 2, strict=True))  # fetched two at a time
    for first, second in batches:
        with booster.no_sync(model, optimizer):
            booster.backward(criterion(model(**first)) / 2, optimizer, rows=len(first["tokens"]))
        booster.backward(criterion(model(**second)) / 2, optimizer, rows=len(second["tokens"]))
        optimizer.step()
        optimizer.zero_grad()
    whole = booster.boosted(optimizer).gather()
    return whole and whole["params"]


def accumulated_alone(rows: int, dtype: torch.dtype) -> dict[str, Tensor]:
    model, optimizer, _ = parts(dtype)
    for i, batch in enumerate(DataLoader(samples(rows), batch_size=4)):
        (model(**batch)["loss"] / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach().double() for name, p in model.named_parameters()}


@pytest.mark.ranks
def test_accumulation_without_reducing_each_time(world2: World) -> None:
    weights = world2.run(accumulated, 15)[0]
    wide, narrow = (accumulated_alone(15, dtype) for dtype in (torch.float64, torch.float32))
    assert distance(weights, wide) <= SUMMING_ORDERS * distance(narrow, wide)


def prefetched(plugin: Transform, rows: int) -> Any:
    """A loop that takes the next batch before it runs the model, and evaluates in between."""
    model, optimizer, lr_scheduler = parts()
    booster = Booster(plugin=plugin)
    loader = DataLoader(samples(rows), batch_size=4)
    model, optimizer, criterion, dataloader, _ = booster.boost(
        model, optimizer, None, loader, lr_scheduler
    )
    losses = []
    for _ in range(2):
        batches = iter(dataloader)
        ahead, coming = next(batches, None), dataloader.rows
        while ahead is not None:
            batch, rows = ahead, coming
            ahead, coming = next(batches, None), dataloader.rows
            loss = criterion(model(**batch))
            booster.backward(loss, optimizer)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            losses.append((float(loss.detach()), rows))
    whole = booster.boosted(model).gather()
    return losses, whole and whole["params"]


@pytest.mark.ranks
@pytest.mark.parametrize("rows", [9, 11])
def test_the_next_batch_may_be_fetched_ahead(rows: int, world2: World) -> None:
    check(world2.run(prefetched, LowLevelZeroPlugin(stage=2, precision="fp32"), rows), rows, 2)


def test_a_booster_without_a_plugin_is_the_plain_loop() -> None:
    check([loop(compose(), 11)], 11, 1)


@pytest.mark.ranks
def test_any_composition_is_a_plugin(world4: World) -> None:
    check(world4.run(loop, compose(tp(2), zero(3, degree=2)), 11), 11, 4)
    check(world4.run(loop, compose(dp(2), zero(2, degree=2)), 11), 11, 4)


def test_precision_beside_a_plugin_that_says_none() -> None:
    assert Booster(mixed_precision="bf16", plugin=TorchDDPPlugin()).transform == compose(dp(), bf16)
    agreed = Booster(mixed_precision="bf16", plugin=LowLevelZeroPlugin(2, "bf16"))
    assert agreed.transform == compose(zero(2), bf16)
    assert repr(agreed) == "Booster(plugin=compose(bf16, zero(2)))"
    assert repr(Booster("cpu")) == "Booster(device='cpu', plugin=compose())"
