"""Reading a checkpoint into any composition: every rank reads the blocks that meet its own."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parallax.checkpoint.files import Entry, Index, Part, crc32, flat, read_index
from parallax.checkpoint.save import settings
from parallax.core.boosted import Boosted
from parallax.core.mesh import agree
from parallax.core.slices import Box, box, like, local
from parallax.core.state import KINDS, Kind
from parallax.errors import CheckpointError

HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings of a group that say by which kernels it is stepped, not what is computed."""


def load_(
    boosted: Boosted, directory: str | os.PathLike[str], *, kinds: tuple[Kind, ...] = KINDS
) -> None:
    """Read a checkpoint into a boosted pair, in place, whatever composition saved it.

    Args:
        boosted: The pair to write into; collective over all ranks.
        directory: What `save` wrote.
        kinds: Which parts of the state to read.

    Raises:
        CheckpointError: It is missing, damaged, or does not fit this model or optimizer. Raised on
            every rank before anything is changed.

    Cost:
        Each rank reads the blocks it holds, and holds them twice while loading.
    """
    boosted.free("load_")
    path = Path(directory).absolute()
    fault, tree, index = "", {}, None
    try:
        index = read_index(path)
        _fits(boosted, index, kinds, path)
        with ExitStack() as stack:
            tree = _read(boosted, index, kinds, _Reader(path, index.token, stack))
    except CheckpointError as error:
        fault = str(error)
    except Exception as error:  # noqa: BLE001  the other ranks must not be left waiting
        fault = f"the checkpoint {path} cannot be read: {type(error).__name__}: {error}."
    _, found = agree("", fault)
    if any(found):
        raise CheckpointError(next(text for text in found if text))
    assert index is not None, "an index was read, or a fault raised"
    boosted.write_(tree, kinds=kinds)
    if boosted.optimizer is not None and "moments" in kinds:
        for group, saved in zip(boosted.optimizer.param_groups, index.groups, strict=True):
            for key, value in saved["settings"].items():
                if key not in HOW:
                    group[key] = restored(value, group.get(key))


def _fits(boosted: Boosted, index: Index, kinds: tuple[Kind, ...], path: Path) -> None:
    faults: list[str] = []
    for kind in ("params", "buffers"):
        if kind not in kinds:
            continue
        here = {f"{kind}/{name}": t for name, t in boosted.leaves(kind).items()}
        saved = {key for key in index.tensors if key.startswith(f"{kind}/")}
        faults += [
            f"{key[len(kind) + 1 :]} is in the model only" for key in here if key not in saved
        ]
        faults += [
            f"{key[len(kind) + 1 :]} is in the checkpoint only" for key in sorted(saved - set(here))
        ]
        faults += [
            f"{key[len(kind) + 1 :]} has shape {index.tensors[key].shape} in the checkpoint and "
            f"{tuple(t.shape)} in the model"
            for key, t in here.items()
            if key in saved and index.tensors[key].shape != tuple(t.shape)
        ]
    if boosted.optimizer is not None and "moments" in kinds:
        kind = type(boosted.optimizer).__name__
        if index.optimizer != kind:
            faults.append(f"the optimizer is {kind}, the checkpoint's is {index.optimizer}")
        mine = [row["params"] for row in settings(boosted)]
        theirs = [row["params"] for row in index.groups]
        if mine != theirs:
            faults.append(
                f"the optimizer has {len(mine)} groups of {[len(m) for m in mine]} parameters, the "
                f"checkpoint {len(theirs)} of {[len(m) for m in theirs]}, or in another order"
            )
    if faults:
        shown = "\n".join(f"  {fault}" for fault in faults[:8])
        more = f"\n  and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise CheckpointError(
            f"the checkpoint {path} does not fit {boosted.title}:\n{shown}{more}\n\n"
            "Build the model and the optimizer's groups as they were when it was saved."
        )


def _read(
    boosted: Boosted, index: Index, kinds: tuple[Kind, ...], reader: _Reader
) -> dict[str, Any]:
    tree: dict[str, Any] = {kind: {} for kind in KINDS}
    tree["step"] = torch.tensor(index.step)
    for kind in ("params", "buffers"):
        if kind in kinds:
            for name, target in boosted.leaves(kind).items():
                key = f"{kind}/{name}"
                block = reader.block(key, index.tensors[key], box(target))
                tree[kind][name] = like(block.to(local(target).device), target)
    if "moments" in kinds and boosted.optimizer is not None:
        tree["moments"] = _moments(boosted, index, reader)
    if "rooms" in kinds:
        for room, state in boosted.rooms.items():
            for entry, target in flat(state.state):
                key = f"rooms/{room}/{entry}"
                if key in index.tensors and isinstance(target, Tensor):
                    block = reader.block(key, index.tensors[key], box(target))
                    _put(tree["rooms"].setdefault(room, {}), entry, like(block, target))
                elif key in index.values:
                    _put(tree["rooms"].setdefault(room, {}), entry, index.values[key])
    return tree


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split("/")
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[last] = value


def _moments(boosted: Boosted, index: Index, reader: _Reader) -> dict[str, dict[str, Any]]:
    moments: dict[str, dict[str, Any]] = {}
    params = boosted.params
    counts = _counts_on_device(boosted)
    for key, entry in index.tensors.items():
        if not key.startswith("moments/"):
            continue
        name, _, slot = key.removeprefix("moments/").rpartition("/")
        owner = boosted.owners.get(name)
        if name not in params or owner not in (None, boosted.mesh.get_rank()):
            continue
        parameter = params[name]
        # What is stepped whole keeps its state whole, at its owner.
        shaped = owner is None and entry.shape == tuple(parameter.shape) and len(entry.shape) > 0
        block = reader.block(key, entry, box(parameter) if shaped else _all(entry))
        # The step count lives on the CPU unless a kernel reads it; everything else with its
        # parameter.
        on_cpu = slot == "step" and id(parameter) not in counts
        block = block if on_cpu else block.to(local(parameter).device)
        moments.setdefault(name, {})[slot] = like(block, parameter) if shaped else block
    for key, value in index.values.items():
        if key.startswith("moments/"):
            name, _, slot = key.removeprefix("moments/").rpartition("/")
            if boosted.owners.get(name) in (None, boosted.mesh.get_rank()):
                moments.setdefault(name, {})[slot] = value
    return moments


def _counts_on_device(boosted: Boosted) -> set[int]:
    """Parameters whose step count torch keeps on their device: of capturable and fused groups."""
    assert boosted.optimizer is not None
    return {
        id(p)
        for group in boosted.optimizer.param_groups
        if group.get("capturable") or group.get("fused")
        for p in group["params"]
    }


def _all(entry: Entry) -> Box:
    return Box((0,) * len(entry.shape), entry.shape)


class _Reader:
    """Reads blocks out of the files of one checkpoint, each opened once and memory-mapped."""

    def __init__(self, directory: Path, token: str, stack: ExitStack) -> None:
        self._directory = directory
        self._token = token
        self._stack = stack
        self._files: dict[str, Any] = {}
        self._checked: set[tuple[str, str]] = set()

    def block(self, key: str, entry: Entry, wanted: Box) -> Tensor:
        """One block of a tensor, put together from the parts that meet it."""
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(
                f"{key} has the dtype {entry.dtype!r}, which torch does not know."
            )
        out = torch.empty(wanted.lengths, dtype=dtype)
        read = 0
        for part in entry.parts:
            meet = part.box.overlap(wanted)
            if meet.empty:
                continue
            piece = self._slice(key, part, meet)
            out[meet.within(wanted)] = piece
            read += piece.numel()
        if read != out.numel():
            raise CheckpointError(
                f"{key} in {self._directory} is incomplete: {read} of {out.numel()} elements that "
                "this rank needs are there.\n\nThe index is damaged; load another checkpoint."
            )
        return out

    def _slice(self, key: str, part: Part, meet: Box) -> Tensor:
        where = self._directory / part.file
        try:
            whole = self._open(part.file).get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{key} cannot be read from {where}: {error}.\n\nThe file is missing or damaged; "
                "load another checkpoint."
            ) from None
        if tuple(whole.shape) != part.box.lengths:
            raise CheckpointError(
                f"{key} in {where} has shape {tuple(whole.shape)}, and the index says "
                f"{part.box.lengths}.\n\nThe files are from different checkpoints."
            )
        if (key, part.file) not in self._checked:
            if crc32(whole) != part.crc:
                raise CheckpointError(
                    f"{key} in {where} is damaged: its bytes do not have the checksum that the "
                    "index holds.\n\nLoad another checkpoint."
                )
            self._checked.add((key, part.file))
        return whole[meet.within(part.box)] if part.box.lengths else whole

    def _open(self, file: str) -> Any:
        if file not in self._files:
            handle = self._stack.enter_context(safe_open(self._directory / file, framework="pt"))
            if (handle.metadata() or {}).get("token") != self._token:
                raise CheckpointError(
                    f"{self._directory / file} belongs to another checkpoint than the index beside "
                    "it.\n\nPut the files of one checkpoint together, or load another one."
                )
            self._files[file] = handle
        return self._files[file]


def restored(value: Any, current: Any) -> Any:
    """A setting as JSON gives it back, in the form of what stands there: JSON knows lists only."""
    if isinstance(current, Tensor):
        return torch.full_like(current, value)
    if not isinstance(value, list):
        return value
    alike = isinstance(current, list | tuple) and len(current) == len(value)
    rows = [restored(v, c) for v, c in zip(value, current if alike else value, strict=True)]
    return rows if isinstance(current, list) else tuple(rows)
