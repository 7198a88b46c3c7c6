"""The index of a checkpoint directory: what is in which file, and how its bytes are checked.

    index.json                       this index
    model.safetensors, or model-00001-of-0000N.safetensors with model.safetensors.index.json
    state.safetensors, or state-00001-of-0000N.safetensors

A tensor's key is its path: `params/<name>`, `buffers/<name>`, `moments/<name>/<entry>`,
`rooms/<room>/<entry>`, `random/<rank>/<generator>`, `attached/<name>/<number>`. Parameters and
buffers lie in the model's files under their own names, as any reader of safetensors expects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest

from parallax.checkpoint.layout import Spec
from parallax.core.slices import Box
from parallax.errors import CheckpointError

INDEX = "index.json"
FORMAT = "parallax"
VERSION = 2

_SEAL = re.compile(rb',\n "xxh3": (\d{1,20})\n\}\n\Z')


@dataclass(frozen=True)
class Piece:
    """The box of a tensor that one rank wrote, and the XXH3 of each of its chunks."""

    box: Box
    sums: tuple[int, ...]


@dataclass
class Entry:
    """A whole tensor.

    Attributes:
        dtype: As torch spells it.
        shape: Its shape.
        file: Name of the file in the checkpoint's directory.
        name: What it is called in there.
        pieces: The boxes that make it up.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str
    name: str
    pieces: list[Piece] = field(default_factory=list)

    @property
    def spec(self) -> Spec:
        """Dtype and shape."""
        return Spec(self.dtype, self.shape)


@dataclass
class Index:
    """What a checkpoint holds.

    Attributes:
        composition: The composition it was saved under, as text.
        step: Number of updates made.
        tensors: Entries by key.
        values: State that is no tensor, by key; see `parallax.checkpoint.plain`.
        groups: The optimizer's groups: parameter names and settings.
        optimizer: Name of the optimizer's class.
        token: What every file of this checkpoint carries, and no other's does.
        texts: XXH3 of each further file, by name.
        world: Sizes of the mesh's axes that it was saved under, outermost first.
        kinds: The kinds of state that were saved.
        time: When it was completed, in nanoseconds since 1970.
    """

    composition: str
    step: int
    tensors: dict[str, Entry] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    optimizer: str | None = None
    token: str = ""
    texts: dict[str, int] = field(default_factory=dict)
    world: dict[str, int] = field(default_factory=dict)
    kinds: list[str] = field(default_factory=list)
    time: int = 0

    @property
    def files(self) -> list[str]:
        """Names of the files of tensors."""
        return sorted({entry.file for entry in self.tensors.values()})

    def to_text(self) -> bytes:
        """The index as it is written: JSON that ends with the XXH3 of what stands before."""
        tensors = {
            key: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "file": entry.file,
                "name": entry.name,
                "pieces": [
                    {"offsets": p.box.offsets, "lengths": p.box.lengths, "xxh3": p.sums}
                    for p in entry.pieces
                ],
            }
            for key, entry in self.tensors.items()
        }
        body = {
            "format": FORMAT,
            "version": VERSION,
            "time": self.time,
            "composition": self.composition,
            "step": self.step,
            "kinds": self.kinds,
            "world": self.world,
            "optimizer": self.optimizer,
            "groups": self.groups,
            "values": self.values,
            "token": self.token,
            "texts": self.texts,
            "tensors": tensors,
        }
        text = json.dumps(body, indent=1).encode().removesuffix(b"\n}")
        return text + b',\n "xxh3": %d\n}\n' % xxh3_64_intdigest(text)


def read_index(directory: Path) -> Index:
    """Read and check a checkpoint's index.

    Raises:
        CheckpointError: There is no checkpoint there, or the index cannot be read.
    """
    path = directory / INDEX
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(_nothing_there(directory)) from None
    except OSError as error:
        raise CheckpointError(_unreadable(path, str(error))) from None
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(_unreadable(path, str(error))) from None
    if not isinstance(raw, dict) or (raw.get("format"), raw.get("version")) != (FORMAT, VERSION):
        found = raw if isinstance(raw, dict) else {}
        raise CheckpointError(
            f"the index {path} is not one of a parallax checkpoint of this version: it says format "
            f"{found.get('format')!r}, version {found.get('version')!r}, and format {FORMAT!r}, "
            f"version {VERSION} is read.\n\nGive a directory that boosted.save wrote; "
            "load_pretrained and `parallax convert` read others."
        )
    seal = _SEAL.search(data)
    if seal is None or int(seal[1]) != xxh3_64_intdigest(data[: seal.start()]):
        raise CheckpointError(
            _unreadable(path, "its bytes do not have the checksum at its end, so it was changed")
        )
    try:
        return _index(raw)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(_unreadable(path, f"{type(error).__name__}: {error}")) from None


def _index(raw: dict[str, Any]) -> Index:
    tensors = {
        str(key): Entry(
            dtype=str(row["dtype"]),
            shape=_sizes(row["shape"]),
            file=_plain_name(row["file"]),
            name=str(row["name"]),
            pieces=[
                Piece(
                    _inside(Box(_sizes(p["offsets"]), _sizes(p["lengths"])), _sizes(row["shape"])),
                    _sizes(p["xxh3"]),
                )
                for p in row["pieces"]
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
        texts={_plain_name(name): int(known) for name, known in raw["texts"].items()},
        world={str(axis): int(size) for axis, size in raw["world"].items()},
        kinds=[str(kind) for kind in raw["kinds"]],
        time=int(raw["time"]),
    )


def _sizes(row: Any) -> tuple[int, ...]:
    sizes = tuple(map(int, row))
    if any(size < 0 for size in sizes):
        raise ValueError(f"{list(row)} holds a negative size")
    return sizes


def _inside(box: Box, shape: tuple[int, ...]) -> Box:
    ends = [o + n for o, n in zip(box.offsets, box.lengths, strict=True)]
    if len(ends) != len(shape) or any(e > s for e, s in zip(ends, shape, strict=True)):
        raise ValueError(f"the piece {box} leaves the shape {shape}")
    return box


def _plain_name(name: Any) -> str:
    if not isinstance(name, str) or Path(name).name != name or name == "..":
        # An index from elsewhere must not point outside its directory.
        raise ValueError(f"the file name {name!r} leaves the directory")
    return name


def _unreadable(path: Path, why: str) -> str:
    return (
        f"the index {path} cannot be read: {why}.\n\nThe file is damaged; load another checkpoint."
    )


def _nothing_there(directory: Path) -> str:
    if not directory.exists():
        near = sorted(p.parent.name for p in directory.parent.glob(f"[!.]*/{INDEX}"))
        more = f" and {len(near) - 6} more" if len(near) > 6 else ""
        beside = (", ".join(near[-6:]) or "no checkpoint") + more
        found = f"there is no such directory; beside it: {beside}"
    else:
        files = sorted(p.name for p in directory.iterdir())[:6]
        found = f"the directory holds no {INDEX} but {', '.join(files) or 'nothing'}"
    return f"no checkpoint at {directory}: {found}.\n\nGive the directory that boosted.save wrote."


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested dicts with their keys, joined by slashes."""
    for name, value in tree.items():
        key = f"{prefix}/{name}" if prefix else str(name)
        if isinstance(value, dict):
            yield from flat(value, key)
        else:
            yield key, value
