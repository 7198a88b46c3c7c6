"""A model's weights in one file, by original names, as any torch program reads them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from parallax.booster.onefile import on_first
from parallax.checkpoint import save
from parallax.core.boosted import Boosted
from parallax.core.state import Kind

MODEL: tuple[Kind, ...] = ("params", "buffers")


def save_weights(boosted: Boosted, path: Path) -> None:
    """Write parameters and saved buffers to one file; collective.

    Tied parameters are written once, under their first name.

    Cost:
        Each rank writes its own slices; nobody holds the whole model.

    Raises:
        CheckpointError: A rank could not write; raised on every rank.
    """
    aside = path.absolute().with_name(f".{path.name}.whole")
    # A directory whose model part is the one file that was asked for.
    save(boosted, aside, kinds=MODEL, shard_size=1 << 62)

    def move() -> None:
        os.replace(aside / "model.safetensors", path)
        shutil.rmtree(aside)

    on_first(move, str(path))
