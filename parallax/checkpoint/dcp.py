"""Directories of torch's distributed checkpoint (DCP): read without running code, and written.

DCP keeps one pickle, `.metadata`, that says which boxes of which tensors lie where in its `.distcp`
files. It is read by an unpickler that knows DCP's own classes and gives stand-ins for them.
"""

from __future__ import annotations

import io
import mmap
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallax.checkpoint.layout import Spec
from parallax.checkpoint.source import Source
from parallax.core.slices import Box
from parallax.errors import CheckpointError

METADATA = ".metadata"

_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    # Where torch before 2.3 had them.
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
}

_DAMAGE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What pickle raises on bytes that are no pickle, or another one."""


class _Stored:
    """Stands in for a class of DCP: keeps what was stored, and does nothing."""

    def __init__(self, *stored: Any) -> None:
        self.__dict__["stored"] = stored

    def __setstate__(self, state: Any) -> None:
        # A frozen dataclass or a plain one keeps a dict, TensorProperties a tuple.
        self.__dict__.update(state if isinstance(state, dict) else {"stored": state})

    def __hash__(self) -> int:
        return hash((self.__dict__.get("fqn"), self.__dict__.get("offset")))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stored) and self.__dict__ == other.__dict__


def _allowed() -> dict[tuple[str, str], Any]:
    """What a metadata may name. Classes are new each time, since a pickle can change their fields.

    What torch and Python give of their own here cannot be changed.
    """
    found: dict[tuple[str, str], Any] = {
        (module, name): type(name, (_Stored,), {})
        for module, names in _CLASSES.items()
        for name in names
    }
    found["torch", "Size"] = torch.Size
    found["torch.serialization", "_get_layout"] = type("layout", (_Stored,), {})
    found["collections", "OrderedDict"] = OrderedDict
    for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"):
        for module in ("pathlib", "pathlib._local"):
            found[module, name] = type(name, (_Stored,), {})
    for name, value in vars(torch).items():
        if isinstance(value, torch.dtype):
            found["torch", name] = value
    return found


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BufferedIOBase, path: Path) -> None:
        super().__init__(file)
        self._allowed = _allowed()
        self._path = path

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in self._allowed:
            return self._allowed[module_name, global_name]
        raise CheckpointError(
            f"{self._path} is refused: it asks for {module_name}.{global_name}, and the metadata "
            "of a DCP checkpoint needs nothing of the kind. None of it was run.\n\nThe file is no "
            "such metadata, or made to do harm: do not open it by other means."
        )


def metadata(path: Path) -> Any:
    """Unpickle a `.metadata` file, as stand-ins.

    Raises:
        CheckpointError: It asks for something else than DCP's classes, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            return _Unpickler(file, path).load()
    except CheckpointError:
        raise
    except (OSError, *_DAMAGE) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from None


def _unreadable(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"the metadata {path} cannot be read: {why}.\n\nThe file is damaged, or of another version "
        "of torch; load another checkpoint."
    )


class _Chunk(NamedTuple):
    """A box of a tensor, and the stretch of a file that holds it as torch.save wrote it."""

    box: Box
    file: str
    offset: int
    length: int


class Dcp(Source):
    """A directory that `torch.distributed.checkpoint.save` wrote.

    Args:
        path: The directory.

    Raises:
        CheckpointError: Its metadata cannot be read, or speaks of files that are missing or short.

    Cost:
        A chunk is read as a whole, as one rank wrote it, whatever box of it is asked for. The one
        read last is kept, so that boxes asked for in order read it once.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "a DCP checkpoint")
        self._chunks: dict[str, list[_Chunk]] = {}
        self._maps: dict[str, mmap.mmap] = {}
        self._last: tuple[_Chunk, Tensor] | None = None
        told = metadata(path / METADATA)
        try:
            self._take(told)
        except _DAMAGE as error:
            if isinstance(error, CheckpointError):
                raise
            why = f"{type(error).__name__}: {error}"
            raise _unreadable(path / METADATA, why) from None
        self._look()

    def _take(self, told: Any) -> None:
        places = {
            (index.fqn, tuple(index.offset)): info
            for index, info in told.storage_data.items()
            if getattr(index, "offset", None) is not None
        }
        ways = getattr(told, "planner_data", None)
        for name, stored in told.state_dict_metadata.items():
            if not isinstance(name, str):
                raise TypeError(f"{name!r} is no name")
            if type(stored).__name__ != "TensorStorageMetadata":
                continue  # a number or another object; those of a model are its parameters' own
            self.specs[name] = Spec(_dtype(stored.properties), _sizes(stored.size))
            self.paths[name] = _way(name, ways)
            self._chunks[name] = [
                self._chunk(name, self.specs[name], places, chunk) for chunk in stored.chunks
            ]
            self.pieces[name] = len(self._chunks[name])
            self.files[name] = ", ".join(sorted({chunk.file for chunk in self._chunks[name]}))

    def _chunk(self, name: str, spec: Spec, places: Mapping[Any, Any], chunk: Any) -> _Chunk:
        box = Box(_sizes(chunk.offsets), _sizes(chunk.sizes))
        ends = [o + n for o, n in zip(box.offsets, box.lengths, strict=True)]
        if any(e > s for e, s in zip(ends, spec.shape, strict=True)):
            raise ValueError(f"a chunk {box} of {name} leaves its shape {spec.shape}")
        info = places[name, box.offsets]
        if Path(info.relative_path).name != info.relative_path:
            raise ValueError(f"the file name {info.relative_path!r} leaves the directory")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{name} in {self.path / info.relative_path} was written through "
                f"{', '.join(map(str, info.transform_descriptors))}, and only what DCP writes by "
                "itself is read.\n\nSave it again without extensions."
            )
        offset, length = _sizes((info.offset, info.length))
        return _Chunk(box, info.relative_path, offset, length)

    def _look(self) -> None:
        """Whether every chunk is there, as far as can be told without reading."""
        faults = []
        ends: dict[str, int] = {}
        for name, spec in self.specs.items():
            chunks = self._chunks[name]
            found = sum(torch.Size(chunk.box.lengths).numel() for chunk in chunks)
            if found != torch.Size(spec.shape).numel():
                faults.append(
                    f"{name} has {torch.Size(spec.shape).numel()} elements, its chunks {found}"
                )
            for chunk in chunks:
                ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
        for file, end in sorted(ends.items()):
            path = self.path / file
            if not path.is_file():
                faults.append(f"{file} is missing")
            elif path.stat().st_size < end:
                faults.append(f"{file} has {path.stat().st_size:,} of {end:,} bytes")
        if faults:
            shown = "\n".join(f"  {fault}" for fault in faults)
            raise CheckpointError(
                f"the DCP checkpoint {self.path} is not complete:\n{shown}\n\n"
                "Put the files of all ranks into one directory, or load another checkpoint."
            )

    def block(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor."""
        spec = self.specs[name]
        box = Box((0,) * len(spec.shape), spec.shape) if box is None else box
        meeting = [c for c in self._chunks[name] if not c.box.overlap(box).empty]
        if len(meeting) == 1 and meeting[0].box.overlap(box) == box:
            return self._read(name, meeting[0])[box.within(meeting[0].box)]
        whole = torch.empty(box.lengths, dtype=getattr(torch, spec.dtype))
        for chunk in meeting:
            meet = chunk.box.overlap(box)
            part = self._read(name, chunk)[meet.within(chunk.box)]
            whole[meet.within(box)].copy_(part)
        return whole

    def _read(self, name: str, chunk: _Chunk) -> Tensor:
        if self._last is not None and self._last[0] == chunk:
            return self._last[1]
        self._last = None  # before the next one is read, so that there is one in memory
        path = self.path / chunk.file
        try:
            if chunk.file not in self._maps:
                with path.open("rb") as file:
                    self._maps[chunk.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            view: Any = _View(self._maps[chunk.file], chunk.offset, chunk.length)
            part = torch.load(view, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, *_DAMAGE) as error:
            raise CheckpointError(
                f"{name} cannot be read from {path}: {str(error).strip().splitlines()[0]}\n\n"
                "The file is damaged; load another checkpoint."
            ) from None
        spec = Spec(self.specs[name].dtype, chunk.box.lengths)
        if type(part) is not Tensor or _spec(part) != spec:
            found = _spec(part) if isinstance(part, Tensor) else type(part).__name__
            raise CheckpointError(
                f"{name} in {path} is {found}, and the metadata says {spec}.\n\nThe files are from "
                "different checkpoints, or damaged; load another checkpoint."
            )
        self._last = chunk, part
        return part

    def close(self) -> None:
        """Close the files."""
        self._last = None
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()


def _spec(tensor: Tensor) -> Spec:
    return Spec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _dtype(properties: Any) -> str:
    stored = properties.stored
    dtype = stored[0] if stored else properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype!r} is no dtype")
    return str(dtype).removeprefix("torch.")


def _sizes(row: Any) -> tuple[int, ...]:
    sizes = tuple(row)
    if any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError(f"{sizes} are no sizes")
    return sizes


def _way(name: str, ways: Any) -> tuple[str, ...]:
    """The keys that led to a tensor. Without the planner's word they are told from the name."""
    if isinstance(ways, dict) and isinstance(ways.get(name), tuple):
        return tuple(map(str, ways[name]))
    for bundle in ("app", ""):
        for part in ("model", "optimizer", "optim"):
            start = ".".join(filter(None, (bundle, part))) + "."
            if name.startswith(start):
                return (*start[:-1].split("."), name.removeprefix(start))
    return (name,)


class _View(io.RawIOBase):
    """A stretch of a mapped file, as a file of its own. torch.load reads the storage from it."""

    def __init__(self, mapped: mmap.mmap, offset: int, length: int) -> None:
        self._mapped, self._offset, self._length = mapped, offset, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, to: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + to)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._at))
        start = self._offset + self._at
        with memoryview(self._mapped) as mapped:
            view[:count] = mapped[start : start + count]
        self._at += count
        return count


def write(
    target: Path,
    place: Path,
    specs: Mapping[str, Spec],
    block: Callable[[str], Tensor],
) -> None:
    """Write tensors by DCP's own writer, from one process.

    Args:
        target: The directory.
        place: Where the directory will be, which the metadata names.
        specs: Dtype and shape of what is written, by name.
        block: Gives a tensor by its name.

    Cost:
        One tensor in memory, which torch.save copies, and a file for each: in one file a rank,
        DCP's writer keeps all of that rank's tensors until the file is closed.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

    class Planner(DefaultSavePlanner):
        def lookup_object(self, index: MetadataIndex) -> Any:
            return block(index.fqn)

    class Writer(FileSystemWriter):
        def storage_meta(self) -> StorageMeta | None:
            return StorageMeta(checkpoint_id=place, save_id=self.save_id)

    state = {
        name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
        for name, spec in specs.items()
    }
    with warnings.catch_warnings():
        # It warns that there is one process, which is what no_dist=True says.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        writer = Writer(target, single_file_per_rank=False)
        try:
            save(state, storage_writer=writer, planner=Planner(), no_dist=True)
        except CheckpointException as failed:
            # It wraps what went wrong, and is no Exception itself.
            raise failed.failures[0][0] from None
