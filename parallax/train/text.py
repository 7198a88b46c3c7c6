"""Text to train on: where it comes from, how it is split, and windows over it.

The vocabulary is the 256 byte values, so there is nothing to fit, download or save.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from parallax.errors import DataError

VOCABULARY = 256
HELD_OUT = 0.05
"""The part of the text that is never trained on."""

_NOT_SOURCE = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
)


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Text as bytes, in a part to train on and a part to judge by.

    Args:
        train: The bytes to train on, uint8.
        held_out: The bytes kept apart, uint8.
        source: What it was read from, for people.
        files: How many files it was read from.
    """

    train: Tensor
    held_out: Tensor
    source: str
    files: int


class Windows(Dataset[Tensor]):
    """Neighbouring stretches of a text, each with the one byte after it that is to be predicted.

    Sample `i` is int64 of `seq + 1` values: the inputs are all but the last, the targets all but
    the first. Every byte but the first is the target of one sample, up to an uneven tail.

    Args:
        text: The text, uint8.
        seq: How many bytes are predicted in one sample.
        name: What the text is, for messages.

    Raises:
        DataError: The text is too short for one sample.

    Example:
        >>> windows = Windows(torch.arange(9, dtype=torch.uint8), seq=4)
        >>> [window.tolist() for window in windows]
        [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    """

    def __init__(self, text: Tensor, seq: int, *, name: str = "text") -> None:
        if len(text) < seq + 1:
            raise DataError(
                f"Windows of {seq} bytes were asked for; the {name} has {len(text)} bytes, and "
                f"one window takes {seq + 1}.\n\n"
                f"Give more text, or a --seq of at most {max(len(text) - 1, 1)}."
            )
        self.text = text
        self.seq = seq

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.seq

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.seq
        return self.text[start : start + self.seq + 1].long()


def corpus(data: str | os.PathLike[str] | None = None, *, limit: int = 16 << 20) -> Corpus:
    """Reads a text and splits it, alike in every process that sees the same files.

    Files are taken in the order of a hash of their relative names, so a limit keeps a fair draw
    of them. Whole files are held out, by the same hash; of a single file (or where the hash
    holds out none or all of a few files) the last 5 percent of the bytes are.

    Args:
        data: A file, or a folder that is searched for text files; the source of Python's
            standard library when left out.
        limit: How many bytes to read at most.

    Returns:
        The text in its two parts.

    Raises:
        DataError: There is no such file or folder, or no text in it.
    """
    root = Path(sysconfig.get_path("stdlib")) if data is None else Path(data)
    source = (
        f"the standard library of Python {sys.version_info.major}.{sys.version_info.minor}"
        if data is None
        else str(data)
    )
    if not root.exists():
        raise DataError(
            f"Text was asked for from {source}; there is no file or folder {str(root)!r}.\n\n"
            f"Give --data a path that exists."
        )
    names = _names(root, only_python=data is None)
    train: list[bytes] = []
    held_out: list[bytes] = []
    left = limit
    for name in sorted(names, key=_order):
        if left <= 0:
            break
        text = _text(root / name if name else root)[:left]
        if text:
            left -= len(text)
            (held_out if _digest(name)[0] < HELD_OUT * 256 else train).append(text)
    files = len(train) + len(held_out)
    if not files:
        raise DataError(
            f"Text was asked for from {source}; there are {len(names)} files there and none holds "
            f"text (empty files and files with a zero byte do not count).\n\n"
            f"Give --data a text file, or a folder that has some."
        )
    if train and held_out and len(names) > 1:
        return Corpus(_bytes(train), _bytes(held_out), source, files)
    whole = _bytes(train or held_out)
    cut = len(whole) - math.ceil(HELD_OUT * len(whole))
    return Corpus(whole[:cut], whole[cut:], source, files)


def unigram_entropy(text: Tensor) -> float:
    """The entropy of a text's own byte frequencies, in nats per byte.

    No model that ignores context can have a lower loss on this text, so a loss below it shows
    that context is being used.

    Args:
        text: The text, uint8.

    Returns:
        The entropy; 0 for a text of one repeated byte, at most log 256.

    Example:
        >>> round(unigram_entropy(torch.tensor([7, 9], dtype=torch.uint8)), 4)
        0.6931
    """
    count = torch.bincount(text.int(), minlength=VOCABULARY).double()
    return torch.special.entr(count / count.sum()).sum().item()


def encode(text: str) -> Tensor:
    """Text as token ids, int64 [bytes]."""
    return torch.tensor(list(text.encode()), dtype=torch.long)


def decode(tokens: Sequence[int] | Tensor) -> str:
    """Token ids as text; bytes that are not UTF-8 become the replacement character."""
    return bytes(int(token) for token in tokens).decode(errors="replace")


def _names(root: Path, *, only_python: bool) -> list[str]:
    """Paths of the files below a folder, relative to it; of a file, the empty one."""
    return [""] if root.is_file() else list(_below(root, only_python=only_python))


def _below(root: Path, *, only_python: bool) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and not (only_python and name in _NOT_SOURCE)
        ]
        for name in names:
            if not name.startswith(".") and (not only_python or name.endswith(".py")):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _digest(name: str) -> bytes:
    # Not hash(): that differs from process to process, and ranks would split differently.
    return hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest()


def _order(name: str) -> bytes:
    # From the far end, because the near one decides the split: held-out files would come first,
    # and a limit could leave nothing to train on.
    return _digest(name)[::-1]


def _text(path: Path) -> bytes:
    raw = path.read_bytes()
    if b"\0" in raw:
        return b""
    return raw.decode(errors="replace").encode()


def _bytes(parts: list[bytes]) -> Tensor:
    joined = bytearray(b"\n".join(parts))
    # frombuffer refuses a buffer of no bytes.
    return (
        torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    )
