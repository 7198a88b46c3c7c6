"""Writing a checkpoint: every rank its own part, complete or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallax.checkpoint.files import INDEX, Entry, Index, Part, crc32, flat
from parallax.core.axes import AXES
from parallax.core.bind import group_names
from parallax.core.boosted import Boosted
from parallax.core.mesh import agree
from parallax.core.slices import Box, box, held_once, local
from parallax.core.state import KINDS, Kind
from parallax.errors import CheckpointError

Row = tuple[str, str, tuple[int, ...], Box, int]
"""A part that this rank writes: key, dtype, whole shape, block and checksum."""


def save(
    boosted: Boosted, directory: str | os.PathLike[str], *, kinds: tuple[Kind, ...] = KINDS
) -> None:
    """Write the training state to a directory, replacing what is there once all is written.

    Args:
        boosted: The pair to save; collective over all ranks.
        directory: Where to, on storage that all ranks see.
        kinds: Which parts of the state.

    Raises:
        CheckpointError: Any rank could not write; raised on every rank, and what was there stays.

    Cost:
        Every tensor is written once over all ranks, each rank its own block, with a CPU copy of
        this rank's blocks.
    """
    boosted.free("save")
    target = Path(directory).absolute()
    token: list[Any] = [uuid.uuid4().hex[:8]]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(token, src=0)
    partial = target.with_name(f".{target.name}.{token[0]}.partial")
    rank = dist.get_rank()

    def begin() -> None:
        if rank == 0:
            if target.exists() and not _replaceable(target):
                raise OSError(f"{target} exists and is no checkpoint, so it is not replaced")
            target.parent.mkdir(parents=True, exist_ok=True)
            partial.mkdir()

    _refuse_objects(boosted, kinds)
    _together(begin, f"cannot write a checkpoint to {target}")
    mine: list[Row] = []
    values: dict[str, Any] = {}
    file = f"rank-{rank:05d}.safetensors"

    def write() -> None:
        tensors = _mine(boosted, kinds, mine, values)
        if tensors:
            save_file(tensors, partial / file, metadata={"token": token[0]})

    def finish() -> None:
        if rank == 0:
            (partial / INDEX).write_text(_index(boosted, kinds, rows, values, token[0]).to_json())
            _replace(partial, target)

    try:
        _together(write, f"cannot write a checkpoint to {target}")
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, (file, mine, values))
        for _, _, theirs in rows:
            values.update(theirs)
        _together(finish, f"cannot complete the checkpoint {target}")
    finally:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)


def _together(work: Callable[[], None], what: str) -> None:
    """Do a piece of work on every rank; if one fails, all raise."""
    fault = ""
    try:
        work()
    except OSError as error:
        fault = str(error)
    except Exception as error:  # noqa: BLE001  safetensors raises its own kinds; a rank must not be left waiting
        fault = f"{type(error).__name__}: {error}"
    _, found = agree("", fault)
    if any(found):
        rows = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(found) if text)
        raise CheckpointError(
            f"{what}: {rows}.\n\nCheck that the path exists for every rank, is writable and has "
            "room. Nothing that was there before has been changed."
        )


def _mine(
    boosted: Boosted,
    kinds: tuple[Kind, ...],
    rows: list[Row],
    values: dict[str, Any],
) -> dict[str, Tensor]:
    coordinate = boosted.mesh.get_coordinate()
    assert coordinate is not None, "every rank of the world is in the mesh"
    tensors: dict[str, Tensor] = {}
    for key, value in flat({kind: boosted.leaves(kind) for kind in kinds if kind != "step"}):
        owner = _owner(boosted, key)
        if not isinstance(value, Tensor):
            if not isinstance(value, dict) and owner in (None, boosted.mesh.get_rank()):
                values[key] = value
            continue
        block = box(value)
        whole = value.numel() == 0
        if owner is None:
            answers = held_once(value, coordinate, AXES)
        else:
            answers = owner == boosted.mesh.get_rank()
        if answers and (not block.empty or whole):
            tensors[key] = local(value.detach()).cpu().contiguous()
            dtype = str(value.dtype).removeprefix("torch.")
            rows.append((key, dtype, tuple(value.shape), block, crc32(tensors[key])))
    return tensors


def _owner(boosted: Boosted, key: str) -> int | None:
    """The rank that alone holds the state under a key; None where ranks hold parts, or the same."""
    kind, _, rest = key.partition("/")
    return boosted.owners.get(rest.rpartition("/")[0]) if kind == "moments" else None


def _refuse_objects(boosted: Boosted, kinds: tuple[Kind, ...]) -> None:
    """Refuse state that files without pickle cannot hold, on every rank."""
    rows = boosted.leaves("moments") if "moments" in kinds else {}
    odd = [
        f"the optimizer {type(boosted.optimizer).__name__} keeps a {type(value).__name__} as "
        f"{slot} of {name}, and a checkpoint holds plain tensors, numbers and text.\n\nUse an "
        "optimizer whose state is plain, or save the rest: parallax.checkpoint.save(boosted, "
        "directory, kinds=('params', 'buffers', 'rooms', 'step'))."
        for name, row in rows.items()
        for slot, value in row.items()
        # A subclass of Tensor (quantised state, say) computes its elements from others inside.
        if type(value) not in (Tensor, DTensor) and not _written(value)
    ]
    fault = odd[0] if odd else ""
    _, found = agree("", fault)
    if any(found):
        raise CheckpointError(next(text for text in found if text))


def _written(value: Any) -> bool:
    """Whether JSON holds a value as it is."""
    if isinstance(value, list | tuple):
        return all(map(_written, value))
    return value is None or type(value) in (bool, int, float, str)


def _index(
    boosted: Boosted,
    kinds: tuple[Kind, ...],
    rows: list[Any],
    values: dict[str, Any],
    token: str,
) -> Index:
    index = Index(boosted.plan.composition, boosted.step, values=values, token=token)
    for file, parts, _ in rows:
        for key, dtype, shape, block, crc in parts:
            entry = index.tensors.setdefault(key, Entry(dtype, shape))
            entry.parts.append(Part(file, block, crc))
    if boosted.optimizer is not None and "moments" in kinds:
        index.groups = settings(boosted)
        index.optimizer = type(boosted.optimizer).__name__
    return index


def settings(boosted: Boosted) -> list[dict[str, Any]]:
    """The optimizer's groups as JSON: names, and every setting that is a plain value."""
    assert boosted.optimizer is not None
    names = group_names(boosted.optimizer, boosted.names, boosted.model)
    rows = []
    for group, members in zip(boosted.optimizer.param_groups, names, strict=True):
        plain = {k: _plain(v) for k, v in group.items() if k != "params"}
        rows.append({"params": members, "settings": plain})
    return rows


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _replaceable(target: Path) -> bool:
    """Whether what is at a path is a checkpoint, or nothing of worth."""
    return target.is_dir() and ((target / INDEX).is_file() or not any(target.iterdir()))


def _replace(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
        return
    old = partial.with_suffix(".old")
    target.rename(old)
    try:
        partial.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
