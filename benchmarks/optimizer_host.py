"""Host time of an update of 300 parameter tensors: boosted, and with plain tensors.

    torchrun --nproc-per-node 2 benchmarks/optimizer_host.py

Both models take turns, step by step, with the same kind of optimizer; medians are shown. `step` is
the optimizer's own step on this rank's parts, `update` all of `boosted.update()`: putting
parameters back into shards and, between ranks, seeing that all have the same gradients. On a GPU
the host's time to launch the work is measured, not the device's to do it. Rank 0's times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from parallax import launch, zero

OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW, for-loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}


class Layers(nn.Module):
    """A stack of linear layers: two parameter tensors each."""

    def __init__(self, tensors: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(tensors // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers. `[batch, width] -> [batch, width]`."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def square(model, batch):
    return model(batch).square().mean()


def seconds(work, wait) -> float:
    wait()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(make, *, tensors: int, width: int, steps: int, device: str) -> dict[str, float]:
    plain = Layers(tensors, width).to(device)
    theirs = make(plain.parameters())
    model = Layers(tensors, width).to(device)
    boosted = zero(2)(model, make(model.parameters()))
    binding = boosted.rooms["optimizer"].notes["binding"]
    batch = torch.randn(8, width, device=device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    rows: dict[str, list[float]] = {"plain": [], "step": [], "update": []}
    for _ in range(steps):
        square(plain, batch).backward()
        rows["plain"].append(seconds(theirs.step, wait))
        plain.zero_grad()
        boosted.grad(square, batch)
        rows["update"].append(seconds(boosted.update, wait))
        boosted.zero_grad()
        boosted.grad(square, batch)
        _ = boosted.grads  # settles what an update would
        rows["step"].append(seconds(binding.step, wait))
        boosted.zero_grad()
    warm = steps // 5
    return {name: 1e3 * statistics.median(row[warm:]) for name, row in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    launch()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"tensors": options.tensors, "width": options.width, "steps": options.steps}
    found = {name: compare(make, **sizes, device=device) for name, make in OPTIMIZERS.items()}
    if dist.get_rank() != 0:
        return
    ranks = dist.get_world_size()
    print(f"{ranks} rank(s), {device}, torch {torch.__version__}, milliseconds of host time")
    print(f"{'':18}{'plain':>8}{'step':>8}{'ratio':>7}{'update':>8}{'ratio':>7}")
    for name, row in found.items():
        step, update = (row[k] / row["plain"] for k in ("step", "update"))
        print(f"{name:18}{row['plain']:8.2f}{row['step']:8.2f}{step:7.2f}", end="")
        print(f"{row['update']:8.2f}{update:7.2f}")
    if options.json:
        note = {"ranks": ranks, "device": device, "torch": torch.__version__, **sizes}
        options.json.write_text(json.dumps({**note, "milliseconds": found}, indent=1))


if __name__ == "__main__":
    main()
