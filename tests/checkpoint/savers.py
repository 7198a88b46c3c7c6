"""Ranks that save for ever, to be killed: forked from one process, so that each starts at once.

    python savers.py FOLDER TRIALS SEED

A trial forks two ranks that load the newest checkpoint, train and save again and again. At a random
moment one of them, or both, are killed with SIGKILL. Then what lies in the folder is judged. A line
of JSON is printed for each trial.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from parallax import zero
from parallax.checkpoint import Read, Reader, latest, read_index
from parallax.testing import toys

RANKS = 2


def save_for_ever(rank: int, folder: Path, rendezvous: str, way: str, told: int) -> None:
    store = dist.FileStore(rendezvous, RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = toys.Mlp(64, 128, 8)
    boosted = zero(3)(model, toys.momentum(model))
    boosted.load_(folder, resume="auto")
    os.write(told, b"ready\n")
    target = folder / "same" if way == "replaced" else folder
    while True:
        boosted.train_step(toys.square, boosted.shard(toys.points(4, boosted.step, 64)))
        keep = None if way == "replaced" else 2
        saving = boosted.save(target, keep=keep, asynchronous=way == "asynchronous")
        step = boosted.step
        if way == "asynchronous":
            boosted.train_step(toys.square, boosted.shard(toys.points(4, boosted.step, 64)))
            saving.result()
        if rank == 0:
            os.write(told, b"%d\n" % step)


def judge(folder: Path, promised: int) -> list[str]:
    """What is wrong with what lies there; `promised` is the step that was said to be saved."""
    faults = []
    for path in folder.iterdir():
        if not path.name.startswith("."):
            try:
                check(path)
            except Exception as error:  # noqa: BLE001  every kind is a fault
                faults.append(f"{path.name}: {error}")
    newest = latest(folder)
    step = -1 if newest is None else read_index(newest).step
    if step < promised:
        faults.append(f"step {promised} was saved, the newest is {step}")
    return faults


def check(path: Path) -> int:
    """The step of a checkpoint of which every byte is right."""
    with Reader(path) as reader:
        for key in reader.index.tensors:
            reader.check(Read(key))
        return reader.index.step


def trial(folder: Path, rendezvous: str, way: str, delay: float, victims: tuple[int, ...]) -> int:
    """Let ranks save, kill some, end the others; returns the last step that was said saved."""
    out, told = os.pipe()
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            os.close(out)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            try:
                save_for_ever(rank, folder, rendezvous, way, told)
            finally:
                os._exit(1)
        children.append(child)
    os.close(told)
    with os.fdopen(out) as lines:
        ready = [lines.readline() for _ in range(RANKS)]
        assert ready == ["ready\n"] * RANKS, ready
        time.sleep(delay)
        for rank in victims:
            os.kill(children[rank], signal.SIGKILL)
        # The others find their peer gone, and end by themselves or are ended.
        time.sleep(0.02)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        steps = [int(line) for line in lines if line.strip().isdigit()]
    return max(steps, default=-1)


def main() -> None:
    folder, trials, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    draw = random.Random(seed)
    toys.momentum(toys.Mlp())  # torch imports half a second's worth with the first optimizer
    promised = -1
    for number in range(trials):
        way = draw.choice(["rotated", "replaced", "asynchronous"])
        victims = draw.choice([(0,), (1,), (0, 1), (1, 0)])
        delay = draw.uniform(0.0, 0.12)
        rendezvous = str(folder.with_name(f"rendezvous-{number}"))
        promised = max(promised, trial(folder, rendezvous, way, delay, victims))
        Path(rendezvous).unlink(missing_ok=True)
        hidden = sorted(p.name.rsplit(".")[-1] for p in folder.iterdir() if p.name[0] == ".")
        row = {"way": way, "step": promised, "left": hidden, "faults": judge(folder, promised)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
