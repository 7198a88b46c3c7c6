"""The optimizer after boosting: the user's own, pointed at what is there now, with nothing lost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler

from parallax import ParallaxError, Transform, compose, dp, zero
from parallax.core.probe import ELEMENTWISE
from parallax.testing import World, pool, toys

pytestmark = pytest.mark.ranks

# float64 on both sides; only the order of sums over ranks differs. With gradients of size 1 and
# steps of at most 0.1 that is a few roundings of 1e-16, amplified at most by 1 / eps of the
# optimizers that divide by the root of a gradient's square (1e-8, near a zero gradient).
CLOSE = {"rtol": 1e-9, "atol": 1e-9}

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def caught(work: Callable[[], Any]) -> tuple[str, str]:
    """Kind and text of the error that a piece of work raises."""
    try:
        work()
    except ParallaxError as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return toys.Mlp().double()


def batch(step: int) -> torch.Tensor:
    return toys.points(6, step).double()


def alone(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Train in this process, on whole batches."""
    for step in steps:
        optimizer.zero_grad()
        toys.square(model, batch(step)).backward()
        optimizer.step()


def apart(boosted: Any, model: nn.Module) -> float:
    """Largest relative difference of parameters to a model that was trained alone."""
    expected = {n: p.detach() for n, p in model.named_parameters()}
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in boosted.params.items()}
    assert list(whole) == list(expected)
    return max(float(((whole[n] - p).abs() / (1 + p.abs())).max()) for n, p in expected.items())


def train(boosted: Any, steps: Iterable[int]) -> None:
    for step in steps:
        boosted.train_step(toys.square, boosted.shard(batch(step)))


KINDS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD nesterov": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "SGD maximize": lambda p: torch.optim.SGD(p, lr=0.01, maximize=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam one by one": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
}


def all_kinds(transform: Transform) -> dict[str, float]:
    found = {}
    for name, make in KINDS.items():
        model, reference = mlp(), mlp()
        train(boosted := transform(model, make(model.parameters())), range(3))
        alone(reference, make(reference.parameters()), range(3))
        found[name] = apart(boosted, reference)
    return found


@pytest.mark.parametrize("transform", [dp(), zero(1), zero(3)], ids=repr)
def test_every_elementwise_optimizer_of_torch_steps_like_one_process(
    transform: Transform, world2: World
) -> None:
    assert {type(make([nn.Parameter(torch.zeros(1))])) for make in KINDS.values()} == ELEMENTWISE
    for found in world2.run(all_kinds, transform):
        assert {name: error for name, error in found.items() if not error < CLOSE["atol"]} == {}


def earlier_state(transform: Transform, forget: bool) -> list[float]:
    """Boost after two steps alone; compare with going on alone."""
    found = []
    for make in (KINDS["SGD nesterov"], KINDS["AdamW"], KINDS["RMSprop"], KINDS["NAdam"]):
        model, reference = mlp(), mlp()
        optimizer, other = make(model.parameters()), make(reference.parameters())
        alone(model, optimizer, range(2))
        alone(reference, other, range(5))
        if forget:
            optimizer.state.clear()
        boosted = transform(model, optimizer)
        assert boosted.optimizer is optimizer
        train(boosted, range(2, 5))
        found.append(apart(boosted, reference))
    return found


@pytest.mark.parametrize("transform", [dp(), zero(2), zero(3)], ids=repr)
def test_state_of_earlier_steps_is_cut_up_not_dropped(transform: Transform, world2: World) -> None:
    for found in world2.run(earlier_state, transform, False):
        assert max(found) < CLOSE["atol"]


def test_dropping_the_state_would_be_seen(world2: World) -> None:
    for found in world2.run(earlier_state, zero(2), True):
        assert min(found) > 1e-4


def two_groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    rows = list(parameters)
    groups = [
        {"params": rows[1::2], "lr": 0.3, "momentum": 0.0, "note": "biases"},
        {"params": rows[0::2], "weight_decay": 0.2},
    ]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def groups_kept(transform: Transform, how: str) -> tuple[float, list[dict[str, Any]], bool]:
    model, reference = mlp(), mlp()
    given = two_groups if how == "function" else two_groups(model.parameters())
    boosted = transform(model, given)
    train(boosted, range(3))
    alone(reference, two_groups(reference.parameters()), range(3))
    held = [id(p) for g in boosted.optimizer.param_groups for p in g["params"]]
    settings = [
        {k: g[k] for k in ("lr", "momentum", "weight_decay", "note") if k in g}
        for g in boosted.optimizer.param_groups
    ]
    return apart(boosted, reference), settings, set(held) == set(map(id, model.parameters()))


@pytest.mark.parametrize("how", ["instance", "function"])
def test_groups_keep_their_own_settings(how: str, world2: World) -> None:
    for error, groups, whole in world2.run(groups_kept, zero(3), how):
        assert error < CLOSE["atol"]
        assert groups == [
            {"lr": 0.3, "momentum": 0.0, "weight_decay": 0, "note": "biases"},
            {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.2},
        ]
        assert whole


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, step_size=1, gamma=0.5),
    "function": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=6),
}


def scheduled(name: str, before: bool) -> tuple[float, list[float], list[float]]:
    make = SCHEDULES[name]
    model, reference = mlp(), mlp()
    optimizer, other = (KINDS["SGD nesterov"](m.parameters()) for m in (model, reference))
    schedule = make(optimizer) if before else None
    boosted = compose(zero(2))(model, optimizer)
    schedule = schedule or make(boosted.optimizer)
    theirs, rates = make(other), ([], [])
    for step in range(4):
        train(boosted, [step])
        schedule.step()
        alone(reference, other, [step])
        theirs.step()
        rates[0].append(optimizer.param_groups[0]["lr"])
        rates[1].append(other.param_groups[0]["lr"])
    return apart(boosted, reference), *rates


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_schedules_attached_before_and_after_boosting_act(before: bool, world2: World) -> None:
    for name in SCHEDULES:
        for error, mine, theirs in world2.run(scheduled, name, before):
            assert mine == theirs
            assert len(set(mine)) == 4
            assert error < CLOSE["atol"]


def warnings_of_a_schedule(before: bool) -> list[str]:
    import warnings

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        scheduled("step", before)
    return [str(w.message).partition("\n")[0] for w in found]


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_schedules_have_nothing_to_warn_of(before: bool, world2: World) -> None:
    assert world2.run(warnings_of_a_schedule, before) == [[], []]


def own_loop(zeroing: str) -> float:
    model, reference = mlp(), mlp()
    boosted = zero(2)(model, KINDS["AdamW"](model.parameters()))
    for step in range(3):
        loss = toys.square(boosted.model, boosted.shard(batch(step)))
        boosted.backward(loss)
        boosted.optimizer.step()
        if zeroing == "boosted":
            boosted.zero_grad()
        else:
            boosted.optimizer.zero_grad(set_to_none=zeroing == "none")
    alone(reference, KINDS["AdamW"](reference.parameters()), range(3))
    return apart(boosted, reference)


@pytest.mark.parametrize("zeroing", ["boosted", "none", "zeros"])
def test_a_loop_of_ones_own_trains_alike(zeroing: str, world2: World) -> None:
    assert max(world2.run(own_loop, zeroing)) < CLOSE["atol"]


def state_dict_round_trip(transform: Transform) -> tuple[float, bool]:
    model, reference = mlp(), mlp()
    boosted = transform(model, two_groups(model.parameters()))
    train(boosted, range(2))
    kept = copy.deepcopy(boosted.optimizer.state_dict())
    kept["param_groups"][0]["lr"] = 0.7
    weights = boosted.gather()
    train(boosted, range(2, 3))

    other = mlp()
    again = transform(other, two_groups(other.parameters()))
    again.write_({"params": boosted.params, "buffers": {}, "rooms": {}}, kinds=("params",))
    again.optimizer.load_state_dict(kept)
    train(again, [3])

    alone(reference, theirs := two_groups(reference.parameters()), range(2))
    momentum = copy.deepcopy(theirs.state_dict())
    alone(reference, theirs, range(2, 3))
    theirs.load_state_dict(momentum)
    theirs.param_groups[0]["lr"] = 0.7
    alone(reference, theirs, [3])
    return apart(again, reference), (weights is None) == (dist.get_rank() != 0)


@pytest.mark.parametrize("transform", [dp(), zero(3)], ids=repr)
def test_state_dict_of_the_optimizer_makes_a_round_trip(
    transform: Transform, world2: World
) -> None:
    for error, rank_0_only in world2.run(state_dict_round_trip, transform):
        assert error < CLOSE["atol"]
        assert rank_0_only


def with_closure(name: str) -> float:
    """Steps with a closure, as LBFGS needs it and every other optimizer of torch allows it."""
    model, reference = mlp(), mlp()
    makes = {"AdamW": KINDS["AdamW"], "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3)}
    # LBFGS keeps the parameters it was made with, so that nothing may replace them.
    transform = compose() if name == "LBFGS" else dp()
    boosted = transform(model, makes[name](model.parameters()))
    other = makes[name](reference.parameters())
    for step in range(2):

        def mine(step: int = step) -> torch.Tensor:
            boosted.zero_grad()
            loss = toys.square(model, boosted.shard(batch(step)))
            boosted.backward(loss)
            return loss

        def theirs(step: int = step) -> torch.Tensor:
            other.zero_grad()
            loss = toys.square(reference, batch(step))
            loss.backward()
            return loss

        boosted.optimizer.step(mine)
        other.step(theirs)
    return apart(boosted, reference)


@pytest.mark.parametrize("name", ["AdamW", "LBFGS"])
def test_closures_are_run(name: str) -> None:
    """On one rank: LBFGS reads the loss, which is a rank's own unless the closure sums it."""
    (error,) = pool(1).run(with_closure, name)
    assert error < CLOSE["atol"]


def learning_rate_in_a_tensor() -> float:
    model, reference = mlp(), mlp()
    mine, theirs = (
        torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01), foreach=False)
        for m in (model, reference)
    )
    boosted = zero(2)(model, mine)
    train(boosted, range(2))
    alone(reference, theirs, range(2))
    return apart(boosted, reference)


def test_a_learning_rate_may_be_a_tensor(world2: World) -> None:
    assert max(world2.run(learning_rate_in_a_tensor)) < CLOSE["atol"]


def hooked() -> list[int]:
    model = mlp()
    optimizer = KINDS["AdamW"](model.parameters())
    calls = [0, 0]
    optimizer.register_step_pre_hook(lambda *a: calls.__setitem__(0, calls[0] + 1))
    optimizer.register_step_post_hook(lambda *a: calls.__setitem__(1, calls[1] + 1))
    train(zero(2)(model, optimizer), range(3))
    return calls


def test_hooks_of_the_optimizer_stay(world2: World) -> None:
    assert world2.run(hooked) == [[3, 3]] * 2


def wrong_given(given: Any) -> tuple[str, str]:
    return caught(lambda: dp()(mlp(), given))


def test_what_is_no_optimizer_is_named() -> None:
    assert pool(1).run(wrong_given, "AdamW") == [
        (
            "OptimizerError",
            (
                "the optimizer is 'AdamW'.\n\nGive a torch.optim.Optimizer made on the model, or a "
                "function of parameters that makes one, or None."
            ),
        )
    ]
    assert pool(1).run(wrong_given, list) is not None
    ((kind, text),) = pool(1).run(wrong_given, len)
    assert kind == "OptimizerError"
    assert text == (
        "the function given as optimizer made 6.\n\n"
        "It must return a torch.optim.Optimizer over the parameters it is given."
    )
