"""Whether a job continues, from where, and that nothing of an earlier one is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from typer.testing import CliRunner

from parallax import dp
from parallax.cli import app
from parallax.errors import CheckpointError, ParallaxError
from parallax.testing import World, pool, toys
from parallax.train.job import _begun
from parallax.train.options import Job
from parallax.train.restart import NAME, Run, begun, checkpoints, put_aside, restarted

OPTIONS = {"size": "tiny", "batch_size": 8, "seed": 0}

pytestmark = pytest.mark.ranks


def save(out: str, steps: int, options: dict[str, object] | None = None) -> None:
    boosted = dp()(toys.Mlp())
    if options is not None:
        boosted.attach(Run(options), name=NAME)
    for _ in range(steps):
        boosted._count(True)
        boosted.save(checkpoints(Path(out)), keep=2)


@pytest.fixture
def world1() -> World:
    return pool(1)


def test_the_last_one_saved_is_continued(tmp_path: Path, world1: World) -> None:
    world1.run(save, str(tmp_path), 3, OPTIONS)
    names = sorted(p.name for p in checkpoints(tmp_path).iterdir())
    assert names == ["step-00000002", "step-00000003"]
    assert begun(tmp_path, Run(OPTIONS), "must") == 3
    assert begun(tmp_path, Run(OPTIONS), "auto") == 3
    assert begun(tmp_path, Run(OPTIONS), "never") is None


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path: Path) -> None:
    assert begun(tmp_path, Run(OPTIONS), "auto") is None
    with pytest.raises(CheckpointError) as error:
        begun(tmp_path, Run(OPTIONS), "must")
    assert str(error.value) == (
        f"The last checkpoint was asked for; there is none in {str(tmp_path / 'checkpoints')!r}."
        "\n\nLeave out --resume to start anew, or give --out the folder of an earlier run."
    )


@pytest.mark.parametrize("resume", ["must", "auto"])
def test_a_run_with_other_options_is_refused_with_all_of_them(
    tmp_path: Path, world1: World, resume: str
) -> None:
    world1.run(save, str(tmp_path), 1, OPTIONS)
    with pytest.raises(CheckpointError) as error:
        begun(tmp_path, Run(OPTIONS | {"batch_size": 16, "seed": 1}), resume)
    assert str(error.value) == (
        "Continuing a run was asked for; it was trained otherwise, and would go on with other "
        "samples than it began with:\n\n"
        "  batch_size: 8 then, 16 now\n"
        "  seed: 0 then, 1 now\n\n"
        "Give the same options as then, or leave out --resume."
    )


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path, world1: World) -> None:
    world1.run(save, str(tmp_path), 1)
    with pytest.raises(CheckpointError, match="size: None then, 'tiny' now"):
        begun(tmp_path, Run(OPTIONS), "must")


def test_checkpoints_of_an_earlier_run_are_put_aside(tmp_path: Path, world1: World) -> None:
    assert put_aside(tmp_path) is None
    for number in (1, 2):
        world1.run(save, str(tmp_path), 1, OPTIONS)
        assert put_aside(tmp_path) == tmp_path / f"checkpoints-{number}"
        assert begun(tmp_path, Run(OPTIONS), "auto") is None
    assert (tmp_path / "checkpoints-1" / "step-00000001" / "index.json").is_file()


def test_a_new_run_has_them_put_aside_before_its_ranks_start(
    tmp_path: Path, world1: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that dies at once is started again, and may not take them for those of its run."""
    world1.run(save, str(tmp_path), 1, OPTIONS)
    found: list[list[str]] = []

    def start(*_: object, **__: object) -> None:
        found.append(sorted(path.name for path in tmp_path.iterdir()))

    monkeypatch.setattr("parallax.cli.train.start", start)
    monkeypatch.setattr("parallax.cli.train.check", lambda job, ranks: None)
    for resume in ("auto", "never"):
        options = ["--out", str(tmp_path), "--nproc", "2", "--resume", resume]
        done = CliRunner().invoke(app, ["train", *options])
        assert done.exit_code == 0, done.output
    assert found == [["checkpoints"], ["checkpoints-1"]]
    assert done.stdout == (
        f"checkpoints of an earlier run are now in {tmp_path / 'checkpoints-1'}\n"
    )


@pytest.mark.parametrize("resume", ["never", "auto", "must"])
def test_a_restart_after_the_last_step_has_its_results_to_write(
    tmp_path: Path, world1: World, monkeypatch: pytest.MonkeyPatch, resume: Literal["never"]
) -> None:
    world1.run(save, str(tmp_path), 3, OPTIONS)
    job = Job(out=tmp_path, steps=3, resume=resume)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert _begun(job, Run(OPTIONS)) == 3
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    if resume == "must":
        with pytest.raises(ParallaxError, match="Training to step 3 was asked for"):
            _begun(job, Run(OPTIONS))
    else:
        assert _begun(job, Run(OPTIONS)) == {"never": None, "auto": 3}[resume]


def test_a_restart_is_known_by_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert not restarted()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert not restarted()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert restarted()
