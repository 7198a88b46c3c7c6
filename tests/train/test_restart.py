import json

import pytest

from parallax.errors import CheckpointError
from parallax.train.restart import Checkpoints

RUN = {"size": "tiny", "batch_size": 8, "seed": 0}


class Saved:
    """Stands for a boosted pair: writes a folder."""

    def save(self, folder):
        folder.mkdir(parents=True)


def test_the_last_one_saved_is_the_last(tmp_path):
    checkpoints = Checkpoints(tmp_path, RUN)
    checkpoints.save(Saved(), 5)
    folder = checkpoints.save(Saved(), 10)
    assert folder.name == "step-000010"
    assert Checkpoints(tmp_path, RUN).latest() == (folder, 10)


def test_a_save_that_fails_leaves_the_one_before_as_the_last(tmp_path):
    class Failing:
        def save(self, folder):
            folder.mkdir()
            raise OSError("disk full")

    checkpoints = Checkpoints(tmp_path, RUN)
    checkpoints.save(Saved(), 5)
    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(Failing(), 10)
    assert checkpoints.latest()[1] == 5


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path):
    pointer = str(tmp_path / "checkpoints" / "latest")
    checkpoints = Checkpoints(tmp_path, RUN)
    expected = (
        f"The last checkpoint was asked for; there is no file {pointer!r} that names it.\n\n"
        "Leave out --resume to start anew, or give --out the folder of an earlier run."
    )
    with pytest.raises(CheckpointError) as error:
        checkpoints.latest()
    assert str(error.value) == expected
    checkpoints.save(Saved(), 5)
    checkpoints.forget()
    with pytest.raises(CheckpointError) as error:
        checkpoints.latest()
    assert str(error.value) == expected


def test_a_run_with_other_options_is_refused_with_all_of_them(tmp_path):
    folder = Checkpoints(tmp_path, RUN).save(Saved(), 5)
    with pytest.raises(CheckpointError) as error:
        Checkpoints(tmp_path, RUN | {"batch_size": 16, "seed": 1}).latest()
    assert str(error.value) == (
        f"Continuing {str(folder)!r} was asked for; it was trained otherwise, and would go on "
        "with other samples than it began with:\n\n"
        "  batch_size: 8 then, 16 now\n"
        "  seed: 0 then, 1 now\n\n"
        "Give the same options as then, or leave out --resume."
    )


@pytest.mark.parametrize("text", ["", "[1]", json.dumps(RUN)])
def test_a_damaged_note_is_named(tmp_path, text):
    folder = Checkpoints(tmp_path, RUN).save(Saved(), 5)
    (folder / "run.json").write_text(text)
    with pytest.raises(CheckpointError) as error:
        Checkpoints(tmp_path, RUN).latest()
    asked = f"The last checkpoint, {str(folder)!r}, was asked for; its run.json cannot be read: "
    remedy = (
        ".\n\nWrite the name of another folder there into "
        f"{str(tmp_path / 'checkpoints' / 'latest')!r}, or leave out --resume."
    )
    assert str(error.value).startswith(asked)
    assert str(error.value).endswith(remedy)
