"""One global norm, whatever the mixture of meshes, and the same numbers in any order."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax import StepError, Transform, bf16, clip, compose, dp, fp32, tp, zero
from parallax.core.slices import local
from parallax.testing import World, pool, toys

pytestmark = pytest.mark.ranks
# Norms come from float64 gradients; only the order of sums differs.
CLOSE = 1e-12


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return toys.Gpt(tied=True, scalar=True, frozen=True, unused=True).double()


def one_process(max_norm: float, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    model = gpt()
    optimizer = toys.momentum(model)
    norms = []
    for step in range(steps):
        total, count = toys.next_token(model, toys.tokens(4, step))
        (total / count).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {n: p.detach() for n, p in model.named_parameters()}


def clipped(transform: Transform, steps: int) -> tuple[list[float], Any, bool]:
    model = gpt()
    boosted = transform(model, toys.momentum(model))
    before = boosted.grad_norm is None
    norms = []
    for step in range(steps):
        boosted.train_step(toys.next_token, boosted.shard(toys.tokens(4, step)))
        norms.append(float(boosted.grad_norm))
    return norms, boosted.gather(), before


MIXTURES = [
    dp(),
    zero(1),
    zero(3),
    tp(2),
    tp(2, loss_parallel=True),
    compose(dp(2), zero(3)),
    compose(tp(2), zero(2)),
    compose(tp(2), dp()),
    tp(4),
]


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
@pytest.mark.parametrize("transform", MIXTURES, ids=repr)
def test_the_norm_is_that_of_one_process(
    transform: Transform, max_norm: float, world2: World, world4: World
) -> None:
    small = (
        transform.atoms.keys() <= {"dp()", "zero(1)", "zero(3)", "tp(2)"}
        and len(transform.atoms) == 1
    )
    ranks = world2 if small or transform == tp(2, loss_parallel=True) else world4
    norms, params = one_process(max_norm, 3)
    rows = ranks.run(clipped, compose(transform, clip(max_norm)), 3)
    for mine, _, unread in rows:
        assert mine == rows[0][0]  # bitwise: every rank must scale by the very same factor
        assert unread
        assert mine == pytest.approx(norms, rel=CLOSE)
    whole = rows[0][1]["params"]
    assert all((whole[n] - p).abs().max() < CLOSE for n, p in params.items() if p.numel())
    assert (norms[0] > max_norm) == (max_norm == 0.1)


def test_counting_a_replicated_gradient_on_each_rank_would_be_seen(world2: World) -> None:
    def planted() -> list[float]:
        from parallax.step import lower

        real, lower.held_once = lower.held_once, lambda *a: True
        try:
            return clipped(compose(tp(2), clip(0.1)), 1)[0]
        finally:
            lower.held_once = real

    norms, _ = one_process(0.1, 1)
    for mine in world2.run(planted):
        assert mine[0] > norms[0] * 1.01


def by_hand() -> tuple[float, float]:
    model = gpt()
    boosted = compose(zero(2), clip(0.1))(model, toys.momentum(model))
    total, count = toys.next_token(boosted.model, boosted.shard(toys.tokens(4)))
    boosted.backward(total, count=count)
    boosted.optimizer.step()
    return float(boosted.grad_norm), one_process(0.1, 1)[0][0]


def test_a_hand_written_loop_is_clipped_too(world2: World) -> None:
    for mine, expected in world2.run(by_hand):
        assert mine == pytest.approx(expected, rel=CLOSE)


def without() -> bool:
    model = gpt()
    boosted = zero(2)(model, toys.momentum(model))
    boosted.train_step(toys.next_token, boosted.shard(toys.tokens(4)))
    return boosted.grad_norm is None


def test_there_is_no_norm_without_clip(world2: World) -> None:
    assert world2.run(without) == [True, True]


def nothing_to_clip() -> tuple[float, bool]:
    model = nn.Linear(2, 2)
    boosted = compose(dp(), clip(1.0))(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = boosted.gather()
    boosted.update()
    after = boosted.gather()
    same = before is None or all(
        torch.equal(after["params"][n], p) for n, p in before["params"].items()
    )
    return float(boosted.grad_norm), same


def test_an_update_without_gradients_is_nothing(world2: World) -> None:
    assert world2.run(nothing_to_clip) == [(0.0, True)] * 2


def uneven_gradients() -> tuple[list[float], bool]:
    """A rank whose part of a parameter is empty still takes part in the sum."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False).double()
    boosted = compose(zero(3), clip(1.0))(model, torch.optim.SGD(model.parameters(), lr=0.1))
    boosted.train_step(lambda m, x: m(x).sum() / len(x), boosted.shard(torch.ones(4, 3).double()))
    return [float(boosted.grad_norm)], boosted.params["weight"].to_local().numel() == 0


def test_ranks_that_hold_nothing_take_part(world4: World) -> None:
    rows = world4.run(uneven_gradients)
    assert [row[0] for row in rows] == [[pytest.approx(math.sqrt(3))]] * 4
    assert [row[1] for row in rows] == [False, True, True, True]


# -- other bounds


def bounded(transform: Transform) -> Any:
    model = gpt()
    boosted = transform(model, toys.momentum(model))
    boosted.grad(toys.next_token, boosted.shard(toys.tokens(4)))
    before = {n: g.clone() for n, g in boosted.grads.items()}
    boosted.update()
    same = all(torch.equal(local(g), local(before[n])) for n, g in boosted.grads.items())
    return float(boosted.grad_norm), same, boosted.gather()


def one_process_bounded(order: float, max_norm: float | None, value: float | None) -> Any:
    model = gpt()
    optimizer = toys.momentum(model)
    total, count = toys.next_token(model, toys.tokens(4))
    (total / count).backward()
    norm = nn.utils.get_total_norm(
        [p.grad for p in model.parameters() if p.grad is not None], order
    )
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    if value is not None:
        nn.utils.clip_grad_value_(model.parameters(), value)
    optimizer.step()
    return float(norm), {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("said", "order", "max_norm", "value"),
    [
        (clip(0.01, norm_type="inf"), math.inf, 0.01, None),
        (clip(0.01, norm_type=math.inf, value=0.001), math.inf, 0.01, 0.001),
        (clip(value=0.002), 2.0, None, 0.002),
        (clip(0.1, norm_type=2.0), 2.0, 0.1, None),
    ],
    ids=repr,
)
@pytest.mark.parametrize("layout", [dp(), zero(3), tp(2)], ids=repr)
def test_other_bounds_are_those_of_one_process(
    said: Transform,
    order: float,
    max_norm: float | None,
    value: float | None,
    layout: Transform,
    world2: World,
) -> None:
    expected, params = one_process_bounded(order, max_norm, value)
    rows = world2.run(bounded, compose(layout, said))
    norm, same, whole = rows[0]
    assert norm == rows[1][0] == pytest.approx(expected, rel=CLOSE)
    assert not same
    for name, p in params.items():
        assert (whole["params"][name] - p).abs().max() < CLOSE


@pytest.mark.parametrize("order", [2, "inf"])
def test_a_gradient_at_the_bound_is_left_bit_for_bit(order: Any, world2: World) -> None:
    ((norm, _, _), _) = world2.run(bounded, compose(zero(2), clip(1e9, norm_type=order)))
    for bound in (norm, norm * (1 + 1e-9)):  # nearer than torch's 1e-6 in the divisor
        for _, same, _ in world2.run(bounded, compose(zero(2), clip(bound, norm_type=order))):
            assert same


def exchanges(transform: Transform) -> list[int]:
    """The sizes of what an update sums over the ranks."""
    import torch.distributed as dist

    model = gpt()
    boosted = transform(model, toys.momentum(model))
    boosted.grad(toys.next_token, boosted.shard(toys.tokens(4)))
    sizes: list[int] = []
    real = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(tensor.numel())
        return real(tensor, *args, **options)

    dist.all_reduce = counting
    try:
        boosted.update()
    finally:
        dist.all_reduce = real
    return sorted(sizes)


@pytest.mark.parametrize("layout", [dp(), zero(3), tp(2)], ids=repr)
def test_it_costs_one_number(layout: Transform, world2: World) -> None:
    without = world2.run(exchanges, layout)[0]
    clipped = world2.run(exchanges, compose(layout, clip(0.1, value=1.0)))[0]
    assert sorted([*without, 1]) == clipped


# -- norms that are not finite


def poisoned(transform: Transform, poison: float) -> Any:
    import torch.distributed as dist

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    boosted = transform(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    x = torch.ones(2, 3).double()
    boosted.train_step(lambda m, x: m(x).square().sum(), x)
    before = boosted.gather()
    boosted.grad(lambda m, x: m(x).square().sum(), x)
    if dist.get_rank() == 1:  # on one rank only: all must find it
        local(boosted.params["1.weight"].grad).fill_(poison)
    text = ""
    try:
        boosted.update()
    except StepError as error:
        text = str(error)
    boosted.zero_grad()
    after = boosted.gather()
    same = before is None or all(
        torch.equal(after["params"][n], p) for n, p in before["params"].items()
    )
    return text, same, boosted.took_place, boosted.step


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("order", [2, "inf"])
def test_a_norm_that_is_not_finite_raises_with_names(
    poison: float, order: Any, world2: World
) -> None:
    rows = world2.run(poisoned, compose(zero(3), clip(1.0, norm_type=order)), poison)
    shown = "inf" if order == "inf" else str(poison)
    for text, same, _, step in rows:
        assert text == (
            f"the norm of the gradients is {shown}: not finite are those of 1.weight. Nothing was "
            "updated.\n\nLower the learning rate, look at the batch and the loss, or go on without "
            "such steps: clip(..., nonfinite='skip')."
        )
        assert same
        assert step == 1


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("order", [2, "inf"])
def test_or_is_skipped(poison: float, order: Any, world2: World) -> None:
    said = clip(1.0, norm_type=order, nonfinite="skip")
    assert world2.run(poisoned, compose(zero(3), said), poison) == [("", True, False, 1)] * 2


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_or_is_taken_as_zero(poison: float, world2: World) -> None:
    rows = world2.run(poisoned, compose(zero(3), clip(1.0, nonfinite="zero")), poison)
    for text, _, took_place, step in rows:
        assert (text, took_place, step) == ("", True, 2)
    assert not rows[0][1]  # momentum goes on


def deciding_alone() -> bool:
    """The planted fault: each rank looks at its own part of the norm."""
    from parallax.step import lower

    real = lower.total_norm
    lower.total_norm = lambda parts, order, device: torch.linalg.vector_norm(torch.stack(parts))
    try:
        return poisoned(compose(zero(3), clip(1.0, nonfinite="skip")), float("nan"))[2]
    finally:
        lower.total_norm = real


def test_a_rank_that_decides_alone_would_be_seen(world2: World) -> None:
    assert world2.run(deciding_alone) == [True, False]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (clip, "clip was given no bound. Give max_norm, or value=, or both."),
        (
            lambda: clip(1.0, norm_type=3),
            "clip was given norm_type=3. Choose one of 2, 'inf'.",
        ),
        (
            lambda: clip(1.0, nonfinite="ignore"),  # type: ignore[arg-type]
            "clip was given nonfinite='ignore'. Choose one of 'raise', 'skip', 'zero'.",
        ),
        (
            lambda: clip(value=-1),
            (
                "clip was given value=-1. Give a positive number; to leave gradients as they "
                "are, leave "
                "clip out."
            ),
        ),
    ],
)
def test_other_wrong_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match="clip was given") as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), True, "1"])
def test_a_bound_is_a_positive_number(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^clip was given") as caught:
        clip(value)
    assert str(caught.value) == (
        f"clip was given max_norm={value!r}. Give a positive number; to leave gradients as they "
        "are, leave clip out."
    )


# -- order -----------------------------------------------------------------------------------------

FOUR = (tp(2), zero(2), bf16, clip(1.0))


def losses_of_every_order(others: bool) -> list[list[float]]:
    orders = list(itertools.permutations(FOUR))
    if others:  # the planted difference
        orders = [orders[0], (*FOUR[:2], fp32, FOUR[3])]
    found = []
    for order in orders:
        torch.manual_seed(0)
        model = toys.Gpt(tied=True)
        boosted = compose(*order)(model, toys.adamw(model))
        found.append(
            [
                float(boosted.train_step(toys.next_token, boosted.shard(toys.tokens(4, step))))
                for step in range(2)
            ]
        )
    return found


def test_every_order_gives_bitwise_the_same_losses(world4: World) -> None:
    for found in world4.run(losses_of_every_order, False):
        assert len(found) == 24
        assert found == [found[0]] * 24
        assert len(set(found[0])) == 2


def test_another_composition_gives_others(world4: World) -> None:
    one, other = world4.run(losses_of_every_order, True)[0]
    assert one != other


def test_one_rank_is_a_world_too() -> None:
    (found,) = pool(1).run(clipped, compose(zero(2), dp(), tp(1), clip(0.1)), 2)
    norms, params = one_process(0.1, 2)
    assert found[0] == pytest.approx(norms, rel=CLOSE)
    whole = found[1]["params"]
    assert all((whole[n] - p).abs().max() < CLOSE for n, p in params.items() if p.numel())
