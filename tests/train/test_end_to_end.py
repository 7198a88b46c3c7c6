import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import parallax
from parallax.cli import app

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def train(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    }
    environment["PYTHONPATH"] = str(Path(parallax.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-m", "parallax", "train", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


def losses(folder: Path) -> dict[int, str]:
    with (folder / "loss.csv").open(newline="") as file:
        return {int(row["step"]): row["loss"] for row in csv.DictReader(file)}


def test_a_run_writes_its_files_and_a_resumed_one_goes_on_as_if_undisturbed(tmp_path):
    text = tmp_path / "text.py"
    # Two epochs and a half, so that resuming has to find its place in a later one.
    text.write_text("".join(f"def number_{i}():\n    return {i}\n" for i in range(300)))
    options = ["--nproc", 2, "--compose", "tp(2), zero(2), bf16, clip(1.0)", "--data", text]
    options += ["--batch-size", 64, "--seq", 48, "--steps", 8, "--save-every", 5]
    options += ["--warmup", 2, "--sample-length", 5, "--eval-windows", 10]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"

    done = train(*options, "--out", whole)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in whole.iterdir()} == {
        "checkpoints",
        "loss.csv",
        "loss.png",
        "result.json",
        "sample.txt",
    }
    result = json.loads((whole / "result.json").read_text())
    assert result["step"] == 8
    assert result["held_out"] < result["held_out_before"]
    assert f"held-out loss: {result['held_out']:.4f}" in done.stdout
    assert f"unigram entropy of the held-out text: {result['unigram_entropy']:.4f}" in done.stdout
    assert (whole / "sample.txt").read_text().startswith("def ")
    assert list(losses(whole)) == list(range(1, 9))

    # As if the machine had stopped after step 7.
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000008")
    done = train(*options, "--out", resumed, "--resume", "must")
    assert done.returncode == 0, done.stderr
    assert losses(resumed) == losses(whole)
    again = json.loads((resumed / "result.json").read_text())
    assert again["held_out"] == result["held_out"]

    done = CliRunner().invoke(
        app, ["train", *map(str, options), "--out", str(resumed), "--resume", "must"]
    )
    assert done.exit_code == 1
    folder = str(resumed / "checkpoints")
    assert done.stderr == (
        f"ParallaxError: Training to step 8 was asked for; the last checkpoint in {folder!r} is at "
        "step 8.\n\nGive --steps more than 8, or leave out --resume.\n"
    )
