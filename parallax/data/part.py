"""One rank's samples of a global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parallax.core.step import map_rows


class Part:
    """Samples of one rank, and a stand-in sample when there are none."""

    def __init__(self, samples: list[Any], stand_in: Any = None, size: int = 0) -> None:
        self.samples, self.stand_in, self.size = samples, stand_in, size


class Collate:
    """Makes a batch of a part: one of no rows, with their structure, where there are no samples."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, part: Part) -> Any:
        """The batch."""
        if part.samples:
            return self.collate(part.samples)
        one = self.collate([part.stand_in])
        return map_rows(one, lambda x: x[:0])
