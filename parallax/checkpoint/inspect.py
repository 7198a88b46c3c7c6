"""What a checkpoint holds, whether it is sound, and how it differs from another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from xxhash import xxh3_64

from parallax.checkpoint.files import Index
from parallax.checkpoint.folder import find
from parallax.checkpoint.foreign import open_foreign
from parallax.checkpoint.layout import HEADER_LIMIT, MODEL, Spec, name_of
from parallax.checkpoint.pieces import chunks
from parallax.checkpoint.read import Read, Reader, whole_box
from parallax.checkpoint.source import Source, some
from parallax.core.slices import Box
from parallax.errors import CheckpointError

Told = Callable[[int], object]
"""Is told how many more bytes are done."""

BLOCK = 1 << 20
"""Bytes of a file of text that are read at once."""


class Row(NamedTuple):
    """A tensor: its dtype and shape, its file, and how many pieces were written of it."""

    spec: Spec
    file: str
    pieces: int


class Total(NamedTuple):
    """How much there is of a kind of state."""

    tensors: int
    size: int


class Inspected(AbstractContextManager["Inspected"]):
    """A checkpoint that is looked at: one of parallax, or of any format that `convert` reads.

    Args:
        path: A checkpoint, or a folder of them, of which the newest is taken.
        pattern: Which keys to look at, such as `"params/*"`; all by default.

    Attributes:
        directory: Where the checkpoint is.
        format: What it is, for people.
        index: What the checkpoint says of itself; None where it is not one of parallax.
        rows: Its tensors by key.

    Raises:
        CheckpointError: There is none, its index is damaged, or nothing matches the pattern.

    Example:
        >>> with Inspected("runs/a") as found:  # doctest: +SKIP
        ...     print(found.totals(), found.faults())
    """

    def __init__(self, path: str | Path, pattern: str | None = None) -> None:
        found = find(Path(path))
        self.index: Index | None = None
        self._reader: Reader | None = None
        self._source: Source | None = None
        if found is not None:
            self.directory, self.format = found, "a parallax checkpoint"
            self._reader = Reader(found)
            self.index = self._reader.index
            rows = {
                key: Row(entry.spec, entry.file, len(entry.pieces))
                for key, entry in self.index.tensors.items()
            }
        else:
            self._source = open_foreign(path, prefix="")
            self.directory, self.format = self._source.path, self._source.format
            files, pieces = self._source.files, self._source.pieces
            rows = {
                name: Row(spec, files[name], pieces.get(name, 1))
                for name, spec in self._source.specs.items()
            }
        self.rows = {k: row for k, row in rows.items() if not pattern or fnmatchcase(k, pattern)}
        if rows and not self.rows:
            self.close()
            raise CheckpointError(
                f"tensors that match {pattern!r} were asked for from {self.directory}; its "
                f"{len(rows)} keys are {some(rows)}.\n\nGive a pattern such as '*weight'."
            )

    def __exit__(self, *_: object) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def close(self) -> None:
        """Close the files."""
        for held in (self._reader, self._source):
            if held is not None:
                held.__exit__()

    @property
    def size(self) -> int:
        """Bytes of the tensors looked at."""
        return sum(row.spec.size for row in self.rows.values())

    def totals(self) -> dict[str, Total]:
        """How much there is of each kind of state, the largest first."""
        found: dict[str, Total] = {}
        for key, row in self.rows.items():
            kind = key.split("/", 1)[0] if self.index is not None else "tensors"
            count, size = found.get(kind, Total(0, 0))
            found[kind] = Total(count + 1, size + row.spec.size)
        return dict(sorted(found.items(), key=lambda item: -item[1].size))

    def faults(self, progress: Told = lambda count: None) -> list[CheckpointError]:
        """Everything that is wrong with the files; empty when all is sound.

        Where there are no checksums, that every tensor can be read was seen on opening, and that
        is all that can be.

        Args:
            progress: Is told the bytes of each tensor that is checked.

        Cost:
            Every byte is read once, through a chunk of about 4 MiB of a memory-mapped file.
        """
        if self.index is None or self._reader is None:
            progress(self.size)
            return []
        found = [fault for fault in self._texts(self.index) if fault is not None]
        by_file: dict[str, list[str]] = {}
        for key, row in self.rows.items():
            by_file.setdefault(row.file, []).append(key)
        for file, keys in sorted(by_file.items()):
            fault, lost = self._file(file, keys)
            found += [fault] if fault is not None else []
            for key in keys:
                try:
                    if key not in lost:
                        self._reader.check(Read(key))
                except CheckpointError as error:
                    found.append(error)
                progress(self.rows[key].spec.size)
        return found

    def _texts(self, index: Index) -> Iterator[CheckpointError]:
        for name, known in index.texts.items():
            path, found = self.directory / name, xxh3_64()
            try:
                with path.open("rb") as file:
                    while block := file.read(BLOCK):
                        found.update(block)
            except OSError as error:
                yield CheckpointError(
                    f"{path} cannot be read: {error.strerror}.\n\nPut the file back, or load "
                    "another checkpoint."
                )
            else:
                if found.intdigest() != known:
                    yield CheckpointError(
                        f"{path} does not have the checksum that the index holds: it was changed "
                        "after it was saved.\n\nUndo the change, or save again."
                    )

    def _file(self, file: str, keys: list[str]) -> tuple[CheckpointError | None, set[str]]:
        """What is wrong with a file as a whole, and which keys can therefore not be checked."""
        assert self._reader is not None, "only asked for where there is one"
        path, names = self.directory / file, {key: name_of(key) for key in keys}
        try:
            header, start, size = _header(path)
            ends = {n: start + row["data_offsets"][1] for n, row in header.items() if n[:2] != "__"}
            token = header.get("__metadata__", {}).get("token")
        except FileNotFoundError:
            text = f"{path} is missing, and {some(keys)} with it.\n\nPut the file back"
            return CheckpointError(f"{text}, or load another checkpoint."), set(keys)
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            text = f"{path} cannot be read, and {some(keys)} with it: {error}"
            return CheckpointError(f"{text}.\n\nLoad another checkpoint."), set(keys)
        if token != self._reader.index.token:
            return CheckpointError(
                f"{path} belongs to another checkpoint than the index beside it, which seeks "
                f"{some(keys)} there.\n\nPut the files of one checkpoint together, or load another "
                "one."
            ), set(keys)
        lacking = [key for key, name in names.items() if name not in ends]
        if lacking:
            return CheckpointError(
                f"{path} does not hold {some(lacking)}, which the index seeks there; it holds "
                f"{some(ends)}.\n\nThe files of the checkpoint were swapped: give them their names "
                "back, or load another checkpoint."
            ), set(lacking)
        due = max(ends.values(), default=start)
        if size != due:
            cut = [key for key, name in names.items() if ends[name] > size]
            return CheckpointError(
                f"{path} has {size:,} bytes where its header speaks of {due:,}; "
                f"{some(cut)} {'is' if len(cut) == 1 else 'are'} cut off, and the other tensors in "
                "it cannot be read either.\n\nLoad another checkpoint."
            ), set(keys)
        return None, set()

    def part(self, key: str, box: Box) -> Tensor:
        """A box of a tensor, without checking it."""
        if self._source is not None:
            return self._source.block(key, box)
        assert self._reader is not None, "one of the two is there"
        spec = self.rows[key].spec
        target = torch.empty(box.lengths, dtype=getattr(torch, spec.dtype))
        self._reader.copy_(target, key, box)
        return target


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header of a file of safetensors, where its tensors begin, and the size of the file.

    Read here, since safetensors opens no file that is cut short, and so does not say what is lost.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(HEADER_LIMIT, size - 8):
            raise ValueError(f"it has {size:,} bytes, less than its header")
        return json.loads(file.read(length)), 8 + length, size


class Change(NamedTuple):
    """What differs, and how: of the one and of the other checkpoint."""

    what: str
    one: Any
    other: Any


@dataclass
class Difference:
    """How two checkpoints differ.

    Attributes:
        only_one: Keys in the first only.
        only_other: Keys in the second only.
        about: Composition, step, world, optimizer and its settings, and values that are no tensors.
        specs: Dtypes and shapes.
        values: The largest absolute difference, by key; of tensors of one shape.
        same: How many tensors are equal in every element.
    """

    only_one: list[str] = field(default_factory=list)
    only_other: list[str] = field(default_factory=list)
    about: list[Change] = field(default_factory=list)
    specs: list[Change] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)
    same: int = 0

    def __bool__(self) -> bool:
        return any(
            (self.only_one, self.only_other, self.about, self.specs, self.values),
        )


def difference(one: Inspected, other: Inspected, progress: Told = lambda count: None) -> Difference:
    """Compare two checkpoints: what they say of themselves, and every tensor.

    Where one is of parallax and the other is not, their model parts are compared by name.

    Args:
        one: The first.
        other: The second.
        progress: Is told the bytes of each tensor of the first that is done.

    Cost:
        A chunk of about 4 MiB of both, in float64.
    """
    found = Difference()
    mine, theirs = _by_name(one, other), _by_name(other, one)
    found.only_one = [key for key in mine if key not in theirs]
    found.only_other = [key for key in theirs if key not in mine]
    if one.index is not None and other.index is not None:
        found.about = list(_about(one.index, other.index))
    for key in mine:
        if key not in theirs:
            continue
        spec, its = one.rows[mine[key]].spec, other.rows[theirs[key]].spec
        if spec != its:
            found.specs.append(Change(key, spec, its))
        if spec.shape == its.shape:
            largest = _largest(one, mine[key], other, theirs[key])
            if largest is not None:
                found.values[key] = largest
            elif spec == its:
                found.same += 1
        progress(spec.size)
    return found


def compared(one: Inspected, other: Inspected) -> int:
    """Bytes that `difference` goes through."""
    theirs = _by_name(other, one)
    return sum(one.rows[k].spec.size for name, k in _by_name(one, other).items() if name in theirs)


def _by_name(one: Inspected, other: Inspected) -> dict[str, str]:
    """Keys by what they are called in both."""
    if one.index is None or other.index is not None:
        return {key: key for key in one.rows}
    return {name_of(key): key for key in one.rows if key.split("/", 1)[0] in MODEL}


def _about(one: Index, other: Index) -> Iterator[Change]:
    for what in ("composition", "step", "world", "optimizer", "kinds"):
        if getattr(one, what) != getattr(other, what):
            yield Change(what, getattr(one, what), getattr(other, what))
    if len(one.groups) != len(other.groups):
        yield Change("groups", len(one.groups), len(other.groups))
    else:
        for number, (mine, theirs) in enumerate(zip(one.groups, other.groups, strict=True)):
            yield from _settings(f"group {number}", mine, theirs)
    # The random generators' states are long, and differ with every step.
    keys = {key for key in {*one.values, *other.values} if not key.startswith("random/")}
    for key in sorted(keys):
        if one.values.get(key) != other.values.get(key):
            yield Change(key, one.values.get(key), other.values.get(key))


def _settings(group: str, mine: dict[str, Any], theirs: dict[str, Any]) -> Iterator[Change]:
    if mine["params"] != theirs["params"]:
        yield Change(f"{group}: parameters", some(mine["params"]), some(theirs["params"]))
    one, other = mine["settings"], theirs["settings"]
    for name in sorted({*one, *other}):
        if one.get(name) != other.get(name):
            yield Change(f"{group}: {name}", one.get(name), other.get(name))


def _largest(one: Inspected, key: str, other: Inspected, its: str) -> float | None:
    """The largest absolute difference of elements; None when all are equal."""
    spec = one.rows[key].spec
    found: float | None = None
    for box in chunks(whole_box(spec.shape), max(spec.itemsize, other.rows[its].spec.itemsize)):
        if box.empty:
            continue
        a, b = one.part(key, box), other.part(its, box)
        differ = _differ(a, b)
        if not bool(differ.any()):
            continue
        exact = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
        apart = (a.to(exact)[differ] - b.to(exact)[differ]).abs().max().item()
        # NaN where one has a number stays: it is as different as can be.
        found = apart if found is None or apart != apart or apart > found else found
    return found


def _differ(a: Tensor, b: Tensor) -> Tensor:
    if not (a.is_floating_point() or a.is_complex() or b.is_floating_point() or b.is_complex()):
        return a.to(torch.int64) != b.to(torch.int64)  # float64 would round large ones
    exact = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(exact), b.to(exact)
    return (a != b) & ~(a.isnan() & b.isnan())


__all__ = ["Change", "Difference", "Inspected", "Row", "Total", "compared", "difference"]
