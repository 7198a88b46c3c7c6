"""Weights from elsewhere, by name, into any composition: every rank reads the slices it holds."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallax.checkpoint.folder import find
from parallax.checkpoint.foreign import Own, open_foreign
from parallax.checkpoint.pieces import chunks
from parallax.checkpoint.read import Read
from parallax.checkpoint.source import Source
from parallax.checkpoint.together import Ranks
from parallax.core.boosted import Boosted
from parallax.core.slices import Box, box, local
from parallax.errors import CheckpointError


class Matched(NamedTuple):
    """What a model and a source have not in common.

    Attributes:
        missing: Names of the model that the source lacks; they keep their values.
        unexpected: Names of the source that the model lacks.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_pretrained(
    boosted: Boosted, path: str | os.PathLike[str], *, strict: bool = True
) -> Matched:
    """Read a model's weights into a boosted pair, in place; collective over all ranks.

    Args:
        boosted: The pair; its optimizer's state stays as it is.
        path: A directory as transformers writes it, of one file or several; a `.safetensors` file;
            what `boosted.save` or `boosted.export` wrote; files of `torch.save` (`.bin`, `.pt`), of
            which only tensors and plain values are unpickled; or the name of a model in the local
            cache of Hugging Face, such as `"org/model"`. Nothing is fetched from the network.
        strict: Whether the names must be the same. Tied weights may be missing or double, buffers
            that a model does not save may be there, and the prefix by which transformers tells a
            model with a head from its base is added or taken off. False reads what both have.

    Returns:
        The names that only one of both has; empty when strict.

    Raises:
        CheckpointError: It is missing or damaged, or names or shapes do not fit. Raised on every
            rank before anything is changed.

    Cost:
        Each rank reads the slices that it holds, memory-mapped, with a chunk (about 4 MiB) of host
        memory.

    Example:
        >>> boosted.load_pretrained("models/llama")  # doctest: +SKIP
        Matched(missing=(), unexpected=())
    """
    boosted.free("load_pretrained")
    ranks = Ranks()
    what = f"{path} cannot be read"
    source: Source = ranks.do(lambda: open_foreign(_found(path), prefix=None), what)
    with source:
        pairs: _Pairs = ranks.do(lambda: _paired(boosted, source, strict=strict), what)
        tree = {
            kind: {name: Slice(source, theirs) for name, theirs in rows.items()}
            for kind, rows in pairs.rows.items()
        }
        whole: dict[str, Any] = {"rooms": {}, **tree}
        ranks.do(
            lambda: boosted.write_(whole, kinds=("params", "buffers")),
            f"{what} any more, and a part of the model is loaded",
            "Load it again, or others, before training goes on.",
        )
    return Matched(tuple(pairs.missing), tuple(pairs.unexpected))


def _found(path: str | os.PathLike[str]) -> Path:
    """Where a path, or a name in the local cache, is."""
    here = Path(path)
    if (
        here.exists()
        or find(here) is not None
        or re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) is None
    ):
        return here
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{path} is no file or directory, and huggingface_hub, which knows the local cache, is "
            "not installed.\n\nGive a path, or install parallax-torch[hf]."
        ) from None
    try:
        return Path(snapshot_download(str(path), local_files_only=True))
    except (OSError, ValueError) as error:  # its own kinds are kinds of these
        raise CheckpointError(
            f"{path} is no file or directory, and no model in the local cache of Hugging Face: "
            f"{type(error).__name__}.\n\nGive a path, or fetch it first: hf download {path}."
        ) from None


@dataclass
class _Pairs:
    """Names of the model with those of the source, by kind; and what is left over."""

    rows: dict[str, dict[str, tuple[str, Box]]] = field(
        default_factory=lambda: {"params": {}, "buffers": {}}
    )
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def _paired(boosted: Boosted, source: Source, *, strict: bool) -> _Pairs:
    aliases: dict[str, list[str]] = {}
    for alias, first in boosted.names.ties:
        aliases.setdefault(first, []).append(alias)
    theirs = _spelled(boosted, source)
    pairs, faults, known = _Pairs(), [], set[str]()
    for kind in ("params", "buffers"):
        for name, target in boosted.leaves(kind).items():
            found = [s for s in (name, *aliases.get(name, [])) if s in theirs]
            known.update(found)
            if not found:
                pairs.missing.append(name)
                continue
            wrong = [s for s in found if source.specs[theirs[s]].shape != tuple(target.shape)]
            faults += [
                f"{s} has shape {source.specs[theirs[s]].shape} in the file and "
                f"{tuple(target.shape)} in the model"
                for s in wrong
            ]
            if wrong:
                continue
            mine = box(target)
            if not _alike(source, [theirs[s] for s in found], mine):
                faults.append(
                    f"{' and '.join(found)} are one tensor in the model and differ in the file"
                )
            pairs.rows[kind][name] = theirs[found[0]], mine
    pairs.unexpected = [name for name in theirs if name not in known | _transient(boosted)]
    if strict:
        faults += [f"{name} is in the model only" for name in pairs.missing]
        faults += [f"{name} is in the file only" for name in pairs.unexpected]
    if not faults and not known:
        faults.append("no name in the file is one of the model's")
    if faults:
        shown = "\n".join(f"  {fault}" for fault in faults[:8])
        more = f"\n  and {len(faults) - 8} more" if len(faults) > 8 else ""
        remedy = "Build the model as it was when it was saved"
        remedy += ", or use strict=False to load the names that both have." if strict else "."
        raise CheckpointError(
            f"{source.path} does not fit {boosted.title}:\n{shown}{more}\n\n{remedy}"
        )
    _check(source, pairs)
    return pairs


def _spelled(boosted: Boosted, source: Source) -> dict[str, str]:
    """The names of a source as the model would spell them, with those they have.

    transformers' models with a head hold their base under a name, `base_model_prefix`; weights of
    one are read into the other, whichever way most names are the model's.
    """
    mine = {*boosted.leaves("params"), *boosted.leaves("buffers")}
    mine |= {alias for alias, _ in boosted.names.ties}
    ways = [{name: name for name in source.specs}]
    base = getattr(boosted.model, "base_model_prefix", "")
    if isinstance(base, str) and base:
        prefix = f"{base}."
        ways.append({f"{prefix}{name}": name for name in source.specs})
        ways.append({name.removeprefix(prefix): name for name in source.specs})
    return max(ways, key=lambda way: len(mine & way.keys()))


def _transient(boosted: Boosted) -> set[str]:
    """Names of buffers that the model has and does not save, which older files may hold."""
    named = dict(boosted.model.named_buffers(remove_duplicate=False))
    return set(named) - set(boosted.leaves("buffers"))


def _alike(source: Source, names: list[str], wanted: Box) -> bool:
    first, *others = names
    return all(
        torch.equal(source.block(first, part), source.block(other, part))
        for other in others
        for part in chunks(wanted, source.specs[first].itemsize)
    )


def _check(source: Source, pairs: _Pairs) -> None:
    """Compare checksums where there are any, before the first weight changes."""
    if not isinstance(source.whole, Own):
        return
    whole = source.whole
    for rows in pairs.rows.values():
        for name, part in rows.values():
            kind = "buffers" if source.prefix + name in whole.buffers else "params"
            whole.reader.check(Read(f"{kind}/{source.prefix}{name}", part))


@dataclass(frozen=True)
class Slice:
    """A box of a tensor that is still in a source: an unread leaf."""

    source: Source
    pair: tuple[str, Box]

    def read(self) -> Tensor:
        """The leaf as a new tensor."""
        name, wanted = self.pair
        dtype = getattr(torch, self.source.specs[name].dtype)
        target = torch.empty(wanted.lengths, dtype=dtype)
        self.read_into(target)
        return target

    def read_into(self, target: Tensor) -> None:
        """The leaf, written into a rank's part chunk by chunk."""
        name, wanted = self.pair
        for part in chunks(wanted, self.source.specs[name].itemsize):
            target[part.within(wanted)].copy_(self.source.block(name, part))

    def like(self, other: Any) -> bool:
        """Whether something is laid out as the leaf will be."""
        return isinstance(other, Tensor) and tuple(local(other).shape) == self.pair[1].lengths
