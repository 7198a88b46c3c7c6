"""What ranks must agree on: one model, one composition, and random numbers where they belong."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallax import ParallaxError, Transform, bf16, compose, dp, tp, zero
from parallax.core.mesh import rank_on
from parallax.core.slices import box, local
from parallax.testing import World, toys

pytestmark = pytest.mark.ranks


def caught(work: Callable[[], Any]) -> tuple[str, str]:
    try:
        work()
    except ParallaxError as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


# -- one start -------------------------------------------------------------------------------------


def started_apart(transform: Transform, together: bool) -> tuple[bool, bool, bool]:
    """Whether weights, buffers and moments of rank 0 are everyone's, from different seeds."""
    torch.manual_seed(100 if together else 100 + dist.get_rank())
    model = toys.Gpt(tied=True, scalar=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    toys.mean_next_token(model, toys.tokens(2)).backward()
    optimizer.step()
    model.seen.fill_(dist.get_rank())
    boosted = transform(model, optimizer)
    torch.manual_seed(100)
    reference = toys.Gpt(tied=True, scalar=True)
    other = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    toys.mean_next_token(reference, toys.tokens(2)).backward()
    other.step()
    expected = dict(reference.named_parameters())
    return (
        all(torch.equal(local(p), expected[n][box(p).window]) for n, p in boosted.params.items()),
        int(model.seen) == 0,
        all(
            torch.equal(
                local(m["momentum_buffer"]),
                other.state[expected[n]]["momentum_buffer"][box(boosted.params[n]).window],
            )
            for n, m in boosted.moments.items()
        ),
    )


@pytest.mark.parametrize("transform", [dp(), zero(3), tp(2), compose(tp(2), zero(2))], ids=repr)
def test_processes_of_different_seeds_start_from_one_model(
    transform: Transform, world2: World, world4: World
) -> None:
    ranks = world4 if len(transform.atoms) > 1 else world2
    assert ranks.run(started_apart, transform, False) == [(True, True, True)] * ranks.size


def test_it_takes_the_broadcast(world2: World) -> None:
    """The planted fault: without it, ranks go on from their own weights."""

    def without_broadcast() -> tuple[bool, bool, bool]:
        from parallax.core import boost

        real, boost.broadcast = boost.broadcast, lambda *a, **k: None
        try:
            return started_apart(dp(), False)
        finally:
            boost.broadcast = real

    assert world2.run(without_broadcast)[1] == (False, False, False)


# -- random numbers --------------------------------------------------------------------------------


def masks(transform: Transform) -> tuple[int, list[float], list[float]]:
    """Data rank, and what dropout lets through in two steps of a row of ones."""
    torch.manual_seed(7 + dist.get_rank())
    boosted = transform(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    drawn = [nn.functional.dropout(torch.ones(32), 0.5).tolist() for _ in range(2)]
    return rank_on(boosted.mesh), *drawn


CUT = tp(2, rules={"0": "colwise", "1": "rowwise"})


@pytest.mark.parametrize("transform", [dp(), zero(3), compose(CUT, zero(2))], ids=repr)
def test_dropout_differs_by_data_rank_and_agrees_within(
    transform: Transform, world4: World
) -> None:
    rows = world4.run(masks, transform)
    assert {row[0] for row in rows} == set(range(transform.plan(4).size()))
    for data, first, second in rows:
        assert first != second
        for other, *drawn in rows:
            assert (drawn == [first, second]) == (other == data)


def test_one_data_rank_draws_what_one_process_draws(world2: World) -> None:
    torch.manual_seed(7)
    nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    expected = [nn.functional.dropout(torch.ones(32), 0.5).tolist() for _ in range(2)]
    for _, *drawn in world2.run(masks, CUT):
        assert drawn == expected


def dropout_in_training(transform: Transform) -> list[float]:
    torch.manual_seed(3)
    model = toys.Gpt(dropout=0.3)
    boosted = transform(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return [
        float(boosted.train_step(toys.next_token, boosted.shard(toys.tokens(4, i))))
        for i in range(3)
    ]


def test_a_tensor_group_with_dropout_stays_together(world2: World) -> None:
    """The audit of the first step compares outputs and gradients: masks that differ would raise."""
    one, other = world2.run(dropout_in_training, tp(2))
    assert one == other


# -- disagreement ----------------------------------------------------------------------------------


def differently(what: str) -> tuple[str, str]:
    torch.manual_seed(0)
    odd = dist.get_rank() == 1
    model: nn.Module = toys.Mlp()
    transform, kind, lr = zero(2), torch.optim.SGD, 0.1
    if odd and what == "composition":
        transform = compose(zero(2), bf16)
    if odd and what == "shapes":
        model = toys.Mlp(5, 7, 4, 1)
    if odd and what == "model":
        model = toys.ConvNet()
    if odd and what == "optimizer":
        kind = torch.optim.AdamW
    if odd and what == "settings":
        lr = 0.2
    optimizer = kind(model.parameters(), lr=lr)
    if odd and what == "groups":
        rows = list(model.parameters())
        optimizer = kind([{"params": rows[:2]}, {"params": rows[2:]}], lr=lr)
    if odd and what == "frozen":
        model.layers[0].requires_grad_(False)
    return caught(lambda: transform(model, optimizer))


ROWS = {
    "composition": (
        "zero(2) | Mlp DIGEST | SGD",
        "compose(bf16, zero(2)) | Mlp DIGEST | SGD",
    ),
    "shapes": ("zero(2) | Mlp DIGEST | SGD", "zero(2) | Mlp DIGEST | SGD"),
    "model": ("zero(2) | Mlp DIGEST | SGD", "zero(2) | ConvNet DIGEST | SGD"),
    "optimizer": ("zero(2) | Mlp DIGEST | SGD", "zero(2) | Mlp DIGEST | AdamW"),
}


@pytest.mark.parametrize("what", list(ROWS))
def test_ranks_that_boost_different_things_are_refused_alike(what: str, world2: World) -> None:
    one, other = world2.run(differently, what)
    assert one == other
    kind, text = one
    assert kind == "StepError"
    digests = re.findall(r"\b[0-9a-f]{16}\b", text)
    assert (len(set(digests)) == 2) == (what in ("shapes", "model"))
    first, second = ROWS[what]
    assert re.sub(r"\b[0-9a-f]{16}\b", "DIGEST", text) == (
        f"the ranks boost different things:\n  rank 0: {first}\n  rank 1: {second}\n\n"
        "Build the same model, optimizer and composition on every rank."
    )


@pytest.mark.parametrize("what", ["settings", "groups", "frozen"])
def test_ranks_with_different_settings_are_refused_alike(what: str, world2: World) -> None:
    """A learning rate that differs would let the ranks' copies drift apart in silence."""
    one, other = world2.run(differently, what)
    assert one == other
    assert one[0] == "StepError", one
    assert one[1].startswith("the ranks train with different settings:\n  rank 0: ")


def test_the_same_on_every_rank_is_taken(world2: World) -> None:
    assert world2.run(differently, "nothing") == [("", "nothing was raised")] * 2


def one_rank_alone() -> tuple[str, str, bool]:
    """Only rank 1 holds an optimizer of another model: rank 0 must not wait for it."""
    model = toys.Mlp()
    other = toys.Mlp() if dist.get_rank() == 1 else model
    kind, text = caught(lambda: zero(2)(model, torch.optim.SGD(other.parameters(), lr=0.1)))
    untouched = all(type(p) is nn.Parameter for p in model.parameters())
    return kind, text, untouched


def test_a_fault_of_one_rank_is_raised_on_all_before_anything_changes(world2: World) -> None:
    one, other = world2.run(one_rank_alone)
    assert (one[1], one[2]) == (other[1], True)
    assert one[1] == (
        "rank 1: the optimizer SGD holds a parameter that is not in the model Mlp: group 0, "
        "position 0, shape (7, 5).\n\nMake the optimizer from this model's parameters(), after the "
        "last change to the model and before boosting."
    )
    assert one[0] == other[0] == "OptimizerError"
