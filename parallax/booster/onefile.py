"""Whole tensors in safetensors files: written by rank 0, read by every rank block by block."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from parallax.core.mesh import agree
from parallax.core.slices import Box
from parallax.errors import CheckpointError

SUFFIX = ".safetensors"


def together(work: Callable[[], None]) -> None:
    """Do a piece of work on every rank; when it fails on one, all raise what the first one did.

    Raises:
        CheckpointError: It raised one on some rank.
    """
    fault = ""
    try:
        work()
    except CheckpointError as error:
        fault = str(error)
    _, found = agree("", fault)
    if any(found):
        raise CheckpointError(next(text for text in found if text))


def on_first(work: Callable[[], None], what: str) -> None:
    """Do a piece of work on rank 0; when it fails, all ranks raise.

    Args:
        work: Writes files.
        what: What it does, for the message.

    Raises:
        CheckpointError: The files could not be written.
    """

    def attempt() -> None:
        if dist.get_rank():
            return
        try:
            work()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{what} cannot be written: {error}.\n\nCheck that the path is writable and has "
                "room. What was there before has not been changed."
            ) from None

    together(attempt)


def replace_text(path: Path, text: str) -> None:
    """Write a file of text, which is there whole or not at all."""
    _replace(path, lambda partial: partial.write_text(text))


def replace_tensors(path: Path, tensors: Mapping[str, Tensor], note: dict[str, str]) -> None:
    """Write a safetensors file, which is there whole or not at all."""
    rows = {name: tensor.contiguous() for name, tensor in tensors.items()}
    _replace(path, lambda partial: save_file(rows, partial, metadata=note))


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


class Files:
    """Safetensors files that together hold one state, memory-mapped.

    Attributes:
        path: What was asked for, for messages.
        shapes: Shape of each tensor by its key.
        note: The metadata of the first file.
    """

    def __init__(self, path: Path, files: list[Path]) -> None:
        self.path = path
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.note: dict[str, str] = {}
        for file in files:
            try:
                handle = self._stack.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                self._stack.close()
                raise CheckpointError(
                    f"{file} cannot be read: {error}.\n\nThe file is missing or damaged; load "
                    "another checkpoint."
                ) from None
            self.note = self.note or handle.metadata() or {}
            for key in handle.keys():  # noqa: SIM118  (the handle is no mapping)
                self._handles[key] = handle
                self.shapes[key] = tuple(handle.get_slice(key).get_shape())

    def block(self, key: str, wanted: Box | None = None) -> Tensor:
        """A block of a tensor, or all of it."""
        handle = self._handles[key]
        if wanted is None or not wanted.lengths:
            return handle.get_tensor(key)
        return handle.get_slice(key)[wanted.window]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self._stack.close()


def files_at(path: Path) -> list[Path]:
    """The safetensors files of a path: itself, or those of a directory as transformers writes them.

    Raises:
        CheckpointError: There is nothing to read, or it is no safetensors file.
    """
    if path.is_dir():
        listing = path / f"model{SUFFIX}.index.json"
        if listing.exists():
            try:
                names = sorted(set(json.loads(listing.read_text())["weight_map"].values()))
                plain = [Path(name).name for name in names]
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(
                    f"the index {listing} cannot be read: {type(error).__name__}: {error}.\n\n"
                    "The file is damaged; load another checkpoint."
                ) from None
            return [path / name for name in plain]
        if (path / f"model{SUFFIX}").exists():
            return [path / f"model{SUFFIX}"]
        inside = ", ".join(sorted(p.name for p in path.iterdir())[:6]) or "nothing"
        raise CheckpointError(
            f"the directory {path} holds no checkpoint but {inside}.\n\nGive a directory that was "
            f"saved with shard=True, one with model{SUFFIX}, or a {SUFFIX} file."
        )
    if not path.exists():
        raise CheckpointError(
            f"there is nothing at {path}.\n\nGive the path that the checkpoint was saved to."
        )
    suffix_fault(path, "a checkpoint is read from")
    return [path]


def suffix_fault(path: Path, use: str) -> None:
    """Raise unless a path is named as a safetensors file is.

    Raises:
        CheckpointError: It has another ending.
    """
    if path.suffix != SUFFIX:
        raise CheckpointError(
            f"{use} {path}, and the only format is safetensors: pickled files run code when they "
            f"are read.\n\nName it {path.with_suffix(SUFFIX).name}, or use a directory with "
            "shard=True."
        )
