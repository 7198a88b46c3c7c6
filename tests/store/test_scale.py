"""The loss scale of float16: agreed over ranks, invisible in gradients, restored from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallax import (
    StepError,
    accumulate,
    clip,
    compose,
    dp,
    fp16,
    fp32,
    mixed_precision,
    override,
    zero,
)
from parallax.testing import World, toys

pytestmark = pytest.mark.ranks
# fp16's loss scale in exact arithmetic: powers of two round nothing, so numbers are the same.
SCALED_FP64 = override(fp16, mixed_precision("fp64"))


def gpt(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return toys.Gpt(scalar=True, **options)


def trained(transform: Any, steps: int = 3) -> Any:
    model = gpt().double()
    boosted = compose(transform, clip(0.1))(model, toys.adamw(model))
    norms, grads = [], []
    for step in range(steps):
        boosted.grad(toys.next_token, boosted.shard(toys.tokens(4, step)))
        # Reading them between, and adding to them, must not change what the update sees.
        grads.append({n: float(g.abs().sum()) for n, g in boosted.grads.items()})
        boosted.grad(toys.next_token, boosted.shard(toys.tokens(4, step + 9)))
        boosted.update()
        boosted.zero_grad()
        norms.append(float(boosted.grad_norm))
    return norms, grads, boosted.gather()


@pytest.mark.parametrize("transform", [dp(), zero(1), zero(2), zero(3)], ids=repr)
def test_a_scale_changes_no_number(transform: Any, world2: World) -> None:
    plain = world2.run(trained, compose(transform, mixed_precision("fp64")))
    scaled = world2.run(trained, compose(transform, SCALED_FP64))
    for one, two in zip(plain, scaled, strict=True):
        assert one[0] == two[0]
        assert one[1] == two[1]
    for name, value in plain[0][2]["params"].items():
        assert torch.equal(value, scaled[0][2]["params"][name])


def in_parts(transform: Any) -> Any:
    """Gradients that were read, and so unscaled, under a window that puts them aside."""
    model = gpt(counts=False).double()
    boosted = compose(transform, accumulate(2))(model, toys.momentum(model))
    boosted.grad(toys.next_token, boosted.shard(toys.tokens(4, 0)))
    _ = boosted.grads
    boosted.grad(toys.next_token, boosted.shard(toys.tokens(4, 1)))
    boosted.update()
    return boosted.gather()


def test_windows_over_gradients_that_were_read(world2: World) -> None:
    plain = world2.run(in_parts, compose(zero(2), mixed_precision("fp64")))[0]
    scaled = world2.run(in_parts, compose(zero(2), SCALED_FP64))[0]
    for name, value in plain["params"].items():
        assert torch.equal(value, scaled["params"][name])


def by_hand(transform: Any) -> Any:
    model = gpt().double()
    boosted = transform(model, toys.momentum(model))
    with boosted.no_sync():
        total, count = toys.next_token(boosted.model, boosted.shard(toys.tokens(4, 0)))
        boosted.backward(total, count=count)
    total, count = toys.next_token(boosted.model, boosted.shard(toys.tokens(4, 1)))
    boosted.backward(total, count=count)
    boosted.optimizer.step()
    boosted.optimizer.zero_grad()
    return boosted.gather()


@pytest.mark.parametrize("transform", [dp(), zero(2), zero(3)], ids=repr)
def test_hand_written_loops_are_scaled_too(transform: Any, world2: World) -> None:
    plain = world2.run(by_hand, compose(transform, mixed_precision("fp64")))[0]
    scaled = world2.run(by_hand, compose(transform, SCALED_FP64))[0]
    for name, value in plain["params"].items():
        assert torch.equal(value, scaled["params"][name])


def overflow_on_one_rank(transform: Any) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    boosted = transform(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    seen = []

    def loss(m: Any, x: Any) -> Any:
        return (m(x).square() * 1e-3).sum() / len(x)

    for step in range(4):
        x = torch.ones(2, 4)
        if step == 1 and dist.get_rank() == 1:
            x = x * 1e4  # float16 ends at 65504
        before = boosted.gather()
        boosted.train_step(loss, x)
        after = boosted.gather()
        same = before is None or all(
            torch.equal(after["params"][n], p) for n, p in before["params"].items()
        )
        state = boosted.rooms["scale"].state
        seen.append((boosted.took_place, boosted.step, float(state["scale"]), same))
    return [*seen, boosted.rooms["scale"].notes["skipped"]]


@pytest.mark.parametrize("layout", [dp(), zero(2), zero(3)], ids=repr)
def test_all_ranks_skip_what_overflows_on_one(layout: Any, world2: World) -> None:
    said = mixed_precision("fp16", scale=1024, growth_interval=2)
    first, second = world2.run(overflow_on_one_rank, compose(layout, said))
    assert [row[:3] for row in first[:4]] == [
        (True, 1, 1024.0),
        (False, 1, 512.0),
        (True, 2, 512.0),
        (True, 3, 1024.0),  # grown after two good ones
    ]
    assert [row[:3] for row in second[:4]] == [row[:3] for row in first[:4]]
    assert [row[3] for row in first[:4]] == [False, True, False, False]
    assert first[4] == second[4] == 1


def test_a_rank_that_decides_alone_would_be_seen(world2: World) -> None:
    rows = world2.run(disagreeing_losses)
    assert rows[0] != rows[1]


def disagreeing_losses() -> list[bool]:
    """Whether each rank skips, where only rank 1's part of the gradient is not finite."""
    from parallax.store import scale

    class Alone:
        ReduceOp = dist.ReduceOp
        get_world_size = staticmethod(lambda: 1)

    model = nn.Linear(4, 4, bias=False)
    boosted = compose(zero(2), mixed_precision("fp16", scale=4))(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    real, scale.dist = scale.dist, Alone
    try:
        boosted.grad(lambda m, x: m(x).sum(), torch.ones(2, 4))
        if dist.get_rank() == 1:
            boosted.params["weight"].grad.to_local().fill_(float("inf"))
        boosted.update()
        return [boosted.took_place]
    finally:
        scale.dist = real


def at_the_least_scale() -> str:
    model = nn.Linear(4, 4)
    boosted = compose(zero(2), mixed_precision("fp16", scale=1))(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    try:
        boosted.train_step(lambda m, x: m(x).sum() * float("inf"), torch.ones(2, 4))
    except StepError as error:
        return str(error)
    return ""


def test_what_no_scale_cures_is_an_error_with_names(world2: World) -> None:
    assert (
        world2.run(at_the_least_scale)
        == [
            (
                "the gradients of weight, bias are not finite although the loss scale is at its "
                "least, 1. "
                "Nothing was updated.\n\nNo scale cures this: lower the learning rate, look at "
                "the batch "
                "and the loss, or use bf16, which has float32's range."
            )
        ]
        * 2
    )


def resumed(directory: str) -> Any:
    said = mixed_precision("fp16", scale=2048, growth_interval=3)

    def fresh(transform: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        return transform(model, torch.optim.AdamW(model.parameters(), lr=0.1))

    def loss(m: Any, x: Any) -> Any:
        return (m(x).square() * 1e-3).sum() / len(x)

    first = fresh(compose(zero(2), said))
    first.train_step(loss, torch.full((2, 4), 1e4))  # skipped: 1024
    for _ in range(2):
        first.train_step(loss, torch.ones(2, 4))
    first.save(Path(directory) / "half")
    second = fresh(compose(dp(), said))
    second.load_(Path(directory) / "half")
    restored = [float(second.rooms["scale"].state[k]) for k in ("scale", "good")]
    for boosted in (first, second):
        boosted.train_step(loss, torch.ones(2, 4))
    ends = [float(b.rooms["scale"].state["scale"]) for b in (first, second)]
    third = fresh(compose(zero(2), fp32))
    third.save(Path(directory) / "unscaled")
    second.load_(Path(directory) / "unscaled")
    return restored, ends, float(second.rooms["scale"].state["scale"])


def test_the_scale_comes_back_from_files(world2: World, tmp_path: Path) -> None:
    for restored, ends, anew in world2.run(resumed, str(tmp_path)):
        assert restored == [1024.0, 2.0]
        assert ends == [2048.0, 2048.0]  # the third good update grows it
        assert anew == 2048.0  # a run without a scale starts it anew


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"compute": "bf16", "scale": 8},
            (
                "mixed_precision('bf16') was given scale, and only fp16 scales the loss: bf16 "
                "holds "
                "small gradients as they are. Leave it out, or use fp16."
            ),
        ),
        (
            {"compute": "fp16", "scale": 1000},
            (
                "mixed_precision was given scale=1000. Give a power of two, so that scaling rounds "
                "nothing: 1024, 0.5, ..."
            ),
        ),
        (
            {"compute": "fp16", "scale": 8, "min_scale": 16},
            (
                "mixed_precision was given the loss scale 8, from 16 to 1.67772e+07. Give "
                "min_scale <= "
                "scale <= max_scale."
            ),
        ),
        (
            {"compute": "fp16", "growth": 0.5},
            ("mixed_precision was given growth=0.5. Give a growth above 1 and a backoff below 1."),
        ),
        (
            {"compute": "fp16", "growth_interval": 0},
            (
                "mixed_precision was given growth_interval=0. Give a whole number of updates, 1 or "
                "more."
            ),
        ),
    ],
)
def test_wrong_scales_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="mixed_precision") as caught:
        mixed_precision(options.pop("compute"), **options)
    assert str(caught.value) == message
