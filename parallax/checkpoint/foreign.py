"""Checkpoints of other formats, read by name.

    a parallax checkpoint, or a folder of them          index.json
    torch's distributed checkpoint (DCP, FSDP shards)   .metadata and *.distcp
    transformers, ColossalAI, sharded                   *.safetensors.index.json or *.bin.index.json
    transformers, ColossalAI, FSDP full state dicts     one .safetensors, .bin, .pt or .pth

Nothing is unpickled but through `torch.load(weights_only=True)`, and DCP's metadata through an
unpickler that knows DCP's own classes only.
"""

from __future__ import annotations

import json
import pickle
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from parallax.checkpoint.dcp import METADATA, Dcp
from parallax.checkpoint.folder import find
from parallax.checkpoint.layout import DTYPES, MODEL, Spec, name_of
from parallax.checkpoint.read import Read, Reader, whole_box
from parallax.checkpoint.source import Source, model_part, some
from parallax.core.slices import Box
from parallax.errors import CheckpointError

PICKLED = (".bin", ".pt", ".pth")

_TORCH = {name: dtype for dtype, name in DTYPES.items()}

_OTHER = re.compile(r"pytorch_optim|optim|lr_scheduler|scheduler|scaler|training_args|rng_state")
"""How files begin that lie beside a model's and hold no part of it."""

_GLOBAL = re.compile(r"GLOBAL (\S+)")


def open_foreign(path: str | Path, *, prefix: str | None = None) -> Source:
    """Open a checkpoint of any known format, to read the tensors of its model by name.

    Args:
        path: A directory or a file, or the index among a directory's files.
        prefix: What the names begin with, which is taken off; None finds it out (`notes` then says
            what was done), `""` gives all tensors under the names they have.

    Returns:
        The source; a context manager.

    Raises:
        CheckpointError: Nothing known is there, or it is damaged, or asks to run code.

    Example:
        >>> with open_foreign("llama/") as source:  # doctest: +SKIP
        ...     weight = source.block("lm_head.weight")
    """
    source = _open(Path(path))
    if isinstance(source, Own):
        prefix = prefix or ""  # its names are the model's own
    try:
        return model_part(source, prefix)
    except CheckpointError:
        source.close()
        raise


def _open(path: Path) -> Source:
    if path.is_file():
        return _of_file(path)
    found = find(path)
    if found is not None:
        return Own(found)
    if not path.is_dir():
        raise CheckpointError(
            f"a checkpoint was asked for at {path}, and there is no such file or directory.\n\n"
            "Give a path that exists."
        )
    if (path / METADATA).is_file():
        return Dcp(path)
    names = sorted(p.name for p in path.iterdir() if p.is_file() and not _OTHER.match(p.name))
    # With both kinds of file, safetensors are taken, as transformers does.
    for suffixes in ((".safetensors",), PICKLED):
        kind = "|".join(re.escape(suffix) for suffix in suffixes)
        # ColossalAI puts a prefix of its own before the last suffix: model.safetensors.index.x.json
        indexes = [n for n in names if re.search(rf"({kind})\.index(\..+)?\.json$", n)]
        single = [n for n in names if n.endswith(suffixes)]
        for candidates in (indexes, single):
            if len(candidates) == 1:
                return _of_file(path / candidates[0])
            if candidates:
                raise CheckpointError(
                    f"the model in {path} was asked for, and {len(candidates)} files may be it: "
                    f"{some(candidates, 6)}.\n\nGive the path of one of them."
                )
    inside = sorted(p.name for p in path.iterdir())
    raise CheckpointError(
        f"a checkpoint was asked for in {path}, which holds {some(inside, 6)}.\n\nGive a directory "
        "with an index.json of parallax, a .metadata of DCP, or a model's .safetensors or .bin "
        "files; or the path of one such file."
    )


def _of_file(path: Path) -> Source:
    if path.name == METADATA:
        return Dcp(path.parent)
    if path.suffix == ".json":
        return _sharded(path)
    if path.suffix == ".safetensors":
        return Safetensors(path, None)
    if path.suffix in PICKLED:
        return Pickled(path, None)
    raise CheckpointError(
        f"a checkpoint was asked for in the file {path}, whose name ends with {path.suffix!r}.\n\n"
        f"Give a file that ends with .safetensors, {', '.join(PICKLED)} or .index.json, or a "
        "directory."
    )


def _sharded(path: Path) -> Source:
    try:
        places = json.loads(path.read_bytes())["weight_map"]
        if not all(isinstance(v, str) and Path(v).name == v for v in places.values()):
            # An index from elsewhere must not point outside its directory.
            raise ValueError("a file name in its weight_map leaves the directory")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"the index {path} cannot be read: {type(error).__name__}: {error}.\n\nIt should be "
            'JSON with a "weight_map" of file names by tensor; load another checkpoint.'
        ) from None
    kinds = {Path(file).suffix for file in places.values()}
    if kinds and kinds <= set(PICKLED):
        return Pickled(path, places)
    if kinds == {".safetensors"}:
        return Safetensors(path, places)
    raise CheckpointError(
        f"the index {path} speaks of files of the kinds {', '.join(sorted(kinds)) or 'none'}.\n\n"
        f"Its files should all end with .safetensors, or with one of {', '.join(PICKLED)}."
    )


class _Files(Source):
    """One file, or those of which an index says what lies where."""

    def __init__(self, path: Path, places: dict[str, str] | None, what: str) -> None:
        sharded = "sharded " if places is not None else ""
        super().__init__(path if places is None else path.parent, f"{sharded}{what}")
        self._folder = path.parent
        names = [path.name] if places is None else sorted(set(places.values()))
        faults = []
        for name in names:
            try:
                self._open(name, {n for n, f in (places or {}).items() if f == name} or None)
            except (OSError, SafetensorError) as error:
                faults.append(f"{name}: {error}")
        lost = [name for name in places or {} if name not in self.specs]
        if lost:
            faults.append(f"what is there lacks {some(lost)}")
        if faults:
            self.close()
            shown = "\n".join(f"  {fault}" for fault in faults)
            raise CheckpointError(
                f"the checkpoint {path} is missing files, or they are damaged:\n{shown}\n\n"
                "Put all of its files together, or load another checkpoint."
            )

    def _open(self, file: str, wanted: set[str] | None) -> None:
        raise NotImplementedError

    def _add(self, file: str, path: tuple[str, ...], spec: Spec) -> str:
        name = ".".join(path)
        self.specs[name], self.files[name], self.paths[name] = spec, file, path
        return name


class Safetensors(_Files):
    """Files of safetensors, memory-mapped.

    Args:
        path: The file, or the index.
        places: File by name, as the index says; None for one file.

    Raises:
        CheckpointError: A file is missing or damaged, or holds a dtype that torch has not.
    """

    def __init__(self, path: Path, places: dict[str, str] | None) -> None:
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}
        super().__init__(path, places, "safetensors")

    def _open(self, file: str, wanted: set[str] | None) -> None:
        handle = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
        self._handles[file] = handle
        for name in handle.keys():  # noqa: SIM118  it is no dict
            if wanted is not None and name not in wanted:
                continue
            row = handle.get_slice(name)
            if row.get_dtype() not in _TORCH:
                raise CheckpointError(
                    f"{name} in {self._folder / file} has the dtype {row.get_dtype()}; those that "
                    f"are read are {', '.join(_TORCH)}.\n\nConvert it by the program that wrote it."
                )
            self._add(file, (name,), Spec(_TORCH[row.get_dtype()], tuple(row.get_shape())))

    def block(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor, memory-mapped."""
        file = self.files[name]
        try:
            whole = self._handles[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{name} cannot be read from {self._folder / file}: {error}.\n\nThe file is "
                "damaged; load another checkpoint."
            ) from None
        return _cut(whole, box)

    def close(self) -> None:
        """Close the files."""
        self._stack.close()
        self._handles.clear()


class Pickled(_Files):
    """Files of `torch.save`, memory-mapped, of which only tensors and plain values are made.

    Args:
        path: The file, or the index.
        places: File by name, as the index says; None for one file.

    Raises:
        CheckpointError: A file is missing, damaged, or asks for more than tensors.
    """

    def __init__(self, path: Path, places: dict[str, str] | None) -> None:
        self._tensors: dict[str, Tensor] = {}
        super().__init__(path, places, "torch.save")

    def _open(self, file: str, wanted: set[str] | None) -> None:
        path = self._folder / file
        for way, tensor in _leaves(_loaded(path), path):
            name = ".".join(way)
            if wanted is None or name in wanted:
                dtype = str(tensor.dtype).removeprefix("torch.")
                # By its name alone where an index says it: that is of the model.
                found = way if wanted is None else (name,)
                self._tensors[self._add(file, found, Spec(dtype, tuple(tensor.shape)))] = tensor

    def block(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor, memory-mapped."""
        return _cut(self._tensors[name], box)

    def close(self) -> None:
        """Close the files."""
        self._tensors.clear()


def _loaded(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        asked = _GLOBAL.search(str(error))
        why = f"it asks for {asked[1]}" if asked else str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{path} is refused: {why}, and only tensors and plain values are read from such "
            "files. None of it was run.\n\nIf it comes from a source you trust, load it there and "
            "save model.state_dict() again, best as safetensors."
        ) from None
    except (RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read: {why}\n\nIt is damaged, or not a file that torch.save has "
            "written since torch 1.6; load another checkpoint."
        ) from None


def _leaves(tree: Any, path: Path) -> list[tuple[tuple[str, ...], Tensor]]:
    """The tensors of nested dicts, with the keys that lead to them."""
    if not isinstance(tree, dict):
        raise CheckpointError(
            f"{path} holds a {type(tree).__name__}; a dict of tensors by name was asked for.\n\n"
            "Save model.state_dict()."
        )
    found, rows = [], [((), tree)]
    while rows:
        way, row = rows.pop()
        nested = []
        for key, value in row.items():
            here = (*way, str(key))
            if isinstance(value, dict):
                nested.append((here, value))
            elif type(value) in (Tensor, nn.Parameter):
                found.append((here, value.detach()))
            elif isinstance(value, Tensor):
                raise CheckpointError(
                    f"{'.'.join(here)} in {path} is a {type(value).__name__}, which holds a part "
                    "of a tensor or another form of it.\n\nSave a full state dict, or one by "
                    "torch.distributed.checkpoint."
                )
        rows += reversed(nested)
    return found


def _cut(whole: Tensor, box: Box | None) -> Tensor:
    return whole if box is None else whole[box.window]


class Own(Source):
    """A checkpoint of parallax: its model part, checked while it is read.

    Args:
        path: The checkpoint's directory.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "a parallax checkpoint")
        self.reader = Reader(path)
        self._keys: dict[str, str] = {}
        for key, entry in self.reader.index.tensors.items():
            if key.split("/", 1)[0] in MODEL:
                name = name_of(key)
                self._keys[name] = key
                self.specs[name], self.files[name] = entry.spec, entry.file
                self.paths[name] = (name,)
        self.buffers = frozenset(n for n, key in self._keys.items() if key.startswith("buffers/"))

    def block(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor, copied chunk by chunk as each is checked."""
        spec = self.specs[name]
        box = whole_box(spec.shape) if box is None else box
        target = torch.empty(box.lengths, dtype=getattr(torch, spec.dtype))
        self.reader.check(Read(self._keys[name], box, target))
        return target

    def close(self) -> None:
        """Close the files."""
        self.reader.__exit__()


__all__ = ["Source", "open_foreign"]
