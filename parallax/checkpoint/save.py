"""Writing a checkpoint: every rank its own bytes, complete or not at all."""

from __future__ import annotations

import os
import queue
import threading
import time
import uuid
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from xxhash import xxh3_64_intdigest

from parallax.checkpoint.background import Saving, Staging, own_group, wait_for
from parallax.checkpoint.content import Content, Row, content, wrong_kinds
from parallax.checkpoint.files import INDEX, Entry, Index, Piece
from parallax.checkpoint.folder import STEP, Target, place, rotate, write_text
from parallax.checkpoint.layout import Layout, Place, layout
from parallax.checkpoint.pieces import write
from parallax.checkpoint.texts import model_index
from parallax.checkpoint.together import Ranks
from parallax.core.amount import bytes_of
from parallax.core.boosted import Boosted
from parallax.core.state import KINDS, Kind
from parallax.errors import CheckpointError

SHARD = 4 << 30
"""Bytes of tensors in one file, by default."""

FLUSH = 32 << 20
"""Bytes after which a rank asks the disk to begin."""

_REMEDY = (
    "Check that the path exists for every rank, is writable and has room. Nothing that was there "
    "before has been changed."
)

_STAGING: weakref.WeakKeyDictionary[Boosted, Staging] = weakref.WeakKeyDictionary()


def save(
    boosted: Boosted,
    directory: str | os.PathLike[str],
    *,
    kinds: tuple[Kind, ...] = KINDS,
    keep: int | None = None,
    shard_size: int | str = SHARD,
    prefix: str | None = None,
    asynchronous: bool = False,
) -> Saving:
    """Write the training state to a directory, complete or not at all; collective over all ranks.

    The directory holds plain safetensors files of whole tensors and one index; its model part is
    read by `transformers.from_pretrained` as it stands. Nothing is pickled.

    Args:
        boosted: The pair to save.
        directory: Where to, on storage that all ranks see; an older checkpoint there is replaced
            once the new one is complete. With `keep`, a folder of checkpoints.
        kinds: Which kinds of state; all by default.
        keep: Write to `directory/step-<n>` and keep this many of the newest checkpoints there.
        shard_size: Bytes of tensors in one file, as a number or as `"4GiB"`.
        prefix: Put into the names of the model's files: `model.<prefix>.safetensors`. transformers
            finds files without one only.
        asynchronous: Return when the state is copied to host memory, and write beside training. A
            later `save` or `load_` waits for it and raises its error, as its `result()` does.

    Returns:
        The saving: `result()` is the checkpoint's directory, `progress` how far it is.

    Raises:
        CheckpointError: A rank cannot write, the disk has too little room, or there is state that
            no file can hold; on every rank, and what was there stays. Also the error of an
            asynchronous saving before.

    Cost:
        Every byte is written once over all ranks, each rank its own slices, with a chunk of host
        memory (about 4 MiB); `asynchronous` holds a copy of this rank's slices in host memory
        (pinned on GPUs), allocated once and kept for the next.
    """
    wait_for(boosted)
    boosted.free("save")
    ranks = Ranks()
    limit = ranks.do(lambda: _checked(kinds, keep, shard_size))
    beside = bool(asynchronous)
    ranks.alike("save", kinds=kinds, keep=keep, shard_size=limit, asynchronous=beside)
    mine: Content = ranks.do(lambda: content(boosted, kinds), "the state cannot be saved")
    mine.prefix = prefix
    folder = ranks.do(lambda: place(directory), f"save was given {directory!r}")
    if keep is not None:
        ranks.on_first(lambda: _no_checkpoint(folder))
    target = folder if keep is None else folder / f"{STEP}{boosted.step:08d}"
    rotation = None if keep is None else (folder, keep)
    if not asynchronous:
        return write_out(ranks, target, mine, limit, rotation=rotation)
    writing = _begin(ranks, target, mine, limit, rotation)
    staging = _STAGING.setdefault(boosted, Staging())
    try:
        mine.parts = ranks.do(lambda: staging.hold(mine.parts), "no host memory for the copy")
    except CheckpointError:
        writing.abandon(ranks)
        raise
    apart = Ranks(own_group())
    boosted.saving = saving = Saving(target, mine.size)
    saving.start(lambda: writing.run(saving, apart))
    return saving


def write_out(
    ranks: Ranks,
    target: Path,
    mine: Content,
    limit: int,
    *,
    rotation: tuple[Path, int] | None = None,
) -> Saving:
    """Write what the ranks hold to a directory, complete or not at all; collective.

    Args:
        ranks: All ranks.
        target: The directory.
        mine: This rank's share.
        limit: Bytes of tensors in one file.
        rotation: A folder, and how many of its checkpoints stay.

    Raises:
        CheckpointError: A rank cannot write; what was there stays.
    """
    saving = Saving(target, mine.size)
    _begin(ranks, target, mine, limit, rotation).run(saving, ranks)
    return saving


def limit_of(verb: str, shard_size: int | str) -> int:
    """Bytes of tensors in one file.

    Raises:
        CheckpointError: It is no number of bytes.
    """
    limit = bytes_of(shard_size)
    if limit is None:
        raise CheckpointError(
            f"{verb} was given shard_size={shard_size!r}. Give bytes, such as 1073741824 or '1GiB'."
        )
    return limit


def _no_checkpoint(folder: Path) -> None:
    if (folder / INDEX).is_file():
        raise CheckpointError(
            f"save was given keep= and {folder}, which is a checkpoint itself and would hide those "
            "in it.\n\nGive a folder of its own for the checkpoints."
        )


def _checked(kinds: tuple[Kind, ...], keep: int | None, shard_size: int | str) -> int:
    faults, limit = [], 0
    try:
        limit = limit_of("save", shard_size)
    except CheckpointError as error:
        faults.append(str(error))
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        faults.append(
            f"save was given keep={keep!r}. Give the number of checkpoints to keep, at least 1."
        )
    if wrong_kinds(kinds):
        faults.append(f"save was given kinds={kinds!r}. Give some of {', '.join(KINDS)}.")
    if faults:
        raise CheckpointError("\n\n".join(faults))
    return limit


class Flusher:
    """Lets the disk work while the rest is still being copied: a thread that asks it to.

    A context manager; when it is left, the thread has ended.
    """

    def __init__(self) -> None:
        self._files: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="parallax-flush")
        self._waiting = 0
        self._fault: OSError | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._files.put(None)
        self._thread.join()

    def wrote(self, file: int, count: int) -> None:
        """Note that so many bytes were written to a file; from time to time they are flushed."""
        self._waiting += count
        if self._waiting >= FLUSH:
            self._files.put(file)
            self._waiting = 0

    def finish(self) -> None:
        """Wait for the thread; what the disk did not take is raised here."""
        self.__exit__()
        if self._fault is not None:
            raise self._fault

    def _run(self) -> None:
        while (file := self._files.get()) is not None:
            try:
                os.fdatasync(file)
            except OSError as error:
                # The system says it once only, so the last sync of the file need not say it again.
                self._fault = self._fault or error


@dataclass
class _Writing:
    """A checkpoint under way: where it goes, where each tensor lies, and what this rank writes."""

    target: Target
    token: str
    mine: Content
    places: dict[str, Place]
    everyone: list[tuple[list[Row], dict[str, Any]]]
    rotation: tuple[Path, int] | None = None

    def run(self, saving: Saving, ranks: Ranks) -> None:
        """Write, make it durable, and put it in its place; collective."""
        what = f"cannot write a checkpoint to {self.target.path}"
        try:
            sums = ranks.do(lambda: self._write(saving), what, _REMEDY)
            everyones = ranks.to_first(sums)
            ranks.on_first(lambda: self._finish(everyones), what, _REMEDY)
        except CheckpointError:
            if ranks.rank == 0:
                self.target.abandon()
            raise
        finally:
            self.mine.parts = []

    def abandon(self, ranks: Ranks) -> None:
        """Remove what was begun."""
        if ranks.rank == 0:
            self.target.abandon()

    def _write(self, saving: Saving) -> list[list[int]]:
        files: dict[str, int] = {}
        found = []
        with ExitStack() as stack, Flusher() as flusher:
            for row, part in zip(self.mine.rows, self.mine.parts, strict=True):
                place = self.places[row.key]
                if place.file not in files:
                    files[place.file] = os.open(self.target.partial / place.file, os.O_WRONLY)
                    stack.callback(os.close, files[place.file])
                file = files[place.file]
                found.append(write(file, place.start, row.spec, row.box, part))
                flusher.wrote(file, part.nbytes)
                saving.add(part.nbytes)
            flusher.finish()
            for file in files.values():
                os.fsync(file)
        return found

    def _finish(self, sums: list[list[list[int]]]) -> None:
        index = Index(**self.mine.about, token=self.token, time=time.time_ns())
        for (rows, values), theirs in zip(self.everyone, sums, strict=True):
            index.values.update(values)
            for row, mine in zip(rows, theirs, strict=True):
                place = self.places[row.key]
                entry = index.tensors.setdefault(
                    row.key, Entry(row.spec.dtype, row.spec.shape, place.file, place.name)
                )
                entry.pieces.append(Piece(row.box, tuple(mine)))
        for name, text in {
            **self.mine.texts,
            **model_index(index.tensors, self.mine.prefix),
        }.items():
            write_text(self.target.partial / name, text)
            index.texts[name] = xxh3_64_intdigest(text)
        write_text(self.target.partial / INDEX, index.to_text())
        self.target.commit()
        if self.rotation is not None:
            rotate(*self.rotation)


def _begin(
    ranks: Ranks, target: Path, mine: Content, limit: int, rotation: tuple[Path, int] | None
) -> _Writing:
    """Agree where everything lies, and make the files; errors come before anything is written."""
    token = ranks.from_first(uuid.uuid4().hex[:8])
    rows = ranks.to_first((str(target), mine.rows, mine.values))
    place = Target(target, token)
    found: list[Layout] = []

    def lay_out() -> None:
        elsewhere = {path for path, _, _ in rows} - {str(target)}
        if elsewhere:
            raise CheckpointError(
                f"save was given {target} on rank 0 and {', '.join(sorted(elsewhere))} on others."
                "\n\nGive the same directory on every rank."
            )
        specs = {row.key: row.spec for _, theirs, _ in rows for row in theirs}
        found.append(layout(specs, limit, token, prefix=mine.prefix))
        place.begin(sum(file.size for file in found[0].files))
        for file in found[0].files:
            with (place.partial / file.name).open("wb") as out:
                out.write(file.header)
                out.truncate(file.size)

    try:
        ranks.on_first(lay_out, f"cannot write a checkpoint to {target}", _REMEDY)
    except CheckpointError:
        if ranks.rank == 0:
            place.abandon()
        raise
    places = ranks.from_first(found[0].places if found else None)
    everyone = [(theirs, values) for _, theirs, values in rows]
    return _Writing(place, token, mine, places, everyone, rotation)


__all__ = ["SHARD", "Saving", "save"]
