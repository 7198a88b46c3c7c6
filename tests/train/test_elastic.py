"""Ranks are killed; the job starts again by itself and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import parallax

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ROOT = Path(parallax.__file__).parents[1]


def environment() -> dict[str, str]:
    left_out = ("RANK", "WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def descendants(root: int) -> Iterator[int]:
    """Processes below one that this test started."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            told = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        parents.setdefault(int(told[1]), []).append(int(path.parent.name))
    waiting = [root]
    while waiting:
        for child in parents.get(waiting.pop(), []):
            waiting.append(child)
            yield child


def ranks(root: int, mark: str) -> list[int]:
    """The rank processes below a launcher: those with a mark in their command line."""
    found = []
    for pid in descendants(root):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if mark in line:
            found.append(pid)
    return sorted(found)


def kill_twice(command: list[str], folder: Path, steps: tuple[int, int], mark: str) -> list[int]:
    """Run a command; kill a rank when a step's checkpoint is there, another after a later one.

    Returns:
        The killed ranks.
    """
    job = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    killed: list[int] = []
    limit = time.monotonic() + 200
    try:
        while job.poll() is None and time.monotonic() < limit:
            seen = [int(p.name[5:]) for p in folder.glob("step-*")]
            if len(killed) < 2 and max(seen, default=0) >= steps[len(killed)]:
                alive = [pid for pid in ranks(job.pid, mark) if pid not in killed]
                if len(alive) >= 2:
                    killed.append(alive[len(killed) % 2])
                    os.kill(killed[-1], signal.SIGKILL)
            time.sleep(0.01)
        said, _ = job.communicate(timeout=20)
    finally:
        if job.poll() is None:
            for pid in descendants(job.pid):
                os.kill(pid, signal.SIGKILL)
            job.kill()
            job.communicate()
    assert job.returncode == 0, said
    return killed


def test_the_main_job_survives_two_kills(tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text("".join(f"def number_{i}():\n    return {i}\n" for i in range(300)))
    options = ["--nproc", 2, "--compose", "tp(2), bf16, clip(1.0)", "--data", text]
    options += ["--batch-size", 64, "--seq", 48, "--steps", 60, "--save-every", 2]
    options += ["--warmup", 2, "--sample-length", 5, "--eval-windows", 10, "--max-restarts", 3]
    command = [sys.executable, "-m", "parallax", "train", *map(str, options)]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = subprocess.run([*command, "--out", str(whole)], env=environment(), capture_output=True)
    assert done.returncode == 0, done.stderr

    victims = kill_twice(
        [*command, "--out", str(killed)], killed / "checkpoints", (6, 20), "spawn_main"
    )
    assert len(victims) == 2
    results = [json.loads((out / "result.json").read_text()) for out in (whole, killed)]
    assert results[0]["step"] == results[1]["step"] == 60
    assert results[0]["held_out"] == results[1]["held_out"]
    assert (whole / "loss.csv").read_text() == (killed / "loss.csv").read_text()


SCRIPT = """
import sys, time
import parallax, torch
from parallax.testing import toys

folder, losses = sys.argv[1:]
here = parallax.launch(seed=0)
boosted = parallax.load(
    folder, parallax.zero(2), toys.Mlp, toys.momentum, resume="auto"
)
schedule = boosted.attach(parallax.schedules.cosine(boosted.optimizer, steps=40, warmup=4))
loader = boosted.loader(toys.points(24), batch_size=4, shuffle=True, seed=1)
while boosted.step < 40:
    for batch in loader:
        loss = boosted.train_step(toys.square, batch)
        schedule.step()
        if boosted.step % 2 == 0:
            boosted.save(folder, keep=2, asynchronous=boosted.step % 4 == 0)
        time.sleep(0.01)
        if boosted.step == 40:
            break
if here.rank == 0:
    open(losses, "w").write(repr(float(loss)))
"""


def test_a_script_under_torchrun_survives_two_kills(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "3", str(script)]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = subprocess.run(
        [*command, str(whole), str(tmp_path / "a")], env=environment(), capture_output=True
    )
    assert done.returncode == 0, done.stderr
    # Of the launcher's processes, those that run the script and are not the launcher itself.
    victims = kill_twice([*command, str(killed), str(tmp_path / "b")], killed, (6, 20), "script.py")
    assert len(victims) == 2
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
