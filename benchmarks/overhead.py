"""What parallax costs over the same thing written by hand.

Claim: a step of `compose(zero(2), bf16)` takes at most 1.03 x a step of a loop written with
`fully_shard`, on the same model, optimizer and data. Both live in the same processes and take
turns, so that a noisy machine disturbs both alike; medians of single steps are compared.

    python benchmarks/overhead.py                      # 2 ranks, gloo on CPUs, NCCL on GPUs
    python benchmarks/overhead.py --size 1b --seq 4096 --batch 4 --vocabulary 32768   # two GPUs
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

import parallax
from parallax.testing import world
from parallax.train.decoder import Decoder, size


def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def model_of(options: dict[str, Any], device: str) -> Decoder:
    torch.manual_seed(0)
    with torch.device(device):
        return Decoder(size(options["size"], vocabulary=options["vocabulary"]))


def by_hand(options: dict[str, Any], device: str) -> Any:
    model = model_of(options, device)
    policy = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False, mp_policy=MixedPrecisionPolicy(**policy))
    root = MixedPrecisionPolicy(**policy, output_dtype=torch.float32)
    fully_shard(model, reshard_after_forward=False, mp_policy=root)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def by_parallax(options: dict[str, Any], device: str) -> Any:
    model = model_of(options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    boosted = parallax.compose(parallax.zero(2), parallax.bf16)(model, optimizer)
    return lambda batch: boosted.train_step(loss_fn, batch)


def measure(options: dict[str, Any]) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    device = f"cuda:{torch.cuda.current_device()}" if cuda else "cpu"
    steps = {"by hand": by_hand(options, device), "parallax": by_parallax(options, device)}
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (options["batch"], options["seq"] + 1)
    batch = torch.randint(options["vocabulary"], shape, generator=generator).to(device)
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, float] = {}
    for turn in range(options["warmup"] + options["steps"]):
        order = list(steps) if turn % 2 else list(reversed(steps))
        for name in order:
            _settle(cuda)
            start = time.perf_counter()
            loss = steps[name](batch)
            _settle(cuda)
            losses[name] = float(loss)
            if turn >= options["warmup"]:
                times[name].append(time.perf_counter() - start)
    name = torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU"
    return {"times": times, "losses": losses, "device": name, "torch": torch.__version__}


def _settle(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("size", "small"), ("out", "")):
        parser.add_argument(f"--{name}", default=default)
    numbers = {"ranks": 2, "steps": 30, "warmup": 4, "batch": 4, "seq": 128, "vocabulary": 256}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = vars(parser.parse_args())
    with world(options["ranks"]) as ranks:
        rows = ranks.run(measure, options, timeout=1200)
    first = rows[0]
    medians = {name: statistics.median(times) for name, times in first["times"].items()}
    ratios = [
        mine / hand
        for mine, hand in zip(first["times"]["parallax"], first["times"]["by hand"], strict=True)
    ]
    result = {
        **{key: options[key] for key in ("size", "ranks", "steps", "batch", "seq", "vocabulary")},
        "device": first["device"],
        "torch": first["torch"],
        "median_seconds": medians,
        "ratio_of_medians": medians["parallax"] / medians["by hand"],
        "median_of_ratios": statistics.median(ratios),
        "last_loss_of_rank_0": first["losses"],
    }
    print(json.dumps(result, indent=1))
    if options["out"]:
        Path(options["out"]).write_text(json.dumps({**result, "times": first["times"]}, indent=1))


if __name__ == "__main__":
    main()
