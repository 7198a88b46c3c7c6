"""Ranks killed at any moment leave the last complete checkpoint, and no half one in sight."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parallax.checkpoint import latest
from parallax.checkpoint.folder import Target, find
from parallax.testing import pool, toys

SAVERS = Path(__file__).with_name("savers.py")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_kills_lose_nothing(tmp_path: Path) -> None:
    """Rotated, replaced in place and asynchronous saves of two ranks; SIGKILL at random moments."""
    folder = tmp_path / "run"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, str(SAVERS), str(folder), "200", "1"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 200
    assert [row for row in rows if row["faults"]] == []
    # The trials are worth something: kills struck while files were written, and steps were made.
    # How many depends on how busy the machine is.
    assert sum(bool(row["left"]) for row in rows) > 20
    assert rows[-1]["step"] > 10
    assert {row["way"] for row in rows} == {"rotated", "replaced", "asynchronous"}


def savers() -> Any:
    spec = importlib.util.spec_from_file_location("savers", SAVERS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save(directory: str, step: int = 0, seed: int = 0) -> None:
    from parallax import dp

    boosted = dp()(toys.Mlp())
    for _ in range(step):
        boosted._count(True)
    boosted.save(directory)


@pytest.mark.ranks
def test_the_judge_would_see_a_half_one(tmp_path: Path) -> None:
    pool(1).run(save, str(tmp_path / "a"), 3)
    judge = savers().judge
    assert judge(tmp_path, 3) == []
    assert judge(tmp_path, 4) == ["step 4 was saved, the newest is 3"]
    state = tmp_path / "a" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1])
    (found,) = judge(tmp_path, 3)
    assert found.startswith("a: random/0/0 cannot be read")


@pytest.mark.ranks
def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    """The old one is out of the way, and the new one not yet in its place."""
    path = tmp_path / "c"
    pool(1).run(save, str(path), 3)
    hidden = path.with_name(".c.0123abcd.old")
    path.rename(hidden)
    assert find(path) == hidden
    assert latest(tmp_path) == hidden
    assert pool(1).run(loaded_step, str(path)) == [3]
    pool(1).run(save, str(path), 4)
    assert sorted(tmp_path.iterdir()) == [path]
    assert pool(1).run(loaded_step, str(path)) == [4]


def loaded_step(directory: str) -> int:
    from parallax import dp

    boosted = dp()(toys.Mlp())
    boosted.load_(directory)
    return boosted.step


@pytest.mark.ranks
def test_what_a_kill_put_aside_comes_back_before_the_next_save(tmp_path: Path) -> None:
    path = tmp_path / "c"
    pool(1).run(save, str(path), 3)
    path.rename(path.with_name(".c.0123abcd.old"))
    target = Target(path, "token")
    target.begin(0)
    assert (path / "index.json").is_file()
    target.abandon()
    assert sorted(tmp_path.iterdir()) == [path]
