"""Saving and loading beside a plain write and read of the same bytes, and what training waits.

Each round writes and reads the same bytes four ways in turn, on the same disk, so that a noisy
machine disturbs all alike: a plain write (every rank its share from host memory, 16 MiB at a time,
then fsync) and `boosted.save`, both to new files; then a plain read and `boosted.load_`, of files
whose copies in memory were dropped, into memory that is there, and ("new") into memory that is not,
as a resumed run has no optimizer state yet. Then `boosted.save(asynchronous=True)`: what it takes,
beside a bare copy of the same tensors to pinned memory. And the most host memory that saving and
loading hold beside what was there (private pages; pages of files belong to the system).

    python benchmarks/checkpoint.py                                # 2 ranks, gloo or NCCL
    python benchmarks/checkpoint.py --ranks 1 --width 4096 --layers 16 --folder /data/tmp
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

from parallax import parse
from parallax.core.mesh import device_of
from parallax.testing import world

BLOCK = 16 << 20


def build(composition: str, width: int, layers: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    boosted = parse(composition)(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    batch = torch.randn(2 * boosted.plan.size(), width)
    for _ in range(2):
        boosted.train_step(lambda m, b: m(b).square().mean(), boosted.shard(batch))
    return boosted


def share(boosted: Any) -> list[torch.Tensor]:
    """The tensors that this rank saves."""
    from parallax.checkpoint.content import content
    from parallax.core.state import KINDS

    return content(boosted, KINDS).parts


def timed(work: Any) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - start


def plain_write(path: Path, data: memoryview) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for start in range(0, len(data), BLOCK):
        os.write(file, data[start : start + BLOCK])
    os.fsync(file)
    os.close(file)


def plain_read(path: Path, data: memoryview) -> None:
    file = os.open(path, os.O_RDONLY)
    for start in range(0, len(data), BLOCK):
        os.preadv(file, [data[start : start + BLOCK]], start)
    os.close(file)


def forget(*paths: Path) -> None:
    """Drop the system's copies of files, so that reading reads the disk."""
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.iterdir()):
            handle = os.open(file, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def remove(*paths: Path) -> None:
    """Delete what was written before, and wait until the disk has done with it."""
    dist.barrier()
    for path in paths:
        path.unlink(missing_ok=True) if path.is_file() else shutil.rmtree(path, ignore_errors=True)
    os.sync()
    dist.barrier()


def in_turn(ways: dict[str, Any], turn: int) -> list[tuple[str, Any]]:
    return list(ways.items())[:: -1 if turn % 2 else 1]


class Peak:
    """The most private memory of this process while the block runs, over what it was before."""

    def __enter__(self) -> Self:
        self.before = self.most = private()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.most = max(self.most, private())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.over = self.most - self.before


def private() -> int:
    with open("/proc/self/status") as status:
        line = next(row for row in status if row.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def measure(composition: str, width: int, layers: int, rounds: int, folder: str) -> dict[str, Any]:
    boosted = build(composition, width, layers)
    size = sum(part.nbytes for part in share(boosted))
    rank, root = dist.get_rank(), Path(folder)
    target = root / "saved"
    times = rates(boosted, root / f"plain-{rank}", target, size, rounds)
    with Peak() as saving:
        boosted.save(target)
    with Peak() as loading:
        boosted.load_(target)
    times |= stall(boosted, target, rounds)
    if rank == 0:
        shutil.rmtree(root)
    dist.barrier()
    total = torch.tensor(float(size), device=device_of(boosted.mesh))
    dist.all_reduce(total)
    return {
        "composition": composition,
        "bytes": int(total),
        "share": size,
        "over while saving": saving.over,
        "over while loading": loading.over,
        **times,
    }


def rates(
    boosted: Any, plain: Path, target: Path, size: int, rounds: int
) -> dict[str, list[float]]:
    host = torch.ones(size, dtype=torch.uint8)
    data = memoryview(host.numpy())
    times: dict[str, list[float]] = defaultdict(list)
    writes = {
        "plain write": (plain, lambda: plain_write(plain, data)),
        "save": (target, lambda: boosted.save(target)),
    }

    def new() -> None:
        plain_read(plain, memoryview(torch.empty(size, dtype=torch.uint8).numpy()))

    reads = {
        "plain read": (plain, lambda: plain_read(plain, data)),
        "load_": (target, lambda: boosted.load_(target)),
        "plain read, new memory": (plain, new),
        "load_, new state": (target, lambda: boosted.load_(target)),
    }
    for turn in range(rounds):
        # What comes second finds the disk busy with what the first one left: they take turns.
        for name, (path, work) in in_turn(writes, turn):
            remove(path)
            times[name].append(timed(work))
        for name, (path, work) in in_turn(reads, turn):
            if name == "load_, new state":
                boosted.optimizer.state.clear()  # as a run has it that is resumed
            dist.barrier()
            forget(path)
            times[name].append(timed(work))
    plain.unlink()
    return times


def stall(boosted: Any, target: Path, rounds: int) -> dict[str, list[float]]:
    """What training waits for an asynchronous save, beside a bare copy of the same tensors."""
    parts = share(boosted)
    pinned = torch.cuda.is_available()
    copies = [torch.empty(p.shape, dtype=p.dtype, pin_memory=pinned) for p in parts]
    for copy in copies:
        copy.zero_()
    boosted.save(target, asynchronous=True).result()  # allocates its copy
    times: dict[str, list[float]] = defaultdict(list)

    def bare() -> None:
        for copy, part in zip(copies, parts, strict=True):
            copy.copy_(part, non_blocking=True)

    for _ in range(rounds):
        times["bare copy"].append(timed(bare))
        started: list[Any] = []
        call = timed(lambda found=started: found.append(boosted.save(target, asynchronous=True)))
        times["asynchronous save"].append(call)
        started[0].result()
    return times


def shown(row: dict[str, Any]) -> list[str]:
    middle = {k: statistics.median(v) for k, v in row.items() if isinstance(v, list)}
    rate = {k: row["bytes"] / 1e9 / seconds for k, seconds in middle.items()}
    return [
        row["composition"],
        f"{row['bytes'] / 1e9:.2f}",
        f"{rate['plain write']:.2f}",
        f"{rate['save']:.2f}",
        f"{rate['save'] / rate['plain write']:.2f}",
        f"{rate['plain read']:.2f}",
        f"{rate['load_']:.2f}",
        f"{rate['load_'] / rate['plain read']:.2f}",
        f"{rate['load_, new state'] / rate['plain read, new memory']:.2f}",
        f"{middle['asynchronous save'] / middle['bare copy']:.2f}",
        f"{row['over while saving'] / 2**20:.0f}",
        f"{row['over while loading'] / 2**20:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    parser.add_argument("--compose", nargs="*", default=["zero(3)"])
    parser.add_argument("--json", type=Path)
    said = parser.parse_args()
    names = [
        "composition",
        "GB",
        "plain write",
        "save",
        "ratio",
        "plain read",
        "load_",
        "ratio",
        "new",
    ]
    table = Table(*names, "stall / copy", "MiB over: save", "load_")
    rows = []
    with world(said.ranks, backend="nccl" if torch.cuda.is_available() else "gloo") as ranks:
        for number, composition in enumerate(said.compose):
            folder = said.folder / f"parallax-benchmark-{os.getpid()}-{number}"
            folder.mkdir(parents=True)
            told = composition, said.width, said.layers, said.rounds, str(folder)
            found = ranks.run(measure, *told, timeout=1200)
            row = found[0] | {
                key: max(rank[key] for rank in found)
                for key in ("over while saving", "over while loading")
            }
            rows.append(row)
            table.add_row(*shown(row))
    Console(width=140).print(table)
    if said.json:
        about = {"torch": torch.__version__, "machine": platform.machine(), "ranks": said.ranks}
        if torch.cuda.is_available():
            about["gpu"] = torch.cuda.get_device_name()
        said.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
