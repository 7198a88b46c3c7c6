"""One step over unequal parts, by train_step and by hand, whole and in micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallax import (
    Boosted,
    DataError,
    ParallaxError,
    Transform,
    clip,
    compose,
    dp,
    fp32,
    mixed_precision,
    tp,
    zero,
)
from parallax.core.slices import box, cut, local
from parallax.core.step import rows_of
from parallax.testing import World, toys

pytestmark = pytest.mark.ranks
STAGES = [dp(), zero(1), zero(2), zero(3)]
# float64: the ranks' sums are added in another order than one process adds them, a few roundings
# of 1.1e-16 of numbers below 10; a fault (a missing row, a weight of 1/2) is of size 1e-2 and more.
CLOSE = 1e-12


def caught(work: Callable[[], Any]) -> tuple[str, str]:
    try:
        work()
    except ParallaxError as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return toys.Gpt(tied=True, scalar=True).double()


def boosted_gpt(transform: Transform) -> Boosted:
    model = gpt()
    return transform(model, torch.optim.SGD(model.parameters(), lr=0.1))


def rows_from(batch: Any, start: int, end: int) -> Any:
    return {name: x[start:end] for name, x in batch.items()}


def far(boosted: Boosted, reference: nn.Module) -> float:
    """Largest difference of this rank's parameters to the reference's."""
    return apart(boosted.params, dict(reference.named_parameters()))


def far_gradients(boosted: Boosted, reference: nn.Module) -> float:
    """Largest difference of this rank's gradients to the reference's."""
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    grads = boosted.grads
    assert set(grads) == set(expected)
    return apart(grads, expected)


@torch.no_grad()
def apart(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(
        float((local(x) - expected[n][box(x).window]).abs().max())
        for n, x in mine.items()
        if local(x).numel()
    )


def mean_of(model: nn.Module, batch: Any, loss_fn: Any) -> Tensor:
    out = loss_fn(model, batch)
    return out[0] / out[1] if isinstance(out, tuple) else out


def uneven(
    transform: Transform, shares: list[int], loss_fn: Any, plant: bool
) -> tuple[float, float]:
    """Error of loss and of parameters after one step on so many rows a rank."""
    boosted, reference = boosted_gpt(transform), gpt()
    batch = toys.tokens(sum(shares), 1)
    start = sum(shares[: dist.get_rank()])
    mine = rows_from(batch, start, start + shares[dist.get_rank()])
    if plant:  # the usual mistake: a mean of means
        loss = mean_of(boosted.model, mine, loss_fn)
        loss.backward()
        boosted.update()
    else:
        loss = boosted.train_step(loss_fn, mine)
    expected = mean_of(reference, batch, loss_fn)
    expected.backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    return float((loss - expected.detach()).abs()), far(boosted, reference)


@pytest.mark.parametrize("transform", STAGES, ids=repr)
@pytest.mark.parametrize("loss_fn", [toys.next_token, toys.mean_next_token])
def test_rows_count_alike_wherever_they_are(
    transform: Transform, loss_fn: Any, world2: World
) -> None:
    for shares in ([3, 3], [5, 1], [4, 0]):
        for loss, params in world2.run(uneven, transform, shares, loss_fn, False):
            assert loss < CLOSE, shares
            assert params < CLOSE, shares


def test_a_rank_without_rows_under_a_tensor_axis(world4: World) -> None:
    def run() -> tuple[float, float]:
        boosted, reference = boosted_gpt(compose(tp(2), zero(2))), gpt()
        batch = toys.tokens(3, 1)
        mine = rows_from(batch, 0, 3 if dist.get_rank() < 2 else 0)
        loss = boosted.train_step(toys.next_token, mine)
        expected = mean_of(reference, batch, toys.next_token)
        expected.backward()
        torch.optim.SGD(reference.parameters(), lr=0.1).step()
        return float((loss - expected.detach()).abs()), far(boosted, reference)

    for loss, params in world4.run(run):
        assert loss < CLOSE
        assert params < CLOSE


@pytest.mark.parametrize("loss_fn", [toys.next_token, toys.mean_next_token])
def test_a_mean_of_means_would_be_seen(loss_fn: Any, world2: World) -> None:
    assert min(p for _, p in world2.run(uneven, zero(2), [5, 1], loss_fn, True)) > 1e-6


@pytest.mark.parametrize("shares", [[5, 1], [3, 2], [2, 1]], ids=repr)
def test_a_hand_written_loop_weighs_by_rows(shares: list[int], world2: World) -> None:
    def run() -> float:
        boosted, reference = boosted_gpt(zero(2)), gpt()
        batch = toys.tokens(sum(shares), 1)
        start = sum(shares[: dist.get_rank()])
        mine = rows_from(batch, start, start + shares[dist.get_rank()])
        boosted.backward(toys.mean_next_token(boosted.model, mine))
        boosted.update()
        mean_of(reference, batch, toys.mean_next_token).backward()
        torch.optim.SGD(reference.parameters(), lr=0.1).step()
        return far(boosted, reference)

    assert max(world2.run(run)) < CLOSE


class Once(torch.autograd.Function):
    """A backward that raises the first time."""

    raised = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if not Once.raised:
            Once.raised = True
            raise RuntimeError("interrupted")
        return grad


def interrupted(transform: Transform, fallback: bool) -> tuple[str, float]:
    """Train on after a backward that raised half-way."""
    Once.raised = False
    boosted, reference = boosted_gpt(transform), gpt()
    boosted.model.blocks[0].register_forward_hook(lambda m, a, o: Once.apply(o))
    if fallback:  # as in torch 2.11, which has no way of its own to start over
        from torch.distributed.fsdp import FSDPModule

        del FSDPModule.reset_iter_state
    batch = toys.tokens(4, 1)
    told = ""
    try:
        boosted.train_step(toys.mean_next_token, boosted.shard(batch))
    except RuntimeError as error:
        told = str(error)
    boosted.train_step(toys.mean_next_token, boosted.shard(batch))
    mean_of(reference, batch, toys.mean_next_token).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    return told, far(boosted, reference)


@pytest.mark.parametrize("transform", STAGES, ids=repr)
def test_an_interrupted_backward_leaves_nothing_behind(transform: Transform, world2: World) -> None:
    for told, error in world2.run(interrupted, transform, False):
        assert told == "interrupted"
        assert error < CLOSE


def by_hand(transform: Transform, form: str) -> float:
    """Gradients of a hand-written loop against one process's."""
    boosted, reference = boosted_gpt(transform), gpt()
    batch = toys.tokens(4, 2)
    mine = boosted.shard(batch)
    total, count = toys.next_token(boosted.model, mine)
    if form == "count":
        boosted.backward(total, count=count)
        mean_of(reference, batch, toys.next_token).backward()
    else:
        boosted.backward(toys.mean_next_token(boosted.model, mine))
        toys.mean_next_token(reference, batch).backward()
    return far_gradients(boosted, reference)


@pytest.mark.parametrize("form", ["count", "mean"])
@pytest.mark.parametrize("transform", [*STAGES, tp(2)], ids=repr)
def test_backward_by_hand(transform: Transform, form: str, world2: World) -> None:
    assert max(world2.run(by_hand, transform, form)) < CLOSE


def accumulated(transform: Transform, forget: bool) -> tuple[float, float | None]:
    """Four micro-batches, three of them inside no_sync, against one big backward."""
    boosted, reference = boosted_gpt(transform), gpt()
    batch = toys.tokens(8, 3)
    parts = [rows_from(batch, 2 * i, 2 * i + 2) for i in range(4)]
    for part in parts[1:] if forget else parts:
        mine = boosted.shard(part)
        last = part is parts[-1]
        if last:
            boosted.backward(toys.mean_next_token(boosted.model, mine) / 4)
        else:
            with boosted.no_sync():
                boosted.backward(toys.mean_next_token(boosted.model, mine) / 4)
    boosted.optimizer.step()
    toys.mean_next_token(reference, batch).backward()
    nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    boosted.zero_grad()
    # A second window must start from nothing.
    boosted.backward(toys.mean_next_token(boosted.model, boosted.shard(batch)))
    reference.zero_grad()
    toys.mean_next_token(reference, batch).backward()
    again = far_gradients(boosted, reference)
    return far(boosted, reference), again


@pytest.mark.parametrize("transform", STAGES, ids=repr)
def test_no_sync_is_one_big_backward(transform: Transform, world2: World) -> None:
    for params, again in world2.run(accumulated, compose(transform, clip(0.5)), False):
        assert params < CLOSE
        assert again < CLOSE


def test_no_sync_is_one_big_backward_over_a_tensor_axis(world4: World) -> None:
    for params, again in world4.run(accumulated, compose(tp(2), zero(3), clip(0.5)), False):
        assert params < CLOSE
        assert again < CLOSE


def test_a_forgotten_micro_batch_would_be_seen(world2: World) -> None:
    assert min(p for p, _ in world2.run(accumulated, compose(zero(2), clip(0.5)), True)) > 1e-6


def step_inside(transform: Transform) -> tuple[str, str]:
    boosted = boosted_gpt(transform)
    with boosted.no_sync():
        boosted.backward(toys.mean_next_token(boosted.model, boosted.shard(toys.tokens(4))))
    return caught(boosted.optimizer.step)


@pytest.mark.parametrize("transform", STAGES, ids=repr)
def test_stepping_on_unreduced_gradients_is_refused(transform: Transform, world2: World) -> None:
    for kind, text in world2.run(step_inside, transform):
        assert kind == "StepError"
        first, _, remedy = text.partition(" was added up")
        name = first.removeprefix("the gradient of ")
        assert name in dict(gpt().named_parameters())
        assert remedy == (
            " inside no_sync() and never reduced over the data ranks.\n\n"
            "Run the last backward of the window outside no_sync(), then step."
        )


def forgetting(transform: Transform) -> float:
    """A gradient added up inside no_sync is gone after zero_grad."""
    boosted, reference = boosted_gpt(transform), gpt()
    with boosted.no_sync():
        boosted.backward(toys.mean_next_token(boosted.model, boosted.shard(toys.tokens(4, 0))))
    boosted.zero_grad()
    boosted.backward(toys.mean_next_token(boosted.model, boosted.shard(toys.tokens(4, 1))))
    toys.mean_next_token(reference, toys.tokens(4, 1)).backward()
    return far_gradients(boosted, reference)


@pytest.mark.parametrize(
    "transform", [*STAGES, compose(zero(2), mixed_precision("fp64", reduce="fp64"))], ids=repr
)
def test_zero_grad_forgets_what_no_sync_added_up(transform: Transform, world2: World) -> None:
    assert max(world2.run(forgetting, transform)) < CLOSE


REDUCTIONS = [n for n in ("reduce_scatter_tensor", "reduce_scatter_single") if hasattr(dist, n)]


def reductions(transform: Transform) -> tuple[int, int]:
    """Gradient reductions inside no_sync, and after it, of a window of three micro-batches."""
    boosted = boosted_gpt(transform)
    calls: list[str] = []
    real = {name: getattr(dist, name) for name in REDUCTIONS}
    inside = 0

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return real[name](*args, **kwargs)

        return call

    for name in REDUCTIONS:
        setattr(dist, name, counted(name))
    try:
        for i in range(2):
            with boosted.no_sync():
                part = boosted.shard(toys.tokens(4, i))
                boosted.backward(toys.mean_next_token(boosted.model, part))
        inside = len(calls)
        boosted.backward(toys.mean_next_token(boosted.model, boosted.shard(toys.tokens(4, 2))))
        boosted.update()
    finally:
        for name in REDUCTIONS:
            setattr(dist, name, real[name])
    return inside, len(calls) - inside


def test_no_sync_does_not_communicate_gradients(world2: World) -> None:
    units = 3  # two blocks and the root
    assert world2.run(reductions, zero(1)) == [(0, units)] * 2


# -- what a loss may be ----------------------------------------------------------------------------


def loss_of(make: Any) -> tuple[str, str]:
    boosted = boosted_gpt(zero(2))
    return caught(lambda: boosted.train_step(make, boosted.shard(toys.tokens(4))))


FORMS = {
    "a tensor of shape (2, 6, 24)": lambda m, b: m(b["tokens"]),
    "a float": lambda m, b: float(toys.mean_next_token(m, b)),
    "a NoneType": lambda m, b: None,
    "a dict": lambda m, b: {"loss": toys.mean_next_token(m, b)},
    "a tuple": lambda m, b: (toys.mean_next_token(m, b), 1, 2),
}


@pytest.mark.parametrize("what", list(FORMS))
def test_a_loss_of_another_form_is_named(what: str, world2: World) -> None:
    for kind, text in world2.run(loss_of, FORMS[what]):
        assert kind == "StepError"
        assert text == (
            f"the loss function returned {what}.\n\n"
            "Return the mean loss as a scalar tensor, or the pair (sum, count)."
        )


def test_rows_that_disagree_are_named() -> None:
    with pytest.raises(DataError) as caught_error:
        rows_of({"x": torch.zeros(3, 2), "y": [torch.zeros(2), torch.zeros(())]})
    assert str(caught_error.value) == (
        "the first dims of the batch's tensors differ (x: 3, y/0: 2), so it cannot be told how "
        "many samples this rank holds.\n\nGive every tensor the batch as first dim, or let the "
        "loss function return the pair (sum, count)."
    )
    assert rows_of({"x": 3, "y": None}) is None
    assert rows_of((torch.zeros(3, 2), torch.zeros(3), "text")) == 3


def test_cut_gives_every_row_to_one_rank() -> None:
    for rows in range(9):
        for ranks in range(1, 5):
            parts = [cut(rows, ranks, rank) for rank in range(ranks)]
            assert [i for start, end in parts for i in range(start, end)] == list(range(rows))
            lengths = [end - start for start, end in parts]
            assert max(lengths) - min(lengths) <= 1
            assert lengths == sorted(lengths, reverse=True)


def sharded(transform: Transform) -> Any:
    boosted = boosted_gpt(transform)
    batch = {"x": torch.arange(7), "pair": (torch.arange(14).view(7, 2), None), "name": "n", "k": 3}
    part = boosted.shard(batch)
    assert (part["name"], part["k"], part["pair"][1]) == ("n", 3, None)
    return part["x"].tolist(), part["pair"][0][:, 0].tolist(), boosted.shard("no tensor")


def test_shard_cuts_any_tree_over_the_data_axes(world4: World) -> None:
    rows = world4.run(sharded, compose(tp(2), zero(2)))
    assert [row[0] for row in rows] == [[0, 1, 2, 3]] * 2 + [[4, 5, 6]] * 2
    assert all(row[1] == [2 * i for i in row[0]] and row[2] == "no tensor" for row in rows)


# -- evaluation ------------------------------------------------------------------------------------


def evaluated(transform: Transform) -> tuple[float, float, bool, float]:
    torch.manual_seed(0)
    model = toys.Gpt(dropout=0.5).double()
    boosted = transform(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = toys.tokens(5, 4)
    before = float(boosted.eval_step(toys.next_token, boosted.shard(batch)))
    boosted.train_step(toys.next_token, boosted.shard(batch))
    after = float(boosted.eval_step(toys.next_token, boosted.shard(batch)))
    torch.manual_seed(0)
    reference = toys.Gpt(dropout=0.5).double().eval()
    expected = float(mean_of(reference, batch, toys.next_token).detach())
    return before, after, all(m.training for m in model.modules()), expected


@pytest.mark.parametrize("transform", [dp(), zero(2), zero(3)], ids=repr)
def test_evaluation_sees_the_current_weights(transform: Transform, world2: World) -> None:
    for before, after, training, expected in world2.run(evaluated, transform):
        assert abs(before - expected) < CLOSE
        assert abs(after - before) > 1e-4
        assert training


def without_optimizer() -> tuple[tuple[str, str], int]:
    boosted = zero(2)(gpt())
    boosted.grad(toys.next_token, boosted.shard(toys.tokens(4)))
    return caught(boosted.update), len(boosted.grads)


def test_gradients_without_an_optimizer(world2: World) -> None:
    for (kind, text), count in world2.run(without_optimizer):
        assert kind == "StepError"
        assert count == len(list(gpt().parameters()))
        assert text == (
            "this model was boosted without an optimizer, so there is nothing to step.\n\n"
            "Give one: transform(model, optimizer)."
        )


def counted_steps() -> list[int]:
    boosted = boosted_gpt(compose(zero(2), fp32))
    found = [boosted.step]
    boosted.train_step(toys.next_token, boosted.shard(toys.tokens(4)))
    found.append(boosted.step)
    boosted.backward(toys.mean_next_token(boosted.model, boosted.shard(toys.tokens(4))))
    boosted.optimizer.step()
    return [*found, boosted.step]


def test_updates_are_counted(world2: World) -> None:
    assert world2.run(counted_steps) == [[0, 1, 2]] * 2
