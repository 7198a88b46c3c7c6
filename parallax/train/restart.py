"""Checkpoints of a job: where they lie, which is the last, and whether it may be continued.

<out>/checkpoints/step-000200/    what `boosted.save` writes, and run.json
<out>/checkpoints/latest          the name of the last complete one
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from parallax.errors import CheckpointError

if TYPE_CHECKING:
    from parallax import Boosted


class Checkpoints:
    """The checkpoints of one job.

    Args:
        out: The job's folder.
        run: What has to be the same for a run to be continued: batch size, seed and so on.
    """

    def __init__(self, out: Path, run: Mapping[str, object]) -> None:
        self.folder = out / "checkpoints"
        self.run = dict(run)

    def save(self, boosted: Boosted, step: int) -> Path:
        """Writes a checkpoint and makes it the last. Every rank calls it.

        Args:
            boosted: What to save.
            step: How many steps it has been trained for.

        Returns:
            Its folder.
        """
        folder = self.folder / f"step-{step:06d}"
        boosted.save(folder)
        # `latest` must not name a checkpoint that other ranks are still writing.
        _meet()
        if _first():
            (folder / "run.json").write_text(json.dumps(self.run | {"step": step}, indent=2) + "\n")
            written = self.folder / "latest.new"
            written.write_text(folder.name + "\n")
            os.replace(written, self.folder / "latest")
        _meet()
        return folder

    def forget(self) -> None:
        """Makes no checkpoint the last, for a run that starts anew in a used folder."""
        if _first():
            (self.folder / "latest").unlink(missing_ok=True)

    def latest(self) -> tuple[Path, int]:
        """The last complete checkpoint and its step.

        Raises:
            CheckpointError: There is none, or it is of another run.
        """
        pointer = self.folder / "latest"
        if not pointer.exists():
            raise CheckpointError(
                f"The last checkpoint was asked for; there is no file {str(pointer)!r} that names "
                f"it.\n\nLeave out --resume to start anew, or give --out the folder of an earlier "
                f"run."
            )
        folder = self.folder / pointer.read_text().strip()
        try:
            saved = json.loads((folder / "run.json").read_text())
            step = int(saved["step"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"The last checkpoint, {str(folder)!r}, was asked for; its run.json cannot be "
                f"read: {error}.\n\n"
                f"Write the name of another folder there into {str(pointer)!r}, or leave out "
                f"--resume."
            ) from error
        other = [
            f"  {key}: {saved.get(key)!r} then, {value!r} now"
            for key, value in self.run.items()
            if saved.get(key) != value
        ]
        if other:
            raise CheckpointError(
                f"Continuing {str(folder)!r} was asked for; it was trained otherwise, and would go "
                f"on with other samples than it began with:\n\n"
                + "\n".join(other)
                + "\n\nGive the same options as then, or leave out --resume."
            )
        return folder, step


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _meet() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
