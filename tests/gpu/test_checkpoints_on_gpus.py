"""Checkpoints of GPU state: exact, beside training, with the GPU's own random stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallax import parse
from parallax.core.slices import local
from parallax.testing import pool, toys

pytestmark = pytest.mark.gpu

COMPOSITIONS = [
    (1, "zero(3), bf16, clip(0.05), ema(0.9)"),
    (1, "fp16"),
    (2, "zero(3), bf16"),
    (2, "tp(2), fp16, clip(0.05, nonfinite='skip')"),
    (2, "dp(), compress('bf16')"),
]


def start(text: str, seed: int) -> Any:
    torch.manual_seed(seed)
    model = toys.Gpt(tied=True, dropout=0.2)
    fused = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return parse(text)(model, fused)


def train(boosted: Any, *steps: int) -> list[float]:
    batches = [boosted.shard(toys.tokens(8, step)) for step in steps]
    return [float(boosted.train_step(toys.next_token, batch)) for batch in batches]


def parts(boosted: Any) -> list[torch.Tensor]:
    moments = [v for row in boosted.moments.values() for v in row.values()]
    return [local(t).detach().clone() for t in (*boosted.params.values(), *moments)]


def stopped_and_not(text: str, directory: str, asynchronous: bool) -> bool:
    boosted = start(text, 0)
    train(boosted, 0, 1)
    saving = boosted.save(directory, asynchronous=asynchronous)
    through = train(boosted, 2, 3), parts(boosted)
    saving.result()
    again = start(text, 1)
    train(again, 5)
    again.load_(directory)
    resumed = train(again, 2, 3), parts(again)
    return through[0] == resumed[0] and all(
        torch.equal(a, b) for a, b in zip(through[1], resumed[1], strict=True)
    )


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("size", "text"), COMPOSITIONS)
def test_a_run_resumes_bit_for_bit(
    size: int, text: str, asynchronous: bool, tmp_path: Path
) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"{size} GPUs are needed")
    found = pool(size).run(stopped_and_not, text, str(tmp_path / "c"), asynchronous)
    assert found == [True] * size


def pinned(directory: str) -> tuple[bool, bool]:
    from parallax.checkpoint.save import _STAGING

    boosted = start("zero(3)", 0)
    boosted.save(directory, asynchronous=True).result()
    memory = _STAGING[boosted]._memory
    first = memory.data_ptr()
    boosted.save(directory, asynchronous=True).result()
    return memory.is_pinned(), _STAGING[boosted]._memory.data_ptr() == first


def test_the_copy_is_pinned_and_kept(tmp_path: Path) -> None:
    assert pool(1).run(pinned, str(tmp_path / "c")) == [(True, True)]
