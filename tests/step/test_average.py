"""Averages are those of the definition, wherever the parameters live, and come back from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

from parallax import StepError, Transform, clip, compose, dp, ema, tp, zero
from parallax.checkpoint import load_, save
from parallax.testing import World, toys

# Averages of float64 weights that agree to as much.
CLOSE = 1e-12


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return toys.Gpt(tied=True, scalar=True, frozen=True).double()


def one_process(steps: int, decay: float, warmup: bool) -> dict[str, Tensor]:
    model = gpt()
    optimizer = toys.momentum(model)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    averages = {n: p.detach().clone() for n, p in named.items()}
    for step in range(steps):
        total, count = toys.next_token(model, toys.tokens(4, step))
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        d = min(decay, (2 + step) / (11 + step)) if warmup else decay
        averages = {n: d * a + (1 - d) * named[n].detach() for n, a in averages.items()}
    return averages


def averages_of(transform: Transform, steps: int) -> tuple[Any, Any, Any]:
    model = gpt()
    boosted = transform(model, toys.momentum(model))
    batches = [boosted.shard(toys.tokens(4, step)) for step in range(steps)]
    for batch in batches:
        boosted.train_step(toys.next_token, batch)
    before = boosted.gather()
    plain = float(boosted.eval_step(toys.next_token, batches[0]))
    with boosted.averaged():
        inside = boosted.gather()
        other = float(boosted.eval_step(toys.next_token, batches[0]))
    after = boosted.gather()
    if before is not None:
        assert all(torch.equal(after["params"][n], p) for n, p in before["params"].items())
    return before, inside, (plain, other)


@pytest.mark.ranks
@pytest.mark.parametrize("said", [ema(0.9), ema(0.9, warmup=True)], ids=repr)
@pytest.mark.parametrize("transform", [dp(), zero(1), zero(3), tp(2)], ids=repr)
def test_the_average_is_that_of_one_process(
    transform: Transform, said: Transform, world2: World
) -> None:
    state, inside, losses = world2.run(averages_of, compose(transform, said), 3)[0]
    expected = one_process(3, 0.9, "warmup" in repr(said))
    mine = state["rooms"]["ema"]["averages"]
    assert set(mine) == set(expected)  # frozen parameters have none
    for name, average in expected.items():
        assert (mine[name] - average).abs().max() < CLOSE
        assert (inside["params"][name] - average).abs().max() < CLOSE
        assert (state["params"][name] - average).abs().max() > 1e-6  # and it is no copy
    model = gpt()
    model.load_state_dict(inside["params"], strict=False)
    total, count = toys.next_token(model.eval(), toys.tokens(4, 0))
    assert losses[1] == pytest.approx(float(total.detach() / count), rel=CLOSE)
    assert losses[0] != losses[1]


def resumed(directory: str, saved: Transform, loaded: Transform) -> tuple[Any, Any]:
    model = gpt()
    first = saved(model, toys.momentum(model))
    for step in range(2):
        first.train_step(toys.next_token, first.shard(toys.tokens(4, step)))
    first.save(Path(directory) / "half")
    model = gpt()
    second = loaded(model, toys.momentum(model))
    # The live pair has gone elsewhere, so that what is not restored shows.
    second.train_step(toys.next_token, second.shard(toys.tokens(4, 9)))
    second.load_(Path(directory) / "half")
    second.train_step(toys.next_token, second.shard(toys.tokens(4, 2)))
    first.train_step(toys.next_token, first.shard(toys.tokens(4, 2)))
    return first.gather(), second.gather()


@pytest.mark.ranks
def test_averages_come_back_from_files_under_another_composition(
    world2: World, tmp_path: Path
) -> None:
    one, two = world2.run(
        resumed, str(tmp_path), compose(zero(3), ema(0.9)), compose(dp(), ema(0.9))
    )[0]
    for name, average in one["rooms"]["ema"]["averages"].items():
        assert (two["rooms"]["ema"]["averages"][name] - average).abs().max() < CLOSE


@pytest.mark.ranks
def test_a_checkpoint_without_averages_starts_them_anew(world2: World, tmp_path: Path) -> None:
    one, two = world2.run(resumed, str(tmp_path), zero(2), compose(zero(2), ema(0.5)))[0]
    assert int(two["rooms"]["ema"]["updates"]) == 1
    model = gpt()
    optimizer = toys.momentum(model)
    start = {}
    for step in range(3):
        start = {n: p.detach().clone() for n, p in model.named_parameters()}
        total, count = toys.next_token(model, toys.tokens(4, step))
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, average in two["rooms"]["ema"]["averages"].items():
        expected = 0.5 * start[name] + 0.5 * one["params"][name]
        assert (average - expected).abs().max() < CLOSE


def stale(stage: int) -> tuple[float, float, list[float]]:
    """Forwards that build a graph leave weights gathered; neither may see the other's."""
    found, ends = [], []
    for probe in (False, True):
        model = gpt()
        boosted = compose(zero(stage), ema(0.9))(model, toys.momentum(model))
        batches = [boosted.shard(toys.tokens(4, step)) for step in range(3)]
        for batch in batches[:2]:
            boosted.train_step(toys.next_token, batch)
        if probe:
            boosted.model(batches[0]["tokens"])
        with boosted.averaged():
            found.append(float(boosted.eval_step(toys.next_token, batches[0])))
            if probe:
                boosted.model(batches[0]["tokens"])
        boosted.train_step(toys.next_token, batches[2])
        ends.append(float(boosted.eval_step(toys.next_token, batches[0])))
    return found[0], found[1], ends


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 3])
def test_gathered_weights_do_not_outlive_the_block(stage: int, world2: World) -> None:
    for one, two, ends in world2.run(stale, stage):
        assert one == two
        assert ends[0] == ends[1]


def test_a_skipped_update_moves_no_average() -> None:
    model = nn.Linear(2, 1)
    boosted = compose(ema(0.5), clip(1.0, nonfinite="skip"))(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    start = boosted.params["weight"].detach().clone()
    boosted.train_step(lambda m, x: m(x).sum() * float("nan"), torch.ones(1, 2))
    assert not boosted.took_place
    assert boosted.step == 0
    assert torch.equal(boosted.rooms["ema"].state["averages"]["weight"], start)
    boosted.train_step(lambda m, x: m(x).sum(), torch.ones(1, 2))
    assert not torch.equal(boosted.rooms["ema"].state["averages"]["weight"], start)


def test_misuse_is_refused() -> None:
    model = nn.Linear(2, 1)
    boosted = ema(0.5)(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with boosted.averaged():
        with pytest.raises(StepError) as caught, boosted.averaged():
            pass
        assert str(caught.value) == (
            "averaged() was entered twice.\n\nLeave the block before entering again."
        )
        with pytest.raises(StepError) as caught:
            boosted.train_step(lambda m, x: m(x).sum(), torch.ones(1, 2))
        assert str(caught.value) == (
            "an update was asked for inside boosted.averaged(), where the model holds the averaged "
            "weights.\n\nLeave the block first."
        )
        ways = {
            "save": lambda: boosted.save("nowhere"),
            "load_": lambda: boosted.load_("nowhere"),
            "a snapshot": lambda: optree.tree_map(torch.clone, boosted, namespace="parallax"),
        }
        more = {
            "save": lambda: save(boosted, "nowhere"),
            "load_": lambda: load_(boosted, "nowhere"),
        }
        for verb, way in (*ways.items(), *more.items()):
            with pytest.raises(StepError) as caught:
                way()
            assert str(caught.value) == (
                f"{verb} was called inside boosted.averaged(), where parameters are not "
                "what training goes on from.\n\nLeave the block first."
            )
    bare = compose()(nn.Linear(2, 1))
    with pytest.raises(StepError) as caught, bare.averaged():
        pass
    assert str(caught.value) == (
        "averaged() was called on <boosted Linear at step 0: compose()>, which keeps no average."
        "\n\nCompose it with ema(0.999)."
    )


@pytest.mark.parametrize("decay", [1, 1.0, -0.1, float("nan"), "0.9", True])
def test_a_decay_lies_below_one(decay: Any) -> None:
    with pytest.raises(ValueError, match="ema was given") as caught:
        ema(decay)
    assert str(caught.value) == (
        f"ema was given decay={decay!r}. Give the share of the average that stays at each update, "
        "from 0 up to 1, such as 0.999."
    )
