"""Settings of an optimizer's groups, as JSON and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from parallax.core.bind import group_names
from parallax.core.boosted import Boosted
from parallax.errors import CheckpointError

HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings of a group that say by which kernels it is stepped, not what is computed."""


def settings(boosted: Boosted) -> list[dict[str, Any]]:
    """The optimizer's groups as JSON: names, and every setting that is a plain value."""
    assert boosted.optimizer is not None, "only asked for where there is one"
    names = group_names(boosted.optimizer, boosted.names, boosted.model)
    rows = []
    for group, members in zip(boosted.optimizer.param_groups, names, strict=True):
        plain = {k: _setting(v, k) for k, v in group.items() if k != "params"}
        rows.append({"params": members, "settings": plain})
    return rows


def _setting(value: Any, name: str) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_setting(v, name) for v in value]
    if isinstance(value, dict):
        return {str(k): _setting(v, name) for k, v in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        f"the optimizer has the setting {name}={value!r}, a {type(value).__name__}, and a "
        "checkpoint holds numbers and text.\n\nGive the optimizer a plain value, or save the rest: "
        "boosted.save(directory, kinds=('params', 'buffers', 'rooms', 'step'))."
    )


def set_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Put the settings of an optimizer's groups where a checkpoint has them."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved["settings"].items():
            if key not in HOW:
                group[key] = restored(value, group.get(key))


@torch.no_grad()
def restored(value: Any, current: Any) -> Any:
    """A setting as JSON gives it back, in the form of what stands there: JSON knows lists only."""
    if isinstance(current, Tensor):
        return current.fill_(value)  # what reads a rate from a tensor holds that very tensor
    if not isinstance(value, list):
        return value
    alike = isinstance(current, list | tuple) and len(current) == len(value)
    rows = [restored(v, c) for v, c in zip(value, current if alike else value, strict=True)]
    return rows if isinstance(current, list) else tuple(rows)
