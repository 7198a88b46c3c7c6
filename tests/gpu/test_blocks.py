"""Recomputed and compiled blocks on GPUs: bitwise the same, less memory, copies that overlap."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallax import compose, parse, remat, zero
from parallax.testing import pool, toys
from parallax.testing.verify import verify

pytestmark = pytest.mark.gpu


def gpt(dropout: float = 0.0, blocks: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return toys.Gpt(tied=True, dropout=dropout, blocks=blocks)


def losses(text: str) -> list[float]:
    model = gpt(dropout=0.2)
    boosted = parse(text)(model, toys.adamw(model))
    return [
        float(boosted.train_step(toys.next_token, boosted.shard(toys.tokens(16, step))))
        for step in range(5)
    ]


VARIANTS = ["remat()", "remat(0.5)", "remat(keep='matmuls')", "remat(offload=True)"]
VARIANTS += ["remat(budget='1MiB')", "remat(budget='64KiB', offload=True)"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [1, 2])
def test_losses_are_bitwise_the_same(size: int, variant: str) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"{size} GPUs are needed")
    base = "zero(3), bf16"
    assert pool(size).run(losses, f"{base}, {variant}") == pool(size).run(losses, base)


@pytest.mark.parametrize("text", ["zero(3), bf16", "tp(2)"])
@pytest.mark.parametrize("more", ["", "remat()", "remat(keep='matmuls')"])
def test_inductor_trains_like_one_process(text: str, more: str) -> None:
    size = 2 if "tp" in text else 1
    if torch.cuda.device_count() < size:
        pytest.skip(f"{size} GPUs are needed")
    parts = ", ".join(part for part in (text, more, "compile()") if part)
    batches = [toys.tokens(8, seed) for seed in range(2)]
    report = verify(
        parse(parts), gpt, toys.adamw, toys.next_token, batches, world=size, dtype="native"
    )
    assert report.ok, report


class Wide(nn.Module):
    """Blocks whose activations are far larger than their inputs."""

    def __init__(self, blocks: int = 8, width: int = 1024) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def peaks(texts: list[str]) -> list[int]:
    """Bytes allocated by the forward and backward of the second step, at their most."""
    found = []
    for text in texts:
        torch.manual_seed(0)
        model = Wide().cuda()
        boosted = compose(zero(2), *([parse(text)] if text else []))(
            model, torch.optim.SGD(model.parameters(), lr=1e-3)
        )
        x = torch.randn(8192, 1024, device="cuda")
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            boosted.train_step(lambda m, x: m(x).square().mean(), x)
        found.append(torch.cuda.max_memory_allocated() - before)
        del boosted, model
    return found


def test_peaks_fall() -> None:
    texts = ["", "remat(0.5)", "remat()", "remat(offload=True)", "remat(budget='768MiB')"]
    ((plain, half, every, offloaded, _),) = pool(1).run(peaks, texts)
    assert plain > half > every > offloaded


def pinned() -> tuple[bool, list[int]]:
    model = gpt()
    boosted = remat(offload=True)(model, toys.adamw(model))
    shelf = boosted.rooms["remat"].notes["shelf"]
    counts = []
    for step in range(4):
        boosted.train_step(toys.next_token, boosted.shard(toys.tokens(8, step)))
        counts.append(shelf.buffers)
    torch.cuda.synchronize()
    return all(b.is_pinned() for row in shelf._free.values() for b in row), counts


def test_host_buffers_are_pinned_and_reused() -> None:
    ((are_pinned, counts),) = pool(1).run(pinned)
    assert are_pinned
    assert counts == [4] * 4
