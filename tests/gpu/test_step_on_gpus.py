"""What only a GPU shows of the step's transforms: no waiting, real float16 and float8, offload."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from parallax import StepError, clip, compose, parse
from parallax.testing import pool, toys
from parallax.testing.verify import verify

pytestmark = pytest.mark.gpu

CASES = [
    (1, "fp16, clip(0.05)"),
    (1, "bf16, fp8(), clip(0.05)"),
    (1, "bf16, remat(offload=True), accumulate(2)"),
    (2, "zero(2), bf16, accumulate(3), clip(0.05, norm_type='inf'), ema(0.9)"),
    (2, "zero(3), fp16, accumulate(2), clip(0.05)"),
    (2, "zero(1), mixed_precision('fp16', scale=256.0)"),
    (2, "zero(3), bf16, fp8('rowwise', gather=True), remat()"),
    (2, "zero(2), bf16, fp8(), compress('fp8')"),
    (2, "dp(), bf16, compress('bf16')"),
    (2, "tp(2), bf16, remat(0.5), clip(0.05)"),
    (2, "zero(2), bf16, remat(offload=True), clip(0.05)"),
    (2, "zero(2), bf16, remat(keep='matmuls'), compile(backend='aot_eager')"),
    (2, "zero(3), bf16, remat(budget='8MiB'), accumulate(2)"),
]


@pytest.mark.parametrize("dtype", ["fp64", "native"])
@pytest.mark.parametrize(("size", "text"), CASES)
def test_a_composition_trains_like_one_process(size: int, text: str, dtype: str) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"{size} GPUs are needed")
    if "fp8" in text:
        pytest.importorskip("torchao")

    def model() -> toys.Gpt:
        return toys.Gpt(tied=True, scalar=True, unused=True, empty=True, counts=False)

    batches = [toys.tokens(7, seed) for seed in range(3)]
    report = verify(
        parse(text), model, toys.adamw, toys.next_token, batches, world=size, dtype=dtype
    )
    assert report.ok, report


def waits(text: str, fused: bool) -> list[str]:
    """What makes the host wait for the device in an update, by torch's own watch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
    boosted = parse(text)(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused))
    x = torch.ones(8, 64, device="cuda")
    for _ in range(3):
        boosted.train_step(lambda m, x: m(x).square().mean(), x)
    boosted.grad(lambda m, x: m(x).square().mean(), x)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            boosted.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [str(w.message) for w in caught if "synchroniz" in str(w.message)]


@pytest.mark.parametrize("nonfinite", ["raise", "skip", "zero"])
@pytest.mark.parametrize("size", [1, 2])
def test_clipping_waits_for_nothing(size: int, nonfinite: str) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"{size} GPUs are needed")
    text = f"zero(2), bf16, clip(1.0, nonfinite={nonfinite!r})"
    assert pool(size).run(waits, text, True) == [[]] * size


def test_the_watch_sees_a_wait() -> None:
    assert pool(1).run(waits, "zero(2), bf16, clip(1.0)", False)[0]


def poisoned(nonfinite: Any) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).cuda()
    boosted = compose(parse("zero(2)"), clip(1.0, nonfinite=nonfinite))(
        model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    )
    x = torch.ones(8, 16, device="cuda")

    def good(m: Any, x: Any) -> Any:
        return m(x).square().mean()

    boosted.train_step(good, x)
    before = {n: p.full_tensor().clone() for n, p in boosted.params.items()}
    boosted.train_step(lambda m, x: good(m, x) * float("nan"), x)
    same = all(torch.equal(p.full_tensor(), before[n]) for n, p in boosted.params.items())
    state = [boosted.took_place, boosted.step, same, boosted.rooms["clip"].notes["guarded"]]
    try:
        boosted.train_step(good, x)
    except StepError as error:
        return [*state, str(error)]
    return [*state, boosted.step]


def test_a_bad_update_is_left_out_by_the_kernels() -> None:
    size = min(2, torch.cuda.device_count())
    for row in pool(size).run(poisoned, "skip"):
        assert row == [False, 1, True, True, 2]
    for row in pool(size).run(poisoned, "raise"):
        assert row[:4] == [False, 1, True, True]
        assert row[4].startswith(
            "the norm of the gradients is nan: not finite are those of 0.weight, 0.bias, 1.weight, "
            "1.bias. The update before this one was left out for it."
        )
