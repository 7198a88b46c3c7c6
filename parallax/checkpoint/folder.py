"""The directory of a checkpoint: made whole or not at all, replaced, found again, rotated."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from pathlib import Path

from parallax.checkpoint.files import INDEX, read_index
from parallax.errors import CheckpointError

_TIME = re.compile(rb'"time": (\d+)')

STEP = "step-"
"""What the names of rotated checkpoints begin with."""


class Target:
    """The place of a checkpoint that is being written.

    Args:
        path: Where it will be.
        token: What tells it from other checkpoints of the same name.

    Attributes:
        partial: Where it is written meanwhile, hidden beside the target.
    """

    def __init__(self, path: Path, token: str) -> None:
        self.path = path
        self.partial = _hidden(path, token, "partial")
        self._old = _hidden(path, token, "old")

    def begin(self, size: int) -> None:
        """Make the hidden directory.

        Args:
            size: Bytes that will be written.

        Raises:
            CheckpointError: Something of worth is at the target, or the disk has not enough room.
            OSError: It cannot be written there.
        """
        others = _others(self.path)
        if others:
            raise CheckpointError(
                f"{self.path} holds what is no part of a checkpoint, so it is not replaced: "
                f"{', '.join(others[:6])}.\n\nGive a directory of its own."
            )
        if self.path.exists() and not _replaceable(self.path):
            raise CheckpointError(
                f"{self.path} exists and is no checkpoint, so it is not replaced.\n\nGive a "
                "directory of its own."
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._recover()
        room = shutil.disk_usage(self.path.parent).free
        if room < size:
            raise CheckpointError(
                f"a checkpoint of {size:,} bytes was to be written to {self.path}, and its disk "
                f"has {room:,} free.\n\nFree some, keep fewer checkpoints, or give another disk."
            )
        self.partial.mkdir()

    def commit(self) -> None:
        """Put what was written in the target's place; what was there is removed."""
        sync(self.partial)
        if self.path.exists():
            self.path.rename(self._old)
            try:
                self.partial.rename(self.path)
            except OSError:
                self._old.rename(self.path)
                raise
        else:
            self.partial.rename(self.path)
        sync(self.path.parent)
        shutil.rmtree(self._old, ignore_errors=True)

    def abandon(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def _recover(self) -> None:
        """Clear away what killed runs left; what they had replaced is put back first."""
        old = _left_over(self.path, "old")
        if old and not self.path.exists():
            old.pop().rename(self.path)
        for path in (*old, *_left_over(self.path, "partial")):
            shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_text(path: Path, text: bytes) -> None:
    """Write a small file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def place(directory: str | os.PathLike[str]) -> Path:
    """The absolute path of a directory; of a link, what it leads to, which is what is replaced."""
    path = Path(directory).expanduser().absolute()
    return path.resolve() if path.is_symlink() else path


def damaged(path: Path) -> Path | None:
    """A directory that was a checkpoint and has lost its index: the path itself, or one in it.

    Checkpoints appear whole, so what has tensors and no index was damaged later.
    """
    known = [path, *sorted(path.glob(f"{STEP}*"))] if path.is_dir() else []
    for found in known:
        if not (found / INDEX).is_file() and any(found.glob("*.safetensors")):
            return found
    return None


def find(path: Path) -> Path | None:
    """The checkpoint at a path: the directory itself, or the newest in it; None when there is none.

    A checkpoint that was being replaced when its run was killed is found under its hidden name.
    """
    if (path / INDEX).is_file():
        return path
    old = [] if path.exists() else _left_over(path, "old")
    return old[-1] if old else latest(path)


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder that `boosted.save(folder, keep=n)` writes to.

    Args:
        folder: Holds a directory a checkpoint.

    Returns:
        The one that was completed last; None when there is none, or no folder.

    Example:
        >>> latest("no/such/folder") is None
        True
    """
    found = _complete(Path(folder))
    return found[-1] if found else None


def rotate(folder: Path, keep: int) -> None:
    """Remove all checkpoints of a folder but the newest, and what killed runs left there."""
    for path in [p for p in _complete(folder) if _numbered(p)][:-keep]:
        gone = path
        if not path.name.startswith("."):
            # Renamed first, so that a kill in the middle leaves no half one in sight.
            gone = _hidden(path, uuid.uuid4().hex[:8], "partial")
            # What cannot be removed now is tried again at the next save; the new one is complete.
            with contextlib.suppress(OSError):
                path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
    for path in folder.glob(f".{STEP}*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def _numbered(path: Path) -> bool:
    """Whether a directory was made by rotation, and holds nothing else than its checkpoint."""
    name = _target(path) if path.name.startswith(".") else path.name
    return re.fullmatch(rf"{STEP}\d+", name) is not None and not _others(path)


def _complete(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    if not folder.is_dir():
        return []
    shown = {p for p in folder.iterdir() if (p / INDEX).is_file() and p.suffix != ".partial"}
    shown = {p for p in shown if not p.is_symlink()}  # a link is no checkpoint more
    names = {p.name for p in shown}
    # Of a checkpoint that was being replaced, the older one counts while the new one is not there.
    shown = {p for p in shown if p.suffix != ".old" or _target(p) not in names}
    return sorted(shown, key=lambda p: (_completed(p / INDEX), p.name))


def _completed(index: Path) -> int:
    """When a checkpoint was completed, in nanoseconds: as it says, for a copy has other times."""
    try:
        with index.open("rb") as file:
            found = _TIME.search(file.read(200))
        return int(found[1]) if found else index.stat().st_mtime_ns
    except FileNotFoundError:  # removed meanwhile, by the run that it is of
        return 0


def _hidden(path: Path, token: str, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{token}.{suffix}")


def _target(path: Path) -> str:
    """The name that a hidden directory stands for."""
    return path.name[1:].rsplit(".", 2)[0]


def _left_over(path: Path, suffix: str) -> list[Path]:
    """Hidden directories of a checkpoint's name, oldest first."""
    found = path.parent.glob(f".*.{suffix}") if path.parent.is_dir() else []
    return sorted(
        (p for p in found if p.is_dir() and _target(p) == path.name),
        key=lambda p: p.stat().st_mtime_ns,
    )


def _others(target: Path) -> list[str]:
    """What lies in a checkpoint's directory and is no part of it, by name."""
    if not target.is_dir() or not (target / INDEX).is_file():
        return []
    names = sorted(p.name for p in target.iterdir())
    try:
        index = read_index(target)
    except CheckpointError:  # damaged: then its files are known by their kinds
        return [n for n in names if not n.endswith((".safetensors", ".json"))]
    return [n for n in names if n not in {INDEX, *index.files, *index.texts}]


def _replaceable(target: Path) -> bool:
    """Whether what is at a path is a checkpoint, or nothing of worth."""
    return target.is_dir() and ((target / INDEX).is_file() or not any(target.iterdir()))
