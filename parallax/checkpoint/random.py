"""Random generators: every rank's, saved and given back to the rank that goes on in its place."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

from parallax.core.axes import DATA_AXES

_STRIDE = 0x9E3779B97F4A7C15
"""Odd and irregular (2**64 over the golden ratio), so that neighbouring ranks get unlike seeds."""


def generators() -> dict[str, Any]:
    """State of this process's generators: torch's, its GPU's, Python's, and numpy's if imported."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(words), gauss),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, words, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (kind, torch.from_numpy(words.astype("int64")), *rest)
    return state


def restore(state: Mapping[str, Any], number: int = 0) -> None:
    """Put this process's generators where a state says.

    Args:
        state: What `generators` returned; generators that it lacks stay as they are.
        number: Other than 0, the streams are derived from the state's and this number, for a rank
            that had no counterpart.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and find_spec("numpy") is not None:
        import numpy as np

        kind, words, *rest = state["numpy"]
        np.random.set_state((kind, words.numpy().astype("uint32"), *rest))
    if number:
        seed = (int(torch.randint(1 << 62, ())) + _STRIDE * number) % (1 << 62)
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % (1 << 32))


def source(saved: Mapping[str, int], here: Mapping[str, int], rank: int) -> tuple[int, int]:
    """Whose generators a rank takes, and the number they are derived by; 0 takes them as they are.

    Args:
        saved: Sizes of the mesh's axes when it was saved, outermost first.
        here: The same now.
        rank: This rank.

    Returns:
        Under the same mesh the rank itself. Otherwise the first rank at the same place in the data;
        rank 0 and the place, when there were fewer.

    Example:
        >>> saved = {"pp": 1, "data_replicate": 1, "data_shard": 2, "sp": 1, "tp": 2}
        >>> source(saved, saved, 3), source(saved, {**saved, "data_shard": 4, "tp": 1}, 1)
        ((3, 0), (2, 0))
        >>> source(saved, {**saved, "data_shard": 4, "tp": 1}, 3)
        (0, 3)
    """
    if dict(saved) == dict(here):
        return rank, 0
    place = _place(here, rank)
    for other in range(math.prod(saved.values())):
        if _place(saved, other) == place:
            return other, 0
    return 0, place


def _place(sizes: Mapping[str, int], rank: int) -> int:
    """A rank's place in the data."""
    places = {}
    for axis, size in reversed([*sizes.items()]):
        rank, places[axis] = divmod(rank, size)
    place = 0
    for axis in DATA_AXES:
        place = place * sizes.get(axis, 1) + places.get(axis, 0)
    return place
