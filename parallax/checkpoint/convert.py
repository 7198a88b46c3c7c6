"""The model part of a checkpoint of any format, written in another: streamed, complete or not."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from parallax.checkpoint import dcp
from parallax.checkpoint.files import INDEX, Entry, Index, Piece
from parallax.checkpoint.folder import Target, sync, write_text
from parallax.checkpoint.foreign import Own
from parallax.checkpoint.layout import Spec, layout
from parallax.checkpoint.pieces import write
from parallax.checkpoint.read import whole_box
from parallax.checkpoint.save import SHARD
from parallax.checkpoint.source import Source, some
from parallax.checkpoint.texts import model_index
from parallax.core.amount import bytes_of
from parallax.errors import CheckpointError, ParallaxError, raise_all

Form = Literal["transformers", "dcp", "parallax"]
"""The formats that are written."""

DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""What tensors can be converted to: as presets are called, and as torch spells it."""

TEXTS = ("config.json", "generation_config.json")
"""What goes along to formats that transformers reads."""


def convert(
    source: Source,
    target: str | os.PathLike[str],
    to: Form,
    *,
    dtype: str | None = None,
    buffers: str | None = None,
    shard_size: int | str = SHARD,
    progress: Callable[[int], object] = lambda count: None,
) -> Path:
    """Write the tensors of a source to a directory of another format, complete or not at all.

    A format other than parallax's does not say which names are buffers. In a parallax checkpoint
    they all become parameters, except those that match `buffers`; `boosted.load_(directory,
    kinds=("params",))` wants the model's parameters and no more.

    Args:
        source: What `parallax.checkpoint.foreign.open_foreign` opened.
        target: The directory, which must not be there yet, or be empty.
        to: `"transformers"` writes model.safetensors, or numbered files with their index, and
            config.json where the source has one; `"parallax"` the same and an index with
            checksums; `"dcp"` what `torch.distributed.checkpoint.load` reads into
            `model.state_dict()`.
        dtype: Converts float tensors: fp64, fp32, fp16, bf16, or as torch spells them. Float8 and
            integers stay as they are.
        buffers: A pattern of names that are buffers, such as `"*.running_*"`.
        shard_size: Bytes of tensors in one file, as a number or as `"4GiB"`.
        progress: Is told the bytes of each tensor of the source that is done.

    Returns:
        The directory.

    Raises:
        CheckpointError: The target exists, the source is damaged, or it cannot be written.

    Cost:
        Each byte is read and written once. Host memory holds one tensor and a chunk of about
        4 MiB; only the chunk where the source is memory-mapped. DCP's writer makes a few copies of
        the tensor that it writes.

    Example:
        >>> with open_foreign("trained/") as source:  # doctest: +SKIP
        ...     convert(source, "for_users/", "transformers", dtype="bf16")
    """
    limit, wanted = _checked(source, to, dtype, buffers, shard_size)
    specs = {name: _becomes(spec, wanted) for name, spec in source.specs.items()}
    path = Path(target).absolute()
    _unused(path, source)
    place = Target(path, uuid.uuid4().hex)
    try:
        if to == "dcp":
            place.begin(sum(spec.size for spec in specs.values()))
            _write_dcp(place, source, specs, progress)
        else:
            _write_files(place, source, specs, to, wanted, buffers, limit, progress)
        place.commit()
    except OSError as error:
        place.abandon()
        raise CheckpointError(
            f"{source.path} cannot be converted to {path}: {error}.\n\nCheck that the path is "
            "writable and has room. Nothing was left there."
        ) from None
    except BaseException:
        place.abandon()
        raise
    return path


def _checked(
    source: Source, to: str, dtype: str | None, buffers: str | None, shard_size: int | str
) -> tuple[int, str | None]:
    faults: list[ParallaxError] = []
    if to not in get_args(Form):
        faults.append(
            CheckpointError(
                f"convert was given the format {to!r}.\n\nGive one of {', '.join(get_args(Form))}."
            )
        )
    wanted = None if dtype is None else DTYPES.get(dtype, dtype)
    if wanted is not None and wanted not in DTYPES.values():
        faults.append(
            CheckpointError(
                f"convert was given the dtype {dtype!r}.\n\nGive one of {', '.join(DTYPES)}."
            )
        )
    limit = bytes_of(shard_size)
    if limit is None:
        faults.append(
            CheckpointError(
                f"convert was given the shard size {shard_size!r}.\n\nGive bytes, such as "
                "1073741824 or '1GiB'."
            )
        )
    if buffers is not None and not any(fnmatchcase(name, buffers) for name in source.specs):
        faults.append(
            CheckpointError(
                f"convert was told that {buffers!r} are buffers, and of {source.path} no name "
                f"matches: {some(source.specs)}.\n\nGive a pattern such as '*.running_*'."
            )
        )
    if not source.specs:
        faults.append(CheckpointError(f"{source.path} holds no tensors.\n\nGive another path."))
    raise_all(faults)
    assert limit is not None, "otherwise it is a fault"
    return limit, wanted


def _unused(path: Path, source: Source) -> None:
    # Unlike saving, converting replaces nothing: what is there may be the only copy of a run, or
    # the source itself.
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(
            f"{source.path} was to be converted to {path}, which exists.\n\nGive a directory that "
            "does not, or remove it first."
        )


def _becomes(spec: Spec, dtype: str | None) -> Spec:
    return Spec(dtype, spec.shape) if dtype and spec.dtype in DTYPES.values() else spec


def _write_dcp(
    place: Target, source: Source, specs: Mapping[str, Spec], progress: Callable[[int], object]
) -> None:
    def block(name: str) -> Tensor:
        tensor = source.block(name).to(getattr(torch, specs[name].dtype))
        progress(source.specs[name].size)
        return tensor

    dcp.write(place.partial, place.path, specs, block)


def _write_files(
    place: Target,
    source: Source,
    specs: Mapping[str, Spec],
    to: str,
    dtype: str | None,
    buffers: str | None,
    limit: int,
    progress: Callable[[int], object],
) -> None:
    def is_buffer(name: str) -> bool:
        return name in source.buffers or (buffers is not None and fnmatchcase(name, buffers))

    keys = {f"{'buffers' if is_buffer(name) else 'params'}/{name}": name for name in specs}
    token = uuid.uuid4().hex
    lay = layout({key: specs[name] for key, name in keys.items()}, limit, token)
    place.begin(sum(file.size for file in lay.files))
    tensors: dict[str, Entry] = {}
    with ExitStack() as stack:
        files = {}
        for file in lay.files:
            with (place.partial / file.name).open("wb") as out:
                out.write(file.header)
                out.truncate(file.size)
            files[file.name] = os.open(place.partial / file.name, os.O_WRONLY)
            stack.callback(os.close, files[file.name])
        for key, (file, name, start) in lay.places.items():
            spec = specs[name]
            whole = whole_box(spec.shape)
            sums = write(files[file], start, spec, whole, source.block(name))
            tensors[key] = Entry(*spec, file, name, [Piece(whole, tuple(sums))])
            progress(source.specs[name].size)
    for file in lay.files:
        sync(place.partial / file.name)
    index = _index(source, tensors, token)
    for name, text in {**_texts(source, dtype), **model_index(tensors)}.items():
        write_text(place.partial / name, text)
        index.texts[name] = xxh3_64_intdigest(text)
    if to == "parallax":
        write_text(place.partial / INDEX, index.to_text())


def _index(source: Source, tensors: dict[str, Entry], token: str) -> Index:
    kinds = sorted({key.split("/", 1)[0] for key in tensors}, reverse=True)
    index = Index("", 0, tensors, token=token, kinds=kinds, time=time.time_ns())
    whole = source.whole
    if isinstance(whole, Own):
        # Of another composition nothing remains but whole tensors; where they came from is kept.
        index.composition, index.step = whole.reader.index.composition, whole.reader.index.step
        index.world = whole.reader.index.world
    return index


def _texts(source: Source, dtype: str | None) -> dict[str, bytes]:
    found = {}
    for name in TEXTS:
        path = source.directory / name
        if not path.is_file():
            continue
        text = path.read_bytes()
        if dtype is not None and name == TEXTS[0]:
            try:
                told = json.loads(text)
            except ValueError as error:
                raise CheckpointError(
                    f"{path} cannot be read: {error}.\n\nRepair or remove it; it says of which "
                    "dtype transformers makes the model."
                ) from None
            said = json.dumps(_told(told, dtype), indent=2, sort_keys=True)
            text = f"{said}\n".encode()
        found[name] = text
    return found


def _told(config: Any, dtype: str) -> Any:
    """A configuration that says another dtype, where it says one; in those inside of it as well."""
    if not isinstance(config, dict):
        return config
    return {
        key: dtype if key in ("dtype", "torch_dtype") and value else _told(value, dtype)
        for key, value in config.items()
    }
