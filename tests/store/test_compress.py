"""Compressed gradients are off by what is said and no more, and take the right way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from parallax import Transform, accumulate, compose, compress, dp, mixed_precision, tp, zero
from parallax.store.compress import BLOCK, from_fp8, to_fp8
from parallax.testing import World, toys


def bound(x: Tensor, kind: str) -> Tensor:
    """The documented bound on the error of one rounding, by element of `[elements]`."""
    if kind == "bf16":
        return x.abs() / 256
    blocks = nn.functional.pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1, keepdim=True).expand_as(blocks).reshape(-1)[: len(x)]
    return torch.maximum(x.abs() / 16, largest * 2.0**-10 / 448)


@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(1, 700),
    spread=st.floats(0, 12),
    size=st.floats(-20, 20),
    seed=st.integers(0, 1 << 30),
)
def test_rounding_stays_within_the_bound(count: int, spread: float, size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator, dtype=torch.float64)
    x *= 2.0 ** (spread * torch.randn(count, generator=generator, dtype=torch.float64) + size)
    x = x.float()
    back = from_fp8(to_fp8(x[None]), count, torch.float32)[0]
    # The scale and the product are float32: three roundings of 2^-24 beside one of 2^-4.
    assert ((back - x).abs() <= bound(x, "fp8") * (1 + 2.0**-19)).all()


def test_half_the_bound_would_not_do() -> None:
    x = torch.randn(10_000)
    back = from_fp8(to_fp8(x[None]), len(x), torch.float32)[0]
    assert ((back - x).abs() > bound(x, "fp8") / 2).any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(poison: float) -> None:
    x = torch.ones(600)
    x[300] = poison
    back = from_fp8(to_fp8(x[None]), 600, torch.float32)[0]
    assert not back[300].isfinite()
    assert back[:256].isfinite().all()


def gradients(layout: Transform, extra: Transform) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = toys.Mlp()
    boosted = compose(layout, extra)(model, toys.momentum(model))
    boosted.grad(toys.square, boosted.shard(toys.points(8)))
    mean = {
        n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in boosted.grads.items()
    }
    return {n: g.clone() for n, g in mean.items()}, dist.get_rank()


def own_gradients() -> dict[str, Tensor]:
    """What each rank would send: its own rows' share, times the ranks."""
    torch.manual_seed(0)
    model = toys.Mlp()
    boosted = dp()(model, toys.momentum(model))
    batch = boosted.shard(toys.points(8))
    torch.manual_seed(0)
    plain = toys.Mlp()
    out = toys.square(plain, batch)
    value = out[0] / (8 / dist.get_world_size()) if isinstance(out, tuple) else out
    value.backward()
    return {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("layout", [zero(1), zero(2), zero(3), dp()], ids=repr)
def test_the_mean_is_off_by_no_more_than_is_said(
    layout: Transform, kind: Any, world2: World
) -> None:
    exact = world2.run(gradients, layout, compose())[0][0]
    rows = world2.run(gradients, layout, compress(kind))
    sent = world2.run(own_gradients)
    u = {"fp8": 2.0**-4, "bf16": 2.0**-8}[kind]
    differ = False
    for name, g in exact.items():
        mine = rows[0][0][name]
        assert torch.equal(mine, rows[1][0][name])
        # A block's largest element is no larger than the largest of all that is sent.
        floor = max(float(s[n].abs().max()) for s in sent for n in s) * 2.0**-10 / 448
        roundings = torch.stack([torch.clamp(s[name].abs() * u, min=floor) for s in sent]).mean(0)
        allowed = roundings + (mine.abs() * u * 1.1 + floor if layout == dp() else 0)
        assert ((mine - g).abs() <= allowed + 1e-6 * g.abs().max()).all(), name
        differ |= not torch.equal(mine, g)
    assert differ


def trained(transform: Transform) -> Any:
    torch.manual_seed(0)
    model = toys.Gpt(tied=True, scalar=True, counts=False).double()
    boosted = transform(model, toys.momentum(model))
    for step in range(2):
        boosted.train_step(toys.next_token, boosted.shard(toys.tokens(7, step)))
    return boosted.gather()


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout",
    [
        zero(3),
        compose(zero(2), accumulate(2)),
        compose(dp(2), zero(1, degree=2)),
        compose(tp(2), zero(2)),
        compose(dp(), accumulate(3)),
    ],
    ids=repr,
)
def test_without_rounding_the_way_is_exact(layout: Transform, world2: World, world4: World) -> None:
    ranks = world4 if any(name in repr(layout) for name in ("tp(2)", "dp(2)")) else world2
    plain = ranks.run(trained, layout)[0]
    sent = ranks.run(trained, compose(layout, compress("full")))[0]
    for name, value in plain["params"].items():
        assert (sent["params"][name] - value).abs().max() < 1e-12


def bytes_sent(extra: Transform) -> int:
    torch.manual_seed(0)
    model = nn.Linear(512, 512)
    boosted = compose(zero(2), extra)(model, torch.optim.SGD(model.parameters(), lr=0.1))
    count = [0]
    real = dist.all_to_all_single

    def counting(out: Tensor, given: Tensor, **options: Any) -> Any:
        count[0] += given.numel() * given.element_size()
        return real(out, given, **options)

    dist.all_to_all_single = counting
    try:
        boosted.grad(lambda m, x: m(x).sum(), torch.ones(2, 512))
    finally:
        dist.all_to_all_single = real
    return count[0]


@pytest.mark.ranks
def test_bytes_are_those_that_are_said(world2: World) -> None:
    full, half, eighth = (
        world2.run(bytes_sent, compress(kind))[0] for kind in ("full", "bf16", "fp8")
    )
    assert half == full / 2
    assert eighth / full == pytest.approx(0.254, rel=0.01)


def swapped() -> Any:
    """The planted fault: what goes to rank 0 is sent to rank 1."""

    lower = __import__("parallax.store.compress", fromlist=["_exchange"])
    real = lower._exchange
    lower._exchange = lambda rows, group: real(rows.flip(0), group)
    try:
        return trained(compose(zero(2), compress("full")))
    finally:
        lower._exchange = real


@pytest.mark.ranks
def test_parts_sent_to_the_wrong_rank_would_be_seen(world2: World) -> None:
    plain, wrong = world2.run(trained, zero(2))[0], world2.run(swapped)[0]
    assert any((wrong["params"][n] - p).abs().max() > 1e-6 for n, p in plain["params"].items())


def test_it_goes_with_any_precision_and_is_refused_for_others() -> None:
    compose(compress("fp8"), mixed_precision("fp16"), zero(2))
    with pytest.raises(ValueError, match="compress was given") as caught:
        compress("int8")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "compress was given gradients='int8'. Choose one of 'fp8', 'bf16', 'full'."
    )


def twins(kind: Any) -> dict[str, Tensor]:
    """Norms that both ranks of a tensor group hold, after a few steps."""
    torch.manual_seed(0)
    model = toys.Gpt(counts=False)
    said = compose(tp(2), zero(2, degree=2), compress(kind), mixed_precision("bf16"))
    boosted = said(model, toys.momentum(model))
    for step in range(3):
        boosted.train_step(toys.next_token, boosted.shard(toys.tokens(6, step)))
    return {n: p.to_local().clone() for n, p in boosted.params.items() if "norm" in n}


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_copies_over_a_tensor_group_do_not_drift_apart(kind: Any, world4: World) -> None:
    rows = world4.run(twins, kind)
    for name, part in rows[0].items():
        assert torch.equal(part, rows[1][name])  # ranks 0 and 1 are one tensor group
        assert torch.equal(rows[2][name], rows[3][name])
