"""The layout of a checkpoint directory.

    index.json              what there is: for each tensor its dtype, whole shape, and its parts
    rank-00000.safetensors  the parts that rank 0 answers for; and so on

A tensor's key is its path in the boosted tree: `params/<name>`, `buffers/<name>`,
`moments/<name>/<entry>`, `rooms/<room>/<entry>`. A part is a block of the whole tensor, so any rank
of any composition can read just the blocks that meet its own.
"""

from __future__ import annotations

import ctypes
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from parallax.core.slices import Box
from parallax.errors import CheckpointError

INDEX = "index.json"
FORMAT = "parallax"
VERSION = 1


@dataclass(frozen=True)
class Part:
    """A block of a tensor in a file.

    Attributes:
        file: Name of the file in the checkpoint's directory.
        box: Which block of the whole tensor it is.
        crc: CRC-32 of its bytes.
    """

    file: str
    box: Box
    crc: int


@dataclass
class Entry:
    """A whole tensor: dtype as torch spells it, shape, and the parts it lies in."""

    dtype: str
    shape: tuple[int, ...]
    parts: list[Part] = field(default_factory=list)


@dataclass
class Index:
    """What a checkpoint holds.

    Attributes:
        composition: The composition it was saved under, as text.
        step: Number of updates made.
        tensors: Entries by key.
        values: State that is no tensor, by key.
        groups: The optimizer's groups: parameter names and settings.
        optimizer: Name of the optimizer's class.
        token: What every file of this checkpoint carries, and no other's does.
    """

    composition: str
    step: int
    tensors: dict[str, Entry] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    optimizer: str | None = None
    token: str = ""

    def to_json(self) -> str:
        """The index as text."""
        tensors = {
            key: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "parts": [
                    {
                        "file": p.file,
                        "offsets": p.box.offsets,
                        "lengths": p.box.lengths,
                        "crc32": p.crc,
                    }
                    for p in entry.parts
                ],
            }
            for key, entry in sorted(self.tensors.items())
        }
        rest = {
            "format": FORMAT,
            "version": VERSION,
            "composition": self.composition,
            "step": self.step,
            "token": self.token,
            "optimizer": self.optimizer,
        }
        tail = {"tensors": tensors, "values": self.values, "groups": self.groups}
        return json.dumps({**rest, **tail}, indent=1)


def read_index(directory: Path) -> Index:
    """Read and check a checkpoint's index.

    Raises:
        CheckpointError: There is no checkpoint there, or the index cannot be read.
    """
    path = directory / INDEX
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(_nothing_there(directory)) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the index {path} cannot be read: {error}.\n\nThe file is damaged; load another "
            "checkpoint."
        ) from None
    try:
        return _index(raw)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the index {path} is not one of a parallax checkpoint: {type(error).__name__}: "
            f"{error}.\n\nExpected format {FORMAT!r}, version {VERSION}."
        ) from None


def _index(raw: dict[str, Any]) -> Index:
    if raw["format"] != FORMAT or raw["version"] != VERSION:
        raise ValueError(f"format {raw['format']!r}, version {raw['version']!r}")
    tensors = {
        key: Entry(
            dtype=str(row["dtype"]),
            shape=tuple(map(int, row["shape"])),
            parts=[
                Part(
                    _plain_name(p["file"]),
                    Box(tuple(map(int, p["offsets"])), tuple(map(int, p["lengths"]))),
                    int(p["crc32"]),
                )
                for p in row["parts"]
            ],
        )
        for key, row in raw["tensors"].items()
    }
    return Index(
        composition=str(raw["composition"]),
        step=int(raw["step"]),
        tensors=tensors,
        values=dict(raw["values"]),
        groups=list(raw["groups"]),
        optimizer=raw["optimizer"],
        token=str(raw["token"]),
    )


def _plain_name(name: str) -> str:
    if Path(name).name != name:  # an index from elsewhere must not point outside its directory
        raise ValueError(f"the file name {name!r} leaves the directory")
    return name


def _nothing_there(directory: Path) -> str:
    if not directory.exists():
        near = sorted(p.parent.name for p in directory.parent.glob(f"*/{INDEX}"))
        found = f"there is no such directory; beside it: {', '.join(near) or 'no checkpoint'}"
    else:
        files = sorted(p.name for p in directory.iterdir())[:6]
        found = f"the directory holds no {INDEX} but {', '.join(files) or 'nothing'}"
    return f"no checkpoint at {directory}: {found}.\n\nGive the directory that boosted.save wrote."


def crc32(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes; the tensor is contiguous and on the CPU."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return 0
    # Not through numpy, which is no dependency and knows no bfloat16.
    return zlib.crc32((ctypes.c_char * size).from_address(tensor.data_ptr()))


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested dicts with their keys, joined by slashes."""
    for name, value in tree.items():
        key = f"{prefix}/{name}" if prefix else str(name)
        if isinstance(value, dict):
            yield from flat(value, key)
        else:
            yield key, value
