"""Checkpoints of a job: in `<out>/checkpoints`, as `boosted.save(folder, keep=n)` lays them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallax.checkpoint import latest, read_index
from parallax.checkpoint.plain import back
from parallax.errors import CheckpointError

NAME = "run"


def checkpoints(out: Path) -> Path:
    """The folder of a job's checkpoints."""
    return out / "checkpoints"


class Run:
    """What has to be the same for a job to be continued; it goes along into its checkpoints.

    Args:
        options: Batch size, seed and so on, by name.
    """

    def __init__(self, options: Mapping[str, object]) -> None:
        self.options = dict(options)

    def state_dict(self) -> dict[str, object]:
        """The options."""
        return dict(self.options)

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Compare with the options of the run that was saved.

        Raises:
            CheckpointError: They differ.
        """
        other = [
            f"  {key}: {state_dict.get(key)!r} then, {value!r} now"
            for key, value in self.options.items()
            if state_dict.get(key) != value
        ]
        if other:
            raise CheckpointError(
                "Continuing a run was asked for; it was trained otherwise, and would go on with "
                "other samples than it began with:\n\n" + "\n".join(other) + "\n\nGive the same "
                "options as then, or leave out --resume."
            )


def begun(out: Path, run: Run, resume: str) -> int | None:
    """The step that a job continues from, looked up before anything is loaded.

    Args:
        out: The job's folder.
        run: What the job is.
        resume: `"must"`, `"auto"` or `"never"`.

    Returns:
        The step of the last checkpoint; None to begin anew.

    Raises:
        CheckpointError: There is none and has to be one, or it is of another run.
    """
    if resume == "never":
        return None
    folder = checkpoints(out)
    last = latest(folder)
    if last is None:
        if resume == "auto":
            return None
        raise CheckpointError(
            f"The last checkpoint was asked for; there is none in {str(folder)!r}.\n\nLeave out "
            "--resume to start anew, or give --out the folder of an earlier run."
        )
    index = read_index(last)
    saved: Any = back(index.values.get(f"attached/{NAME}"))
    run.load_state_dict(saved if isinstance(saved, dict) else {})
    return index.step


def put_aside(out: Path) -> Path | None:
    """Move the checkpoints of an earlier run out of the way of one that begins anew.

    Returns:
        Where they are now; None when there are none.
    """
    folder = checkpoints(out)
    if latest(folder) is None:
        return None
    numbers = (n for n in range(1, 1 << 30) if not (out / f"checkpoints-{n}").exists())
    return folder.rename(out / f"checkpoints-{next(numbers)}")


def restarted() -> bool:
    """Whether a launcher started this process again, after a rank had died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
