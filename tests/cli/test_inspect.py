"""`parallax inspect` and `parallax convert`, as a person calls them."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from parallax import dp
from parallax.cli import app
from parallax.testing import toys

pytestmark = pytest.mark.ranks


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def saved(directory, steps):
    torch.manual_seed(0)
    model = toys.Mlp()
    boosted = dp()(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(steps):
        boosted.train_step(toys.square, boosted.shard(toys.points(4, step)))
    boosted.save(directory)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, world2):
    folder = tmp_path_factory.mktemp("runs")
    for steps in (1, 2):
        world2.run(saved, str(folder / f"step-{steps}"), steps)
    return folder


@pytest.fixture
def run(runs, tmp_path):
    return Path(shutil.copytree(runs / "step-2", tmp_path / "run"))


def test_help_names_both_commands():
    result = call("--help")
    assert "inspect" in result.stdout
    assert "convert" in result.stdout


def test_a_sound_checkpoint_is_shown(runs):
    result = call("inspect", runs)
    assert result.exit_code == 0, result.output
    directory = runs / "step-2"
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[:2] == [f"checkpoint {directory}", "format a parallax checkpoint"]
    assert "composition dp()" in lines
    assert "step 2" in lines
    assert "optimizer SGD" in lines
    assert "world 2 ranks: data_replicate 2" in lines
    assert "│ params/layers.0.weight │ 7 x 5 │ float32 │ 140 │ model.safetensors │ 1 │" in lines
    assert "│ params │ 6 │ 280 │ 280 bytes │" in lines
    count = sum(line.endswith(".safetensors │ 1 │") for line in lines)
    assert lines[-1] == f"{directory}: all checksums of {count} tensors are right"
    assert result.stderr == ""


def test_a_filter_and_no_verify(run):
    (run / "model.safetensors").write_bytes(b"damaged")
    result = call("inspect", run, "--filter", "params/*", "--no-verify")
    assert result.exit_code == 0
    assert "moments/" not in result.stdout
    assert result.stdout.endswith(f"{run}: not verified\n")


def test_all_faults_are_shown_and_the_exit_code_is_1(run):
    (run / "model.safetensors").unlink()
    state = run / "state.safetensors"
    data = bytearray(state.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    data[header] ^= 1
    state.write_bytes(data)
    result = call("inspect", run)
    assert result.exit_code == 1
    text = result.stderr
    assert text.startswith(
        f"CheckpointError: 2 faults:\n\n1. {run / 'model.safetensors'} is missing, and "
        "params/layers.0.weight, params/layers.0.bias, params/layers.1.weight, "
        "params/layers.1.bias and 2 more with it.\n\nPut the file back, or load another "
        "checkpoint.\n\n2. "
    )
    assert text.endswith(
        f" in {state} is damaged: its bytes do not have the checksum that the index holds.\n\n"
        "Load another checkpoint.\n"
    )


def test_nothing_there_is_said(tmp_path):
    result = call("inspect", tmp_path / "nowhere")
    assert result.exit_code == 1
    assert result.stderr == (
        f"CheckpointError: a checkpoint was asked for at {tmp_path / 'nowhere'}, and there is no "
        "such file or directory.\n\nGive a path that exists.\n"
    )


def test_plain_files_are_said_to_have_no_checksums(tmp_path):
    save_file({"w[0]": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    result = call("inspect", tmp_path)
    assert result.exit_code == 0
    assert "w[0]" in result.stdout  # no markup
    assert result.stdout.endswith(
        "safetensors has no checksums; every tensor has its place in the files\n"
    )


def test_what_is_equal_has_exit_code_0(runs, run):
    result = call("inspect", runs / "step-2", run)
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("tensors are equal, and so is all else\n")


def test_what_differs_is_shown_and_the_exit_code_is_1(runs):
    result = call("inspect", runs / "step-1", runs / "step-2")
    assert result.exit_code == 1
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "│ step │ 1 │ 2 │" in lines
    assert any(line.startswith("│ params/layers.0.weight │ 0.0") for line in lines)
    assert lines[-1].endswith("tensors are equal")


def test_a_damaged_checkpoint_is_not_compared(runs, run):
    (run / "state.safetensors").unlink()
    result = call("inspect", runs / "step-1", run)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"CheckpointError: {run / 'state.safetensors'} is missing, and")


def test_convert_says_what_it_did(tmp_path):
    weights = {"module.w": torch.ones(2, 3), "module.b": torch.zeros(2)}
    torch.save(weights, tmp_path / "pytorch_model.mine.bin")
    result = call(
        "convert", tmp_path / "pytorch_model.mine.bin", tmp_path / "out", "--to", "transformers",
        "--dtype", "bf16",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        f"{tmp_path / 'pytorch_model.mine.bin'}: torch.save, 2 tensors of the model, 32 bytes\n"
        "  2 names begin with 'module.', which was taken off; --prefix '' leaves them as they are."
        f"\n{tmp_path / 'out'}: written for transformers\n"
    )
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {n: (t.dtype, t.sum().item()) for n, t in found.items()} == {
        "w": (torch.bfloat16, 6.0),
        "b": (torch.bfloat16, 0.0),
    }


def test_convert_replaces_nothing(run):
    result = call("convert", run, run, "--to", "parallax")
    assert result.exit_code == 1
    assert result.stderr == (
        f"CheckpointError: {run} was to be converted to {run}, which exists.\n\nGive a directory "
        "that does not, or remove it first.\n"
    )
    assert call("inspect", run).exit_code == 0
