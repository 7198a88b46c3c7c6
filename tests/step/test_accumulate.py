"""A batch in parts gives what the whole batch gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax import (
    DataError,
    MicroBatches,
    RuleError,
    StepError,
    Transform,
    accumulate,
    clip,
    compose,
    dp,
    fp16,
    mixed_precision,
    tp,
    zero,
)
from parallax.core.slices import local
from parallax.testing import World, pool, toys

# float64 gradients of the same numbers; only the order of sums differs.
CLOSE = 1e-12


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return toys.Gpt(tied=True, scalar=True, counts=False).double()


def run(transform: Transform, rows: int, loss_name: str, steps: int = 3) -> tuple[Any, ...]:
    model = gpt()
    boosted = transform(model, toys.momentum(model))
    loss_fn = getattr(toys, loss_name)
    losses = [
        float(boosted.train_step(loss_fn, boosted.shard(toys.tokens(rows, step))))
        for step in range(steps)
    ]
    return losses, boosted.gather(), boosted.step


def apart(one: Any, two: Any) -> float:
    return max(
        float((one["params"][n] - p).abs().max()) for n, p in two["params"].items() if p.numel()
    )


@pytest.mark.ranks
@pytest.mark.parametrize("loss_name", ["next_token", "mean_next_token"])
@pytest.mark.parametrize(
    ("transform", "parts", "rows"),
    [
        (dp(), "accumulate(2)", 8),
        (zero(1), "accumulate(3)", 8),  # rows do not divide
        (zero(2), "accumulate(4)", 5),  # some parts have no rows on some ranks
        (zero(3), "accumulate(7)", 5),  # and some parts have none on any rank
        (zero(2), "accumulate(2, reduce='step')", 8),
        (zero(1), "accumulate(2, reduce='microbatch')", 8),
        (compose(zero(2), clip(0.1)), "accumulate(2)", 7),
    ],
    ids=repr,
)
def test_parts_give_what_the_whole_gives(
    transform: Transform, parts: str, rows: int, loss_name: str, world2: World
) -> None:
    from parallax import parse

    whole, in_parts = (
        world2.run(run, compose(transform, extra), rows, loss_name)[0]
        for extra in (compose(), parse(parts))
    )
    assert whole[0] == pytest.approx(in_parts[0], rel=CLOSE)
    assert apart(whole[1], in_parts[1]) < CLOSE
    assert in_parts[2] == 3  # updates, not parts


@pytest.mark.ranks
def test_on_four_ranks_with_tensor_parallelism(world4: World) -> None:
    whole, in_parts = (
        world4.run(run, compose(tp(2), zero(2), extra), 7, "next_token")[0]
        for extra in (compose(), accumulate(3))
    )
    assert apart(whole[1], in_parts[1]) < CLOSE


def reductions(transform: Transform) -> tuple[int, int]:
    """How many gradient reductions a step makes, and one on the whole batch."""
    import torch.distributed as dist

    counts = []
    for extra in (accumulate(3), compose()):
        model = gpt()
        boosted = compose(transform, extra)(model, toys.momentum(model))
        batch = boosted.shard(toys.tokens(6))
        boosted.train_step(toys.next_token, batch)
        seen = [0]
        wrapped = {}
        newer = hasattr(dist, "reduce_scatter_single")  # what torch 2.13 calls it
        scatter = "reduce_scatter_single" if newer else "reduce_scatter_tensor"
        for name in (scatter, "all_reduce"):
            real = wrapped[name] = getattr(dist, name)

            def counting(*args: Any, real: Any = real, seen: Any = seen, **kwargs: Any) -> Any:
                tensor = args[0] if args else kwargs["output"]
                seen[0] += tensor.numel() > 2  # losses and norms are one or two numbers
                return real(*args, **kwargs)

            setattr(dist, name, counting)
        try:
            boosted.train_step(toys.next_token, batch)
        finally:
            for name, real in wrapped.items():
                setattr(dist, name, real)
        counts.append(seen[0])
    return counts[0], counts[1]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("transform", "times"), [(dp(), 1), (zero(1), 1), (zero(2), 3), (zero(3), 3)], ids=repr
)
def test_gradients_are_reduced_as_often_as_the_stage_says(
    transform: Transform, times: int, world2: World
) -> None:
    for parts, whole in world2.run(reductions, transform):
        assert whole > 0
        assert parts == times * whole


def windows(transform: Transform) -> tuple[list[int], list[float], Any, list[float], Any]:
    """Micro-batches that come one by one, the last window short, and the same rows at once."""
    micro = [toys.tokens(4, seed) for seed in range(5)]
    model = gpt()
    boosted = compose(transform, accumulate(2))(model, toys.momentum(model))
    mine = [boosted.shard(batch) for batch in micro]
    lengths, losses = [], []
    for window in boosted.windows(mine):
        lengths.append(len(window))
        losses.append(float(boosted.train_step(toys.next_token, window)))
    reference = gpt()
    optimizer = toys.momentum(reference)
    expected = []
    for rows in (micro[0:2], micro[2:4], micro[4:5]):
        batch = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
        total, count = toys.next_token(reference, batch)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(total.detach() / count))
    return (
        lengths,
        losses,
        boosted.gather(),
        expected,
        {"params": {n: p.detach() for n, p in reference.named_parameters()}},
    )


@pytest.mark.ranks
@pytest.mark.parametrize("transform", [dp(), zero(2)], ids=repr)
def test_the_last_window_is_short_and_exact(transform: Transform, world2: World) -> None:
    lengths, losses, whole, expected, params = world2.run(windows, transform)[0]
    assert lengths == [2, 2, 1]
    assert losses == pytest.approx(expected, rel=CLOSE)
    assert apart(whole, params) < CLOSE


def on_top(parts: bool) -> Any:
    """A step on gradients that were there already."""
    model = gpt()
    boosted = compose(zero(2), accumulate(2) if parts else compose())(model, toys.momentum(model))
    boosted.grad(toys.next_token, boosted.shard(toys.tokens(4, 0)))
    boosted.grad(toys.next_token, boosted.shard(toys.tokens(6, 1)))
    boosted.update()
    return boosted.gather()


@pytest.mark.ranks
def test_gradients_that_were_there_are_added_to(world2: World) -> None:
    assert apart(world2.run(on_top, True)[0], world2.run(on_top, False)[0]) < CLOSE


def one_part_forgotten() -> tuple[Any, Any]:

    whole = run(dp(), 8, "next_token")[1]
    lower = __import__("parallax.step.accumulate", fromlist=["Windows"])
    real = lower.cut
    lower.cut = lambda rows, n, i: real(rows, n, min(i, n - 2))
    try:
        return whole, run(compose(dp(), accumulate(4)), 8, "next_token")[1]
    finally:
        lower.cut = real


@pytest.mark.ranks
def test_a_part_run_twice_would_be_seen(world2: World) -> None:
    whole, planted = world2.run(one_part_forgotten)[0]
    assert apart(whole, planted) > 1e-6


# -- refusals


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_batch_norm_is_refused_unless_said() -> None:
    model = Normed()
    with pytest.raises(RuleError) as caught:
        accumulate(2)(model)
    assert str(caught.value) == (
        "accumulate(2) runs a batch in parts, and the BatchNorm norm of Normed normalises by the "
        "statistics of what it is given at once, which makes the parts another function than the "
        "whole.\n\nTrain on more ranks instead (their statistics are joined), use GroupNorm, or "
        "accept statistics of micro-batches: accumulate(2, batchnorm='microbatch')."
    )
    accumulate(2, batchnorm="microbatch")(model).grad(lambda m, x: m(x).sum(), torch.randn(4, 3))


def test_a_window_without_accumulate_is_refused() -> None:
    boosted = compose()(nn.Linear(2, 1))
    with pytest.raises(StepError) as caught:
        boosted.grad(lambda m, x: m(x).sum(), MicroBatches([torch.ones(2, 2)]))
    assert str(caught.value) == (
        "a window of 1 micro-batches was given to a composition that accumulates none.\n\nAdd "
        "accumulate(n), or give one batch."
    )
    with pytest.raises(StepError, match="which accumulates nothing"):
        boosted.windows([])


def test_a_window_that_is_too_long_is_refused() -> None:
    boosted = accumulate(2)(nn.Linear(2, 1))
    for number in (0, 3):
        with pytest.raises(DataError) as caught:
            boosted.grad(lambda m, x: m(x).sum(), MicroBatches([torch.ones(2, 2)] * number))
        assert str(caught.value) == (
            f"accumulate(2) was given windows of {number} micro-batches, by rank.\n\nGive every "
            "rank the same number, from 1 to 2."
        )


def uneven(boosted: Any = None) -> str:
    import torch.distributed as dist

    model = gpt()
    boosted = compose(dp(), accumulate(2))(model, toys.momentum(model))
    window = MicroBatches([toys.tokens(2)] * (1 + dist.get_rank()))
    try:
        boosted.train_step(toys.next_token, window)
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_unlike_windows_are_refused_on_every_rank(world2: World) -> None:
    assert (
        world2.run(uneven)
        == [
            (
                "accumulate(2) was given windows of 1, 2 micro-batches, by rank.\n\nGive every "
                "rank the "
                "same number, from 1 to 2."
            )
        ]
        * 2
    )


def test_what_cannot_be_cut_is_refused() -> None:
    boosted = accumulate(2)(nn.Linear(2, 1))
    with pytest.raises(DataError) as caught:
        boosted.grad(lambda m, x: m(torch.ones(2, 2)).sum(), "text")
    assert str(caught.value) == (
        "accumulate(2) cuts a batch along the first dim of its tensors, and this one holds no "
        "tensor with a dim.\n\nGive the parts yourself: parallax.MicroBatches([...])."
    )


def test_means_and_pairs_do_not_mix() -> None:
    boosted = accumulate(2)(nn.Linear(2, 1))
    calls = iter([True, False])

    def either(model: Any, x: Tensor) -> Any:
        return (model(x).sum(), 2) if next(calls) else model(x).mean()

    with pytest.raises(StepError) as caught:
        boosted.grad(either, torch.ones(4, 2))
    assert str(caught.value) == (
        "the loss function returned a mean for one micro-batch and a pair for another.\n\nReturn "
        "the pair (sum, count) for all, or the mean."
    )


@pytest.mark.parametrize("number", [0, -1, True, 1.5, "2"])
def test_the_number_of_parts_is_a_positive_whole_one(number: Any) -> None:
    with pytest.raises(ValueError, match="accumulate was given") as caught:
        accumulate(number)
    assert str(caught.value) == (
        f"accumulate was given {number!r} micro-batches. Give a whole number, 1 or more."
    )


def waiting() -> str:
    model = gpt()
    boosted = compose(zero(2), accumulate(2))(model, toys.momentum(model))
    batch = boosted.shard(toys.tokens(4))
    with boosted.no_sync():
        boosted.grad(toys.next_token, batch)
    try:
        boosted.grad(toys.next_token, batch)
    except StepError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_pairs_over_gradients_that_wait_are_refused(world2: World) -> None:
    assert (
        world2.run(waiting)
        == [
            (
                "a window of micro-batches with a loss of pairs (sum, count) was run while "
                "gradients from "
                "before wait for their reduction, inside no_sync(): the window's count is known "
                "at its end "
                "only.\n\nLeave no_sync() out: accumulate reduces as seldom by itself."
            )
        ]
        * 2
    )


def unused_unit(transform: Transform) -> int:
    torch.manual_seed(0)
    model = toys.Gpt(unused=True, counts=False)
    boosted = transform(model, toys.momentum(model))
    for step in range(2):
        boosted.train_step(toys.next_token, boosted.shard(toys.tokens(6, step)))
        with boosted.no_sync():
            total, count = toys.next_token(boosted.model, boosted.shard(toys.tokens(4)))
            boosted.backward(total, count=count)
        boosted.zero_grad()
    return boosted.step


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 3])
def test_a_unit_that_no_forward_runs_is_left_out(stage: Any, world2: World) -> None:
    said = compose(
        zero(stage, units="Linear"), mixed_precision("bf16"), accumulate(3, reduce="step")
    )
    assert world2.run(unused_unit, said) == [2, 2]


# -- counts that say little


def first_part_without_tokens(transform: Transform) -> tuple[list[bool], list[float]]:
    """The first half of each batch counts one token, or none."""

    def loss_fn(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        squares = model(batch["x"]).square().sum(1) * batch["counted"]
        return squares.sum(), batch["counted"].sum()

    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    boosted = transform(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    found, losses = [], []
    for step in range(6):
        counted = torch.ones(4096)
        counted[:2048] = 0
        counted[0] = step % 2
        x = torch.randn(4096, 8, generator=torch.Generator().manual_seed(step))
        losses.append(float(boosted.train_step(loss_fn, {"x": x, "counted": counted})))
        found.append(boosted.took_place)
    return found, losses


def test_magnitudes_are_those_of_the_whole_batch() -> None:
    """Divided by the first part's one token, float16 would overflow in every step."""
    run = pool(1).run
    ((whole, losses),) = run(first_part_without_tokens, compose(fp16))
    ((parts, mine),) = run(first_part_without_tokens, compose(fp16, accumulate(2)))
    assert whole == [True] * 6
    assert parts[3:] == [True] * 3  # the first window knows of no other count yet
    assert mine[0] == pytest.approx(losses[0], rel=1e-6)


def small_dtype(transform: Transform) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = toys.Gpt(counts=False).to(torch.bfloat16)
    boosted = transform(model, toys.momentum(model))
    boosted.grad(toys.next_token, boosted.shard(toys.tokens(6)))
    return {n: local(g).float().clone() for n, g in boosted.grads.items()}


def test_what_remains_to_multiply_by_is_not_rounded_to_a_small_dtype() -> None:
    """A factor in bfloat16 would be off by up to 1 / 256 the same way for all."""
    run = pool(1).run
    ((whole),) = run(small_dtype, dp())
    ((parts),) = run(small_dtype, compose(dp(), accumulate(2)))
    ratio = [float(parts[n].norm() / g.norm()) for n, g in whole.items() if g.norm() > 0]
    assert sum(ratio) / len(ratio) == pytest.approx(1, abs=5e-4)
