"""Optimizers that need whole matrices: found out, and given whole matrices where they are cut."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallax import ParallaxError, Transform, compose, dp, tp, zero
from parallax.core.probe import find_ways, optimizer_fault
from parallax.testing import World, pool, toys

pytestmark = pytest.mark.ranks
CLOSE = 1e-9  # as in test_optimizer


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


class Custom(torch.optim.Optimizer):
    """An optimizer whose update of one parameter is a function of its gradient and its state."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "whole": False})

    def direction(self, grad: torch.Tensor, state: dict[str, Any], group: Any) -> torch.Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.direction(p.grad, self.state[p], group), alpha=-group["lr"])


class Lion(Custom):
    def direction(self, grad: torch.Tensor, state: dict[str, Any], group: Any) -> torch.Tensor:
        average = state.setdefault("average", torch.zeros_like(grad))
        average.lerp_(grad, 0.1)
        return torch.sign(average)


class Normalised(Custom):
    """Divides by the norm of the whole gradient, as LAMB and LARS do."""

    def direction(self, grad: torch.Tensor, state: dict[str, Any], group: Any) -> torch.Tensor:
        return grad / (grad.norm() + 1e-12)


class Together(Custom):
    """Divides by the norm of all gradients together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rows = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in rows])
        for p in rows:
            p.sub_(0.05 * p.grad / norm)


class Declared(Normalised):
    supports_dtensor = True


class Mixed(Custom):
    """Element-wise in the groups that do not ask for whole matrices."""

    def direction(self, grad: torch.Tensor, state: dict[str, Any], group: Any) -> torch.Tensor:
        return grad / (grad.norm() + 1e-12) if group["whole"] else grad


def custom(kind: type[Custom], transform: Transform) -> tuple[float, bool]:
    model, reference = mlp(), mlp()
    boosted = transform(model, kind(model.parameters()))
    train(boosted, range(3))
    alone(reference, kind(reference.parameters()), range(3))
    sharded = any(isinstance(p, DTensor) for p in boosted.params.values())
    return apart(boosted, reference), sharded


@pytest.mark.parametrize("kind", [Lion, Declared])
def test_custom_optimizers_that_can_be_cut_are_taken(kind: type[Custom], world2: World) -> None:
    for error, sharded in world2.run(custom, kind, zero(3)):
        assert sharded
        assert error < CLOSE


@pytest.mark.parametrize("kind", [Lion, Normalised, Mixed, Together])
def test_replication_takes_any_optimizer(kind: type[Custom], world2: World) -> None:
    for error, _ in world2.run(custom, kind, dp()):
        assert error < CLOSE


WHOLE: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "Normalised": Normalised,
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.ndim == 2], lr=0.05),
    "Adafactor": torch.optim.Adafactor,
}


def whole(name: str, transform: Transform) -> tuple[float, str]:
    model, reference = mlp(), mlp()
    boosted = transform(model, WHOLE[name](model.parameters()))
    train(boosted, range(3))
    alone(reference, WHOLE[name](reference.parameters()), range(3))
    return apart(boosted, reference), boosted.rooms["optimizer"].notes["way"]


@pytest.mark.parametrize("name", list(WHOLE))
def test_optimizers_of_whole_matrices_get_whole_matrices(name: str, world2: World) -> None:
    """On layers so small that ranks hold nothing of some."""
    for error, way in world2.run(whole, name, zero(2)):
        assert error < CLOSE
        assert way == "whole"
    for error, way in world2.run(whole, name, dp()):  # every rank has them whole
        assert error < CLOSE
        assert way == "parts"


def test_who_shards_is_named() -> None:
    rules = tp(2, rules={"layers.0": "colwise", "layers.1": "rowwise"})

    def both() -> tuple[str, str]:
        model = toys.Mlp(6, 8, 6)
        return caught(lambda: compose(rules, zero(2))(model, Together(model.parameters())))

    (found,) = set(pool(4).run(both))
    assert found[0] == "OptimizerError"
    assert found[1].startswith(f"{rules!r} and zero(2) shards parameters, and the optimizer")


def hybrid() -> tuple[float, tuple[str, ...], set[str]]:
    model, reference = mlp(), mlp()

    def groups(m: nn.Module) -> list[dict[str, Any]]:
        rows = list(m.parameters())
        return [{"params": rows[1::2]}, {"params": rows[0::2], "whole": True}]

    boosted = zero(2)(model, Mixed(groups(model)))
    train(boosted, range(3))
    alone(reference, Mixed(groups(reference)), range(3))
    return apart(boosted, reference), boosted.rooms["optimizer"].notes["ways"], set(boosted.owners)


def test_every_group_is_tried(world2: World) -> None:
    """Muon in one class with Adam for the rest: only some groups need whole matrices."""
    for error, ways, owned in world2.run(hybrid):
        assert error < CLOSE
        assert ways == ("parts", "whole")
        assert owned == {f"layers.{i}.weight" for i in range(3)}


def test_trying_leaves_the_optimizer_and_the_random_stream_alone() -> None:
    model = mlp()
    optimizer = Lion(model.parameters())
    alone(model, optimizer, [0])
    before = copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert optimizer_fault(optimizer, "zero(2)") is None
    assert str(optimizer.state_dict()) == str(before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())


def lbfgs(transform: Transform) -> tuple[str, str]:
    model = mlp()
    return caught(lambda: transform(model, torch.optim.LBFGS(model.parameters())))


def test_lbfgs_keeps_parameters_aside() -> None:
    """It would go on changing the parameters that were replaced."""
    assert pool(1).run(lbfgs, dp()) == [
        (
            "OptimizerError",
            (
                "the optimizer LBFGS keeps parameters of its own in the attribute _params, and "
                "this composition replaces the model's parameters: its step would change the old "
                "ones.\n\nUse an optimizer that reads its parameters from param_groups, or train "
                "without dp, zero, tp and mixed_precision."
            ),
        )
    ]
    assert pool(1).run(lbfgs, compose()) == [("", "nothing was raised")]


class Late(Custom):
    """Element-wise for its first ten steps, as Shampoo is until its first preconditioner."""

    def direction(self, grad: torch.Tensor, state: dict[str, Any], group: Any) -> torch.Tensor:
        state["step"] = state.get("step", 0) + 1
        return grad if state["step"] <= 10 else grad / grad.norm()


class Wide(Custom):
    """Whole matrices only where both dims are large, as many factorised optimizers do."""

    def direction(self, grad: torch.Tensor, state: dict[str, Any], group: Any) -> torch.Tensor:
        return grad / grad.norm() if grad.ndim > 1 and min(grad.shape) >= 7 else grad


class Rare(Custom):
    """Its matrix work comes with the thousandth step, as some preconditioners do."""

    def direction(self, grad: torch.Tensor, state: dict[str, Any], group: Any) -> torch.Tensor:
        rows = state.setdefault("rows", torch.zeros(grad.shape[:-1]))
        rows.add_(grad.square().sum(-1))
        state["step"] = state.get("step", 0) + 1
        return grad if state["step"] < 1000 else grad / rows.sqrt().unsqueeze(-1)


@pytest.mark.parametrize("kind", [Late, Wide, Rare])
def test_what_starts_late_or_needs_size_is_found_too(kind: type[Custom]) -> None:
    assert find_ways(kind(list(toys.Mlp(16, 16, 1).parameters()))).ways == ("whole",)
