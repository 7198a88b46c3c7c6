"""A learning-rate scheduler's state as JSON."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallax.booster.onefile import on_first, replace_text, together
from parallax.errors import CheckpointError

FORMAT = "parallax.lr_scheduler"


def save_schedule(scheduler: Any, path: Path) -> None:
    """Write a scheduler's state; collective, rank 0 writes.

    Raises:
        CheckpointError: Its state holds more than plain values, or could not be written.
    """

    def write() -> None:
        kind = type(scheduler).__name__
        state = _plain(scheduler.state_dict(), kind)
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
        found, kind, state = raw["format"], raw["class"], _back(raw["state"])
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


def _plain(value: Any, where: str) -> Any:
    """A value as JSON holds it; what JSON has no form for is tagged by its kind."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, list):
        return [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]}
    if isinstance(value, dict) and type(value) in (dict, Counter):
        rows = [[_plain(k, where), _plain(v, f"{where}.{k}")] for k, v in value.items()]
        return {type(value).__name__: rows}
    raise CheckpointError(
        f"the scheduler's state holds {where}, a {type(value).__name__}, which is no plain value."
        "\n\nLeave it out of the scheduler's state_dict and give it when the scheduler is made."
    )


def _back(value: Any) -> Any:
    if isinstance(value, list):
        return [_back(v) for v in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    if "tuple" in value:
        return tuple(_back(v) for v in value["tuple"])
    ((kind, rows),) = value.items()
    pairs = {_back(k): _back(v) for k, v in rows}
    return Counter(pairs) if kind == "Counter" else pairs
