"""What a checkpoint of any format looks like to those who read it: tensors by name, in boxes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from torch import Tensor

from parallax.checkpoint.layout import Spec
from parallax.core.slices import Box
from parallax.errors import CheckpointError

NESTS = ("model", "module", "state_dict", "model_state_dict")
"""Under what a model's state is kept beside other state."""

WRAPPERS = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put in front of every name."""


class Source(ABC):
    """A checkpoint that is read; a context manager.

    Attributes:
        path: The directory or file.
        format: What it is, for people.
        specs: Dtype and shape of each tensor, by name.
        files: In which file (or files) each tensor lies.
        pieces: In how many pieces it was written, where that is known and more than one.
        paths: The keys of nested dicts that lead to each tensor, the last of which is its name.
        buffers: Names that are known to be of buffers, not parameters.
        prefix: What was taken off every name.
        notes: What a person should know of how it was read.
    """

    def __init__(self, path: Path, format: str) -> None:  # noqa: A002  the word for it
        self.path = path
        self.format = format
        self.specs: dict[str, Spec] = {}
        self.files: dict[str, str] = {}
        self.pieces: dict[str, int] = {}
        self.paths: dict[str, tuple[str, ...]] = {}
        self.buffers: frozenset[str] = frozenset()
        self.prefix = ""
        self.notes: list[str] = []

    @abstractmethod
    def block(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor (all of it by default), on the CPU; memory-mapped where possible.

        It is to be copied from, not written to, while the source is open.

        Raises:
            CheckpointError: It cannot be read.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    @property
    def directory(self) -> Path:
        """Where files of text lie that go along with the tensors."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def whole(self) -> Source:
        """The source that this one is a part of; itself when it is none."""
        return self

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.size for spec in self.specs.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Part(Source):
    """The tensors of another source whose names begin with a prefix, without it.

    Args:
        whole: The other source.
        prefix: What they begin with.
        names: Which of them.
    """

    def __init__(self, whole: Source, prefix: str, names: Iterable[str]) -> None:
        super().__init__(whole.path, whole.format)
        self._whole = whole
        self.prefix = prefix
        self.notes = whole.notes
        for name in names:
            short = name.removeprefix(prefix)
            self.specs[short] = whole.specs[name]
            self.files[short] = whole.files[name]
        short = {n.removeprefix(prefix) for n in whole.buffers if n.startswith(prefix)}
        self.buffers = frozenset(short & set(self.specs))

    @property
    def whole(self) -> Source:
        """The source that this one is a part of."""
        return self._whole

    def block(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor."""
        return self._whole.block(self.prefix + name, box)

    def close(self) -> None:
        """Close the files."""
        self._whole.close()


def model_part(source: Source, prefix: str | None) -> Source:
    """The tensors of a source that are the model's, under their own names.

    Args:
        source: All of them.
        prefix: What their names begin with; None finds it out, "" leaves all as they are.

    Raises:
        CheckpointError: No names begin so, or it cannot be told which are the model's.
    """
    if prefix is None:
        nest, names = _nest(source)
        prefix = nest + _wrappers([name.removeprefix(nest) for name in names])
        if prefix:
            source.notes.append(
                f"{len(names)} names begin with {prefix!r}, which was taken off; --prefix '' "
                "leaves them as they are."
            )
        left_out = len(source.specs) - len(names)
        if left_out:
            source.notes.append(f"{_tensors(left_out)} left out as not of the model.")
        _note_model(source, prefix, [name.removeprefix(prefix) for name in names])
    else:
        names = [name for name in source.specs if name.startswith(prefix)]
        if not names:
            raise CheckpointError(
                f"names with the prefix {prefix!r} were asked for from {source.path}; its "
                f"{len(source.specs)} names are {some(source.specs)}.\n\nGive a prefix that they "
                "begin with, or '' to leave them as they are."
            )
        left_out = len(source.specs) - len(names)
        if left_out:
            source.notes.append(f"{_tensors(left_out)} left out without the prefix {prefix!r}.")
    if prefix in names:
        raise CheckpointError(
            f"the prefix {prefix!r} is the whole name of a tensor in {source.path}, so that none "
            "would be left.\n\nGive a shorter one."
        )
    return Part(source, prefix, names)


def _tensors(count: int) -> str:
    return "1 tensor was" if count == 1 else f"{count} tensors were"


def _note_model(source: Source, prefix: str, names: list[str]) -> None:
    # Not taken off by itself: torch wraps no model under this name, while many a transformers
    # model whose head is tied has all of its parameters there, and would not find them again.
    for known in ("app.model.", "model."):
        if names and all(name.startswith(known) for name in names):
            if not (source.directory / "config.json").is_file():
                source.notes.append(
                    f"all {len(names)} names begin with {known!r}; if that is not of the model "
                    f"itself, --prefix {prefix}{known} takes it off."
                )
            return


def _nest(source: Source) -> tuple[str, list[str]]:
    """The prefix under which the model's state lies beside other state, and the names there."""
    nests = {name: _nest_of(path) for name, path in source.paths.items()}
    found = sorted({nest for nest in nests.values() if nest})
    if len(found) == 1:
        return ".".join(found[0]) + ".", [n for n, nest in nests.items() if nest == found[0]]
    flat = [name for name in source.specs if len(source.paths.get(name, (name,))) == 1]
    if not found and (flat or not source.specs):
        return "", flat
    tops = sorted({path[0] for path in source.paths.values()})
    said = " and ".join(repr(".".join(nest)) for nest in found) or "none of the known names"
    raise CheckpointError(
        f"the model's part of {source.path} was asked for; its tensors lie under {some(tops)}, and "
        f"{said} may be it.\n\nSay which with --prefix, such as --prefix {tops[0]}."
    )


def _nest_of(path: tuple[str, ...]) -> tuple[str, ...]:
    # At the top, or below one object that bundles model and optimizer, as tutorials of DCP do.
    for depth in (1, 2):
        if len(path) > depth and path[depth - 1] in NESTS:
            return path[:depth]
    return ()


def _wrappers(names: list[str]) -> str:
    found = ""
    while names:
        common = [w for w in WRAPPERS if all(name.startswith(found + w) for name in names)]
        if not common:
            break
        found += common[0]
    return found


def some(names: Iterable[str] | Mapping[str, object], most: int = 4) -> str:
    """A few names, and how many more there are.

    Example:
        >>> some(["a", "b", "c"], 2), some([])
        ('a, b and 1 more', 'none')
    """
    found = list(names)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return (", ".join(found[:most]) or "none") + more
