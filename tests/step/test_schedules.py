"""Schedules say what their formulas say, and know of skipped updates once attached."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR

from parallax import (
    CheckpointError,
    StepError,
    clip,
    compose,
    fp16,
    mixed_precision,
    schedules,
    zero,
)
from parallax.testing import World, toys


def sgd(lr: float = 2.0) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)


def rates(scheduler: LambdaLR, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0] / 2.0)
        scheduler.optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda o: schedules.constant(o, warmup=2), [0, 0.5, 1, 1, 1, 1, 1, 1]),
        (lambda o: schedules.linear(o, steps=6, warmup=2), [0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0]),
        (
            lambda o: schedules.linear(o, steps=4, floor=0.2),
            [1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2, 0.2],
        ),
        (
            lambda o: schedules.cosine(o, steps=6, warmup=2),
            [0, 0.5, 1, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4, 0, 0],
        ),
        (
            lambda o: schedules.inverse_sqrt(o, warmup=4),
            [0, 0.25, 0.5, 0.75, 1, *(math.sqrt(4 / t) for t in (5, 6, 7))],
        ),
        (
            lambda o: schedules.wsd(o, steps=7, decay=2, warmup=2, floor=0.1),
            [0, 0.5, 1, 1, 1, 1, 0.55, 0.1],
        ),
    ],
)
def test_the_factors_are_those_of_the_formula(
    make: Callable[[Any], LambdaLR], expected: list[float]
) -> None:
    assert rates(make(sgd()), 8) == pytest.approx(expected, abs=1e-12)


def test_they_are_transformers_schedules() -> None:
    transformers = pytest.importorskip("transformers")
    for name, mine in (
        ("cosine", lambda o: schedules.cosine(o, steps=9, warmup=3)),
        ("linear", lambda o: schedules.linear(o, steps=9, warmup=3)),
        ("constant_with_warmup", lambda o: schedules.constant(o, warmup=3)),
    ):
        optimizer = sgd()
        theirs = transformers.get_scheduler(
            name, optimizer, num_warmup_steps=3, num_training_steps=9
        )
        assert rates(mine(sgd()), 9) == pytest.approx(rates(theirs, 9), abs=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: schedules.cosine(sgd(), steps=5, warmup=6),
            "cosine was given warmup=6 of steps=5 updates. Give steps=6 or more.",
        ),
        (
            lambda: schedules.wsd(sgd(), steps=5, warmup=2, decay=4),
            "wsd was given warmup=2 and decay=4 of steps=5 updates. Give steps=6 or more.",
        ),
        (
            lambda: schedules.linear(sgd(), steps=5.0),  # type: ignore[arg-type]
            "linear was given steps=5.0. Give a whole number of updates, 1 or more.",
        ),
        (
            lambda: schedules.linear(sgd(), steps=5, floor=2.0),
            (
                "linear was given floor=2.0. Give the share of the learning rate that is left at "
                "the "
                "end, from 0 to 1."
            ),
        ),
        (
            lambda: schedules.inverse_sqrt(sgd(), warmup=0),
            (
                "inverse_sqrt was given warmup=0, and its decay is measured by the warm-up. Give "
                "one "
                "update at least."
            ),
        ),
    ],
)
def test_wrong_numbers_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match="was given") as caught:
        make()
    assert str(caught.value) == message


def boosted_linear(transform: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return transform(model, torch.optim.AdamW(model.parameters(), lr=1.0))


def good(model: Any, x: Any) -> Any:
    return model(x).sum() * 1e-3  # within what float16 can scale


def bad(model: Any, x: Any) -> Any:
    return model(x).sum() * float("nan")


@pytest.mark.parametrize(
    "transform",
    [compose(fp16), compose(clip(1e9, nonfinite="skip"), zero(2)), mixed_precision("fp16")],
    ids=repr,
)
def test_a_skipped_update_does_not_advance_the_scheduler(transform: Any) -> None:
    boosted = boosted_linear(transform)
    scheduler = boosted.attach(schedules.linear(boosted.optimizer, steps=10))
    seen = []
    for loss in (good, bad, bad, good):
        boosted.train_step(loss, torch.ones(1, 2))
        scheduler.step()
        seen.append((boosted.took_place, boosted.step, scheduler.get_last_lr()[0]))
    assert seen == [(True, 1, 0.9), (False, 1, 0.9), (False, 1, 0.9), (True, 2, 0.8)]


def test_an_attached_scheduler_saves_as_ever() -> None:
    plain, boosted = sgd(), boosted_linear(fp16)
    theirs, mine = StepLR(plain, 3), boosted.attach(StepLR(boosted.optimizer, 3))
    assert set(mine.state_dict()) == set(theirs.state_dict())
    assert isinstance(mine, StepLR)
    torch.save(mine.state_dict(), io.BytesIO())
    assert boosted.attach(mine) is mine  # twice is once
    boosted.train_step(good, torch.ones(1, 2))
    mine.step()
    assert mine.last_epoch == 1


def test_a_schedule_by_epochs_goes_on() -> None:
    boosted = boosted_linear(fp16)
    scheduler = boosted.attach(StepLR(boosted.optimizer, 1, gamma=0.5), per="epoch")
    boosted.train_step(bad, torch.ones(1, 2))
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]


def test_an_unattached_scheduler_is_refused_where_updates_may_be_skipped() -> None:
    boosted = boosted_linear(compose(zero(2), fp16))
    StepLR(boosted.optimizer, 1)
    before = boosted.params["weight"].full_tensor().clone()
    with pytest.raises(StepError) as caught:
        boosted.train_step(good, torch.ones(1, 2))
    assert str(caught.value) == (
        "a learning-rate scheduler drives the optimizer, and compose(fp16, zero(2)) may skip "
        "updates (scale): the scheduler would go on without them.\n\nLet it know: "
        "boosted.attach(scheduler), or boosted.attach(scheduler, per='epoch') where it is stepped "
        "less often than once an update."
    )
    assert torch.equal(boosted.params["weight"].full_tensor(), before)


def test_a_foreign_scheduler_is_refused() -> None:
    boosted = boosted_linear(fp16)
    with pytest.raises(StepError) as caught:
        boosted.attach(StepLR(sgd(), 1))
    assert str(caught.value) == (
        "attach was given a StepLR that drives another optimizer.\n\nMake the scheduler on "
        "boosted.optimizer."
    )
    with pytest.raises(CheckpointError, match="without state_dict and load_state_dict"):
        boosted.attach("cosine")
    with pytest.raises(ValueError, match="attach was given per='day'"):
        boosted.attach(StepLR(boosted.optimizer, 1), per="day")


def every_scheduler() -> list[list[float]]:
    """Rates under a composition, beside those of a plain optimizer."""
    transformers = __import__("transformers")
    makers: list[Callable[[Any], Any]] = [
        lambda o: CosineAnnealingLR(o, 5),
        lambda o: OneCycleLR(o, 1.0, total_steps=6),
        lambda o: transformers.get_scheduler("cosine", o, num_warmup_steps=2, num_training_steps=5),
        lambda o: schedules.cosine(o, steps=5, warmup=2),
    ]
    found = []
    for make in makers:
        for plain in (True, False):
            torch.manual_seed(0)
            model = toys.Mlp()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            boosted = None if plain else zero(2)(model, optimizer)
            scheduler = make(optimizer)
            row = []
            for _ in range(4):
                if boosted is None:
                    optimizer.step()
                else:
                    boosted.train_step(toys.square, boosted.shard(toys.points(4)))
                scheduler.step()
                row.append(scheduler.get_last_lr()[0])
            found.append(row)
    return found


@pytest.mark.ranks
def test_schedulers_of_torch_and_transformers_attach_unchanged(world2: World) -> None:
    for rows in world2.run(every_scheduler):
        assert rows[0::2] == rows[1::2]
        assert all(len(set(row)) > 1 for row in rows)
