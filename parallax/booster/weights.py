"""A model's weights in one file, by original names, as any torch program reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallax.booster.onefile import Files, files_at, on_first, replace_tensors, together
from parallax.core.boosted import Boosted
from parallax.core.collect import collect
from parallax.core.slices import box, like, local
from parallax.errors import CheckpointError


def save_weights(boosted: Boosted, path: Path) -> None:
    """Write parameters and saved buffers to one file; collective.

    Tied parameters are written once, under their first name.

    Cost:
        Rank 0 holds the whole model on its CPU; tensors travel there one by one.

    Raises:
        CheckpointError: Rank 0 could not write; raised on every rank.
    """
    leaves = {**boosted.leaves("params"), **boosted.leaves("buffers")}
    whole = collect(leaves, boosted.mesh)
    on_first(lambda: replace_tensors(path, whole, {"format": "pt"}), str(path))


def load_weights_(boosted: Boosted, path: Path, *, strict: bool) -> None:
    """Read weights by name into a boosted model, in place; collective.

    Args:
        boosted: The pair to write into.
        path: A safetensors file, or a directory of such as transformers writes it.
        strict: Whether the names must be the same; shapes must in any case.

    Raises:
        CheckpointError: It is missing, damaged, or does not fit. Raised on every rank before
            anything is changed.

    Cost:
        Each rank reads the blocks it holds.
    """
    tree: dict[str, Any] = {"params": {}, "buffers": {}, "rooms": {}}

    def read() -> None:
        with Files(path, files_at(path)) as files:
            _read(boosted, files, tree, strict=strict)

    together(read)
    boosted.write_(tree, kinds=("params", "buffers"))


def _read(boosted: Boosted, files: Files, tree: dict[str, Any], *, strict: bool) -> None:
    aliases: dict[str, list[str]] = {}
    for alias, first in boosted.names.ties:
        aliases.setdefault(first, []).append(alias)
    faults: list[str] = []
    known: set[str] = set()
    for kind in ("params", "buffers"):
        for name, target in boosted.leaves(kind).items():
            spellings = [name, *aliases.get(name, [])]
            found = [s for s in spellings if s in files.shapes]
            known.update(found)
            if not found:
                faults += [f"{name} is in the model only"] if strict else []
                continue
            wrong = [s for s in found if files.shapes[s] != tuple(target.shape)]
            faults += [
                f"{s} has shape {files.shapes[s]} in the file and {tuple(target.shape)} in the "
                "model"
                for s in wrong
            ]
            if wrong:
                continue
            first, *others = (files.block(s, box(target)) for s in found)
            if any(not torch.equal(first, other) for other in others):
                faults.append(
                    f"{' and '.join(found)} are one tensor in the model and differ in the file"
                )
            tree[kind][name] = _laid_out(first, target)
    if strict:
        faults += [f"{name} is in the file only" for name in files.shapes if name not in known]
    if not faults and not known:
        faults.append("no name in the file is one of the model's")
    if faults:
        shown = "\n".join(f"  {fault}" for fault in faults[:8])
        more = f"\n  and {len(faults) - 8} more" if len(faults) > 8 else ""
        remedy = "Build the model as it was when it was saved"
        remedy += ", or use strict=False to load the names that both have." if strict else "."
        raise CheckpointError(
            f"{files.path} does not fit {boosted.title}:\n{shown}{more}\n\n{remedy}"
        )


def _laid_out(block: Tensor, target: Tensor) -> Tensor:
    return like(block.to(local(target).device), target)
