"""The same proofs over NCCL: compositions on GPUs train like one process on a CPU."""

from __future__ import annotations

import pytest
import torch

from parallax.parse import parse
from parallax.testing import pool, toys
from parallax.testing.verify import verify

pytestmark = pytest.mark.gpu

ONE = ["bf16, clip(0.05)", "zero(3), bf16", "tp(1), fp32"]
TWO = [
    "zero(1)",
    "zero(2), bf16, clip(0.05)",
    "zero(3), mixed_precision('bf16', keep='norms')",
    "dp(), clip(0.05)",
    "dp(2), bf16",
    "tp(2), bf16, clip(0.05)",
    "tp(2, loss_parallel=True), fp32",
]
CASES = [(1, text) for text in ONE] + [(2, text) for text in TWO]


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "native"])
@pytest.mark.parametrize(("size", "text"), CASES)
def test_a_composition_trains_like_one_process(size: int, text: str, dtype: str) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"{size} GPUs are needed")

    def model() -> toys.Gpt:
        return toys.Gpt(tied=True, scalar=True, unused=True, empty=True)

    batches = [toys.tokens(7, seed) for seed in range(3)]
    report = verify(
        parse(text), model, toys.adamw, toys.next_token, batches, world=size, dtype=dtype
    )
    assert report.ok, report


def test_ranks_use_their_own_gpus() -> None:
    size = min(2, torch.cuda.device_count())
    devices = pool(size).run(lambda: (torch.distributed.get_backend(), torch.cuda.current_device()))
    assert [device for _, device in devices] == list(range(size))
