"""What each transform costs a step over bare `zero(2), bf16`.

For each composition: the host's time to launch a step (on GPUs without waiting for them), and the
time of a whole step. All live in the same processes and take turns, so that a noisy machine
disturbs all alike; medians of single steps are compared.

    python benchmarks/step.py                     # 2 ranks, gloo on CPUs, NCCL on GPUs
    python benchmarks/step.py --size 1b --seq 4096 --batch 4 --vocabulary 32768   # two GPUs
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
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy

from parallax import parse
from parallax.errors import ParallaxError
from parallax.testing import world
from parallax.train.decoder import Decoder, size

BASE = "zero(2), bf16"
COMPOSITIONS = [
    BASE,
    f"{BASE}, clip(1.0)",
    f"{BASE}, clip(1.0, nonfinite='skip')",
    f"{BASE}, clip(1.0, norm_type='inf')",
    f"{BASE}, clip(value=0.1)",
    "zero(2), fp16",
    f"{BASE}, ema(0.999)",
    f"{BASE}, accumulate(2)",
    f"{BASE}, accumulate(2, reduce='step')",
    f"{BASE}, remat()",
    f"{BASE}, remat(0.5)",
    f"{BASE}, remat(keep='matmuls')",
    f"{BASE}, remat(offload=True)",
    f"{BASE}, compile()",
    f"{BASE}, compile(), remat()",
    f"{BASE}, compress('bf16')",
    f"{BASE}, compress('fp8')",
    f"{BASE}, fp8()",
    f"{BASE}, fp8(), compile()",
    f"{BASE}, fp8('rowwise'), compile()",
    f"{BASE}, fp8(gather=True), compile()",
]


def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def boosted(text: str, options: dict[str, Any], device: str) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(size(options["size"], vocabulary=options["vocabulary"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return parse(text)(model, optimizer)


def measure(options: dict[str, Any]) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    device = f"cuda:{torch.cuda.current_device()}" if cuda else "cpu"
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (options["batch"], options["seq"] + 1)
    batch = torch.randint(options["vocabulary"], shape, generator=generator).to(device)
    rows: dict[str, Any] = {}
    # A few live at a time, each beside the bare one: twenty would not fit.
    for text in options["only"] or COMPOSITIONS[1:]:
        try:
            rows[text] = _beside(text, batch, options, device, cuda)
        except ParallaxError as fault:
            rows[text] = {"refused": str(fault).partition("\n")[0]}
    name = torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU"
    return {"rows": rows, "device": name, "torch": torch.__version__}


def _beside(
    text: str, batch: torch.Tensor, options: dict[str, Any], device: str, cuda: bool
) -> dict[str, Any]:
    pairs = {"bare": boosted(BASE, options, device), "with": boosted(text, options, device)}
    host: dict[str, list[float]] = {name: [] for name in pairs}
    whole: dict[str, list[float]] = {name: [] for name in pairs}
    peak: dict[str, float] = {}
    for turn in range(options["warmup"] + options["steps"]):
        for name in list(pairs) if turn % 2 else list(reversed(pairs)):
            _settle(cuda)
            if cuda:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            pairs[name].train_step(loss_fn, batch)
            launched = time.perf_counter()
            _settle(cuda)
            if turn >= options["warmup"]:
                host[name].append(launched - start)
                whole[name].append(time.perf_counter() - start)
            if cuda:
                peak[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
    medians = {
        key: {name: statistics.median(times) for name, times in seconds.items()}
        for key, seconds in (("host", host), ("step", whole))
    }
    return {**medians, "peak_gib_above_state": peak}


def _settle(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("size", "small"), ("out", "")):
        parser.add_argument(f"--{name}", default=default)
    numbers = {"ranks": 2, "steps": 12, "warmup": 4, "batch": 4, "seq": 128, "vocabulary": 256}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", action="append", help="a composition to measure; several times")
    options = vars(parser.parse_args())
    with world(options["ranks"]) as ranks:
        first = ranks.run(measure, options, timeout=3000)[0]
    title = f"{options['size']}, {options['ranks']} x {first['device']}, torch {first['torch']}"
    table = Table(title=title)
    for column in ("composition", "host ms", "over bare", "step ms", "over bare", "GiB above bare"):
        table.add_column(column, justify="left" if column == "composition" else "right")
    for text, row in first["rows"].items():
        if "refused" in row:
            table.add_row(text, row["refused"], "", "", "", "")
            continue
        cells = []
        for key in ("host", "step"):
            mine, bare = row[key]["with"], row[key]["bare"]
            cells += [f"{1000 * mine:.1f}", f"{mine / bare:.3f}"]
        peak = row["peak_gib_above_state"]
        more = f"{peak['with'] - peak['bare']:+.2f}" if peak else ""
        table.add_row(text, *cells, more)
    Console(width=130).print(table)
    if options["out"]:
        Path(options["out"]).write_text(json.dumps({**first, "options": options}, indent=1))


if __name__ == "__main__":
    main()
