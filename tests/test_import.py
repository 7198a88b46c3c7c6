"""Importing the package: no process group, and little more time than torch takes."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parent.parent)


def python(text: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", text],
        env=os.environ | {"PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def seconds(module: str) -> float:
    """Processor seconds: unlike wall time they hardly depend on what else the machine does."""
    text = f"import time; t = time.process_time(); import {module}; print(time.process_time() - t)"
    return float(python(text))


def test_importing_starts_no_process_group_thread_or_device() -> None:
    text = """
import threading, torch, torch.distributed as dist, parallax
print(parallax.__name__, dist.is_initialized(), torch.cuda.is_initialized())
print(threading.active_count())
"""
    assert python(text).split() == ["parallax", "False", "False", "1"]


@pytest.mark.slow
def test_importing_costs_little_more_than_torch() -> None:
    rounds = [(seconds("torch"), seconds("parallax")) for _ in range(5)]
    torch_alone, parallax = (statistics.median(column) for column in zip(*rounds, strict=True))
    assert parallax <= 1.2 * torch_alone
