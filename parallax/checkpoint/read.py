"""Reading slices out of the memory-mapped files of one checkpoint, checked before they are used."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parallax.checkpoint.files import Entry, Index, read_index
from parallax.checkpoint.pieces import check, copy_
from parallax.core.slices import Box
from parallax.errors import CheckpointError


def whole_box(shape: tuple[int, ...]) -> Box:
    """The box that is all of a tensor."""
    return Box((0,) * len(shape), shape)


class Read(NamedTuple):
    """What is read: a tensor's key, a box of it (all by default), and where it goes, if at once."""

    key: str
    wanted: Box | None = None
    target: Tensor | None = None


class Reader:
    """The tensors of a checkpoint, by key. A context manager; files are opened once, on first use.

    Args:
        directory: The checkpoint's directory.

    Attributes:
        index: What there is.

    Raises:
        CheckpointError: There is no checkpoint, or a file is missing, damaged, or of another one.

    Example:
        >>> with Reader(Path("runs/step-200")) as reader:  # doctest: +SKIP
        ...     weight = reader.tensor("params/embedding.weight")
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.index: Index = read_index(directory)
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._files.clear()

    def check(self, *reads: Read) -> None:
        """Compare the checksums of all chunks that meet some boxes.

        Raises:
            CheckpointError: They differ, or pieces are missing.
        """
        for read in reads:
            self._check(read)

    def _check(self, read: Read) -> None:
        # Mapped one by one: safetensors asks the system to read ahead what is mapped, and asked for
        # all tensors at once a disk gives half of its rate.
        whole = self._whole(read.key)
        entry = self.index.tensors[read.key]
        wanted = whole_box(entry.shape) if read.wanted is None else read.wanted
        covered = 0
        for piece in entry.pieces:
            covered += torch.Size(piece.box.overlap(wanted).lengths).numel()
            if not check(whole, piece.box, piece.sums, wanted, read.target):
                raise CheckpointError(
                    f"{read.key} in {self.directory / entry.file} is damaged: its bytes do not "
                    "have the checksum that the index holds.\n\nLoad another checkpoint."
                )
        if covered != torch.Size(wanted.lengths).numel():
            raise CheckpointError(
                f"{read.key} in {self.directory} is incomplete: {covered} of "
                f"{torch.Size(wanted.lengths).numel()} elements that are asked for were written."
                "\n\nThe checkpoint is damaged; load another one."
            )

    def copy_(self, target: Tensor, key: str, wanted: Box | None = None) -> None:
        """Copy a box of a tensor into a tensor of its lengths, converting dtype and device.

        Cost:
            A chunk of host memory where either differs.
        """
        entry = self.index.tensors[key]
        wanted = whole_box(entry.shape) if wanted is None else wanted
        copy_(target, self._whole(key), wanted)

    def tensor(self, key: str) -> Tensor:
        """A whole tensor, checked; on the CPU."""
        self.check(Read(key))
        return self._whole(key).clone()

    def _whole(self, key: str) -> Tensor:
        entry = self.index.tensors[key]
        where = self.directory / entry.file
        try:
            whole = self._open(entry).get_tensor(entry.name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{key} cannot be read from {where}: {error}.\n\nThe file is missing or damaged; "
                "load another checkpoint."
            ) from None
        found = str(whole.dtype).removeprefix("torch."), tuple(whole.shape)
        if found != tuple(entry.spec):
            raise CheckpointError(
                f"{key} in {where} is {found[0]} of shape {found[1]}, and the index says "
                f"{entry.dtype} of shape {entry.shape}.\n\nThe files are from different "
                "checkpoints, or damaged; load another checkpoint."
            )
        return whole

    def _open(self, entry: Entry) -> Any:
        if entry.file not in self._files:
            path = self.directory / entry.file
            handle = self._stack.enter_context(safe_open(path, framework="pt"))
            if (handle.metadata() or {}).get("token") != self.index.token:
                raise CheckpointError(
                    f"{path} belongs to another checkpoint than the index beside it.\n\nPut the "
                    "files of one checkpoint together, or load another one."
                )
            self._files[entry.file] = handle
        return self._files[entry.file]
