"""A learning-rate scheduler's state as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parallax.booster.onefile import on_first, replace_text, together
from parallax.checkpoint.plain import back, plain
from parallax.errors import CheckpointError

FORMAT = "parallax.lr_scheduler"


def save_schedule(scheduler: Any, path: Path) -> None:
    """Write a scheduler's state; collective, rank 0 writes.

    Raises:
        CheckpointError: Its state holds more than plain values, or could not be written.
    """

    def write() -> None:
        kind = type(scheduler).__name__
        state = plain(scheduler.state_dict(), kind)
        replace_text(path, json.dumps({"format": FORMAT, "class": kind, "state": state}, indent=1))

    on_first(write, str(path))


def load_schedule_(scheduler: Any, path: Path) -> None:
    """Read a state into a scheduler of the same class, in place.

    Raises:
        CheckpointError: It is missing, damaged, or of another class of scheduler.
    """
    states: list[dict[str, Any]] = []
    together(lambda: states.append(_read(scheduler, path)))
    scheduler.load_state_dict(states[0])


def _read(scheduler: Any, path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
        found, kind, state = raw["format"], raw["class"], back(raw["state"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a scheduler's state: {type(error).__name__}: {error}.\n\n"
            "Give the path that save_lr_scheduler wrote."
        ) from None
    if (found, kind) != (FORMAT, type(scheduler).__name__):
        raise CheckpointError(
            f"{path} holds the state of a {kind}, and the scheduler is a "
            f"{type(scheduler).__name__}.\n\nMake the scheduler as it was when it was saved."
        )
    return state
