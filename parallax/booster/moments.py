"""An optimizer's state in one file: whole moments by parameter name, and settings as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallax.booster.onefile import Files, files_at, on_first, replace_tensors, together
from parallax.checkpoint.files import flat
from parallax.checkpoint.groups import HOW, restored, settings
from parallax.core.boosted import Boosted
from parallax.core.collect import collect
from parallax.core.slices import box, like, local
from parallax.errors import CheckpointError

NOTE = "parallax.optimizer"


def save_moments(boosted: Boosted, path: Path) -> None:
    """Write the optimizer's state, its groups and the number of updates to one file; collective.

    Cost:
        Rank 0 holds the whole state on its CPU; tensors travel there one by one.

    Raises:
        CheckpointError: Rank 0 could not write; raised on every rank.
    """
    tree = {kind: boosted.leaves(kind) for kind in ("moments", "rooms")}
    whole = collect(tree, boosted.mesh, owners=boosted.owners)
    groups = settings(boosted)

    def write() -> None:
        rows = dict(flat(whole))
        tensors = {key: value for key, value in rows.items() if isinstance(value, Tensor)}
        values = {key: value for key, value in rows.items() if not isinstance(value, Tensor)}
        note = {"step": boosted.step, "groups": groups, "values": values}
        try:
            text = json.dumps(note)
        except TypeError as error:
            raise CheckpointError(
                f"the settings of {type(boosted.optimizer).__name__} cannot be written as JSON: "
                f"{error}.\n\nKeep numbers, text and tensors in its groups and state."
            ) from None
        replace_tensors(path, tensors, {NOTE: text})

    on_first(write, str(path))


def load_moments_(boosted: Boosted, path: Path) -> None:
    """Read an optimizer's state into a boosted pair, in place; collective.

    Raises:
        CheckpointError: The file is missing, damaged, or of other parameters. Raised on every rank
            before anything is changed.

    Cost:
        Each rank reads the blocks it holds.
    """
    tree: dict[str, Any] = {"moments": {}, "rooms": {}}
    groups: list[dict[str, Any]] = []

    def read() -> None:
        with Files(path, files_at(path)) as files:
            note = _note(files)
            groups.extend(note["groups"])
            _fits(boosted, files, groups)
            tree["step"] = torch.tensor(note["step"])
            _read(boosted, files, note["values"], tree)

    together(read)
    boosted.write_(tree, kinds=("moments", "rooms", "step"))
    assert boosted.optimizer is not None, "a pair without an optimizer is refused by the caller"
    for group, saved in zip(boosted.optimizer.param_groups, groups, strict=True):
        for key, value in saved["settings"].items():
            if key not in HOW:
                group[key] = restored(value, group.get(key))


def _note(files: Files) -> dict[str, Any]:
    try:
        note = json.loads(files.note[NOTE])
        return {"step": int(note["step"]), "groups": note["groups"], "values": note["values"]}
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{files.path} holds no optimizer's state.\n\nGive the path that save_optimizer wrote."
        ) from None


def _fits(boosted: Boosted, files: Files, groups: list[dict[str, Any]]) -> None:
    mine = [row["params"] for row in settings(boosted)]
    theirs = [row["params"] for row in groups]
    if mine != theirs:
        raise CheckpointError(
            f"{files.path} does not fit {boosted.title}: the optimizer has {len(mine)} groups of "
            f"{[len(m) for m in mine]} parameters, the file {len(theirs)} of "
            f"{[len(m) for m in theirs]}, or in another order.\n\n"
            "Make the optimizer's groups as they were when it was saved."
        )


def _read(boosted: Boosted, files: Files, values: dict[str, Any], tree: dict[str, Any]) -> None:
    params = boosted.params
    counting = _counts_on_device(boosted)
    for key in (*files.shapes, *values):
        kind, _, rest = key.partition("/")
        name, _, slot = rest.rpartition("/")
        owner = boosted.owners.get(name)
        if kind != "moments" or name not in params or owner not in (None, boosted.mesh.get_rank()):
            continue
        parameter, row = params[name], tree["moments"].setdefault(name, {})
        if key in values:
            row[slot] = values[key]
            continue
        # What is stepped whole keeps its state whole, at its owner.
        shaped = (
            owner is None and files.shapes[key] == tuple(parameter.shape) and parameter.ndim > 0
        )
        block = files.block(key, box(parameter) if shaped else None)
        # torch keeps step counts on the CPU unless a kernel reads them.
        if slot != "step" or id(parameter) in counting:
            block = block.to(local(parameter).device)
        row[slot] = like(block, parameter) if shaped else block
    saved = {key.split("/")[1] for key in (*files.shapes, *values) if key.startswith("rooms/")}
    for name, room in boosted.rooms.items():
        if room.state and name in saved:
            tree["rooms"][name] = _room(room.state, f"rooms/{name}", files, values)


def _room(state: dict[str, Any], prefix: str, files: Files, values: dict[str, Any]) -> Any:
    """A room's state with what the file holds of it in place of what there is."""
    read: dict[str, Any] = {}
    for name, target in state.items():
        key = f"{prefix}/{name}"
        if isinstance(target, dict):
            read[name] = _room(target, key, files, values)
        elif isinstance(target, Tensor) and key in files.shapes:
            block = files.block(key, box(target)).to(local(target).device)
            read[name] = like(block, target)
        else:
            read[name] = values.get(key, target)
    return read


def _counts_on_device(boosted: Boosted) -> set[int]:
    assert boosted.optimizer is not None, "a pair without an optimizer is refused by the caller"
    return {
        id(p)
        for group in boosted.optimizer.param_groups
        if group.get("capturable") or group.get("fused")
        for p in group["params"]
    }
