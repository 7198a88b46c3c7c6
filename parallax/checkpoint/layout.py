"""Where each tensor of a checkpoint lies: which file, and from which byte on.

Files are safetensors (https://huggingface.co/docs/safetensors): eight bytes with the length of the
header, the header as JSON, then the tensors one behind the other. So the place of every byte is
known before the first is written, and each rank can write its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

import torch

from parallax.errors import CheckpointError

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Names of dtypes: torch's, and that of safetensors."""

MODEL = ("params", "buffers")
"""The kinds of state that lie in the model's files, under their own names."""

HEADER_LIMIT = 100_000_000
"""The longest header that safetensors reads, in bytes."""


class Spec(NamedTuple):
    """Dtype (as torch spells it) and shape of a whole tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return getattr(torch, self.dtype).itemsize

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.itemsize


class Place(NamedTuple):
    """Where a tensor lies: its file, its name in there, and its first byte in the file."""

    file: str
    name: str
    start: int


class File(NamedTuple):
    """A file to be written: its name, what it begins with, and its length in bytes."""

    name: str
    header: bytes
    size: int


class Layout(NamedTuple):
    """All files, and the place of each tensor by its key."""

    files: list[File]
    places: dict[str, Place]


def layout(
    tensors: Mapping[str, Spec], limit: int, token: str, *, prefix: str | None = None
) -> Layout:
    """Lay tensors out over files of at most `limit` bytes, or of one tensor where it is larger.

    Args:
        tensors: Dtypes and shapes by key: `params/<name>` and so on.
        limit: Bytes of tensors in one file.
        token: What every file of one checkpoint carries.
        prefix: Put into the names of the model's files.

    Raises:
        CheckpointError: A tensor's dtype is none that safetensors knows.

    Example:
        >>> found = layout({"params/w": Spec("float32", (2, 3)), "step": Spec("int64", ())}, 99, "")
        >>> found.places["params/w"].file, found.places["params/w"].name, found.places["step"].file
        ('model.safetensors', 'w', 'state.safetensors')
    """
    odd = {key: spec.dtype for key, spec in tensors.items() if spec.dtype not in DTYPES}
    if odd:
        key, dtype = next(iter(odd.items()))
        raise CheckpointError(
            f"{key} has the dtype {dtype}, which safetensors files do not hold.\n\nConvert it to "
            f"one of {', '.join(DTYPES)} before saving."
        )
    found = Layout([], {})
    model = "model" if prefix is None else f"model.{prefix}"
    for stem, is_model in ((model, True), ("state", False)):
        rows = {k: s for k, s in tensors.items() if (k.split("/", 1)[0] in MODEL) is is_model}
        groups = _groups(rows, limit)
        for number, group in enumerate(groups, 1):
            tail = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
            _add(found, f"{stem}{tail}.safetensors", group, token)
    return found


def name_of(key: str) -> str:
    """What a tensor is called in its file: those of the model by their own names."""
    kind, _, rest = key.partition("/")
    return rest if kind in MODEL else key


def _groups(rows: Mapping[str, Spec], limit: int) -> list[dict[str, Spec]]:
    groups: list[dict[str, Spec]] = []
    filled = 0
    for key, spec in rows.items():
        if not groups or (filled and filled + spec.size > limit):
            groups.append({})
            filled = 0
        groups[-1][key] = spec
        filled += spec.size
    return groups


def _add(found: Layout, file: str, rows: Mapping[str, Spec], token: str) -> None:
    # Larger elements first, so that each tensor begins at a multiple of its element's size.
    ordered = sorted(rows.items(), key=lambda row: -row[1].itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt", "token": token}}
    end = 0
    for key, spec in ordered:
        start, end = end, end + spec.size
        header[name_of(key)] = {
            "dtype": DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise CheckpointError(
            f"{file} would hold {len(rows)} tensors, whose names make a header of {len(text):,} "
            f"bytes, and safetensors reads at most {HEADER_LIMIT:,}.\n\nSave with a smaller "
            "shard_size."
        )
    head = len(text).to_bytes(8, "little") + text
    start = len(head)
    for key, spec in ordered:
        found.places[key] = Place(file, name_of(key), start)
        start += spec.size
    found.files.append(File(file, head, len(head) + end))
