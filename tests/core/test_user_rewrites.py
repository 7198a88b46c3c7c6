"""Facts and rewrites of a user's own: they work from any module, with nothing registered."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from parallax import (
    ConflictError,
    Draft,
    Fact,
    Phase,
    Plan,
    Rewrite,
    Room,
    RuleError,
    Transform,
    clip,
    compose,
    dp,
    parse,
    state,
    zero,
)
from parallax.core.bind import BIND
from parallax.core.slices import local
from parallax.parse import VOCABULARY
from parallax.testing import World, pool, toys
from parallax.testing.laws import ALIASES
from parallax.testing.soak import SPOKEN


@dataclass(frozen=True)
class Damping(Fact):
    """A factor on all gradients."""

    factor: float | None = None


def build(draft: Draft, plan: Plan) -> tuple[Draft, Room]:
    inner, factor = draft.update, plan[Damping].factor
    room = Room(state={"updates": torch.zeros(())}, notes={"factor": factor})
    params = list(draft.names.parameters_of(*draft.parts).values())

    def update() -> None:
        room.state["updates"] += 1
        for p in params:
            if p.grad is not None:
                local(p.grad).mul_(factor)
        inner()

    return draft._replace(update=update), room


def check(draft: Draft, plan: Plan) -> Any:
    if plan[Damping].factor == 0:
        yield RuleError(f"{plan.said_by(Damping, 'factor')} would stop all learning.")


DAMP = Rewrite("damp", Phase.SCALE, build, check)


def damp(factor: float) -> Transform:
    return state(f"damp({factor})", Damping(factor=factor), rewrites=(DAMP,))


def test_it_composes_prints_and_parses_like_any_other() -> None:
    both = compose(zero(2), damp(0.5))
    assert both == compose(damp(0.5), zero(2))
    assert repr(both) == "compose(damp(0.5), zero(2))"
    assert parse("zero(2), damp(0.5)", more={"damp": damp}) == both
    assert [r.name for r in compose(clip(1.0), damp(2.0), zero(2)).plan(2).rewrites] == [
        "store",
        "clip",
        "damp",
    ]
    with pytest.raises(ConflictError) as caught:
        compose(damp(0.5), damp(2.0))
    assert str(caught.value) == (
        "the transforms disagree. Damping.factor: damp(0.5) says 0.5 and damp(2.0) says 2.0.\n\n"
        "Keep one of damp(0.5), damp(2.0); to overrule on purpose: override(damp(0.5), damp(2.0))."
    )


def trained(transform: Transform, lr: float) -> tuple[dict[str, Any], dict[str, Any]]:
    torch.manual_seed(0)
    model = toys.Mlp().double()
    boosted = transform(model, torch.optim.SGD(model.parameters(), lr=lr))
    for step in range(3):
        boosted.train_step(toys.square, boosted.shard(toys.points(4, step).double()))
    whole = boosted.gather()
    return (whole or {}).get("params", {}), (whole or {}).get("rooms", {})


@pytest.mark.ranks
@pytest.mark.parametrize("base", [dp(), zero(3)], ids=repr)
def test_it_takes_part_in_training(base: Transform, world2: World) -> None:
    plain, rooms = world2.run(trained, base, 0.05)[0]
    assert rooms == {}
    damped, rooms = world2.run(trained, compose(base, damp(0.5)), 0.1)[0]
    # Halving is exact in binary, so that half the gradient is half the learning rate.
    assert all(torch.equal(damped[name], p) for name, p in plain.items())
    assert float(rooms["damp"]["updates"]) == 3


def refused() -> str:
    try:
        compose(zero(2), damp(0))(toys.Mlp())
    except RuleError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.ranks
def test_its_check_is_asked_before_anything_is_changed(world2: World) -> None:
    assert world2.run(refused) == ["damp(0) would stop all learning."] * 2


# -- rewrites of one phase commute -----------------------------------------------------------------


def known_rewrites() -> set[Rewrite]:
    """Every rewrite that the package's transforms name."""
    made = [parse(text) for text in SPOKEN.values()]
    return {BIND, *(r for t in made for r in t.rewrites)}


def both_ways(first: Transform, second: Transform) -> list[dict[str, torch.Tensor]]:
    """Parameters after training with two transforms' rewrites of one phase in either order."""
    results = []
    for pair in (("0", "1"), ("1", "0")):
        renamed = [
            Transform(
                frozenset(
                    c._replace(rewrites=tuple(replace(r, name=mark + r.name) for r in c.rewrites))
                    for c in t.claims
                )
            )
            for t, mark in zip((first, second), pair, strict=True)
        ]
        results.append(trained(compose(*renamed), 0.1)[0])
    return results


def doubler(name: str, change: Callable[[torch.Tensor], Any]) -> Transform:
    """A transform of the CLIP phase that changes every gradient in place."""

    def build(draft: Draft, plan: Plan) -> tuple[Draft, Room]:
        inner = draft.update

        def update() -> None:
            for p in draft.names.parameters_of(*draft.parts).values():
                change(local(p.grad))
            inner()

        return draft._replace(update=update), Room()

    # A fact of its own, or the two would say the same.
    kind = dataclass(frozen=True)(type(name, (Fact,), {"__annotations__": {}}))
    return state(f"{name}()", kind(), rewrites=(Rewrite(name, Phase.CLIP, build),))


def differ(first: Transform, second: Transform) -> bool:
    one, other = both_ways(first, second)
    return any(not torch.equal(p, other[name]) for name, p in one.items())


def halve(grad: torch.Tensor) -> None:
    grad.mul_(0.5)


def double(grad: torch.Tensor) -> None:
    grad.mul_(2)


def cap(grad: torch.Tensor) -> None:
    grad.clamp_(-1e-3, 1e-3)


def test_every_pair_of_one_phase_is_known() -> None:
    """A second rewrite in a phase needs a case in the test below."""
    tools = {"compose", "override", "part"}
    assert set(SPOKEN) | set(ALIASES) == set(VOCABULARY) - tools, "spell it in SPOKEN"
    pairs = {
        frozenset((a.name, b.name))
        for a, b in itertools.combinations(known_rewrites(), 2)
        if a.phase == b.phase
    }
    assert pairs == set()


@pytest.mark.ranks
def test_two_that_commute_and_two_that_do_not_are_told_apart() -> None:
    run = pool(1).run
    assert run(lambda: differ(doubler("halve", halve), doubler("double", double))) == [False]
    assert run(lambda: differ(doubler("halve", halve), doubler("cap", cap))) == [True]
