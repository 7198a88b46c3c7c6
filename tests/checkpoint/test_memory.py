"""What saving and loading hold in host memory, measured: a chunk beside what is there anyway."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = '''
import json, sys, threading, time
import parallax, torch
from torch import nn
from parallax.checkpoint import load

folder, planted = sys.argv[1:]
parallax.launch()

def private():
    with open("/proc/self/status") as status:
        line = next(row for row in status if row.startswith("RssAnon"))
    return int(line.split()[1]) << 10

def over(work):
    """The most private memory while it works, over what stays when it is done."""
    before = most = private()
    stop = threading.Event()
    def watch():
        nonlocal most
        while not stop.wait(0.0005):
            most = max(most, private())
    thread = threading.Thread(target=watch)
    thread.start()
    result = work()
    stop.set()
    thread.join()
    return most - max(before, private()), result

def model():
    return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(3)))

def adamw(model):
    return torch.optim.AdamW(model.parameters())

if planted == "copy":  # a saving that holds all it writes
    import importlib
    save = importlib.import_module("parallax.checkpoint.save")
    real = save.content
    def content(*args):
        found = real(*args)
        found.parts = [part.clone() for part in found.parts]
        return found
    save.content = content

boosted = parallax.zero(3)(made := model(), adamw(made))
boosted.train_step(lambda m, b: m(b).square().mean(), torch.randn(2, 2048))
boosted.save(folder)  # once, so that what is imported and allocated for good is there
found = {"share": sum(p.nbytes for p in boosted.model.parameters()) * 3}
found["save"], _ = over(lambda: boosted.save(folder))
found["load into a trained pair"], _ = over(lambda: boosted.load_(folder))
other = parallax.zero(3)(fresh := model(), adamw(fresh))
found["load into a fresh pair"], _ = over(lambda: other.load_(folder))
print(json.dumps(found))
'''

CHUNK = 4 << 20


def measured(folder: Path, planted: str = "") -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), planted],
        capture_output=True,
        text=True,
        timeout=200,
        # Freed memory goes back to the system at once, so that what is seen is what is held.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "0"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_saving_and_loading_hold_a_chunk(tmp_path: Path) -> None:
    found = measured(tmp_path / "c")
    share = found.pop("share")
    assert share >= 36 * CHUNK
    # A chunk, its copy where it is not contiguous, the index as text, and threads' stacks.
    assert {what: over // CHUNK for what, over in found.items() if over > 3 * CHUNK} == {}


@pytest.mark.slow
def test_a_copy_would_be_seen(tmp_path: Path) -> None:
    found = measured(tmp_path / "c", planted="copy")
    assert found["save"] > found["share"] // 2
