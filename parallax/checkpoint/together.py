"""Doing a piece of work on all ranks: it succeeds on all of them, or all raise the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from parallax.errors import CheckpointError, ParallaxError


class Ranks:
    """The ranks that save or load together.

    Args:
        group: The process group to speak over; the whole world by default.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.size = dist.get_world_size()
        self.rank = dist.get_rank()

    def all(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        rows: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(rows, value, group=self._group)
        return rows

    def to_first(self, value: Any) -> list[Any]:
        """Every rank's value, on rank 0; nothing on the others."""
        rows: list[Any] | None = [value] * self.size if self.rank == 0 else None
        if self.size > 1:
            dist.gather_object(value, rows, dst=0, group=self._group)
        return rows or []

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        row = [value]
        if self.size > 1:
            dist.broadcast_object_list(row, src=0, group=self._group)
        return row[0]

    def do(self, work: Callable[[], Any], what: str = "", remedy: str = "") -> Any:
        """Do a piece of work on every rank.

        Args:
            work: Must not wait for other ranks.
            what: What it does, for errors that do not say it themselves.
            remedy: What to do then.

        Returns:
            What the work returned on this rank.

        Raises:
            CheckpointError: It failed on some rank: what the first of them found, on every rank.
        """
        fault, result = None, None
        try:
            result = work()
        except ParallaxError as error:
            fault = str(error)
        except Exception as error:  # noqa: BLE001  whatever it is, no other rank may be left waiting
            kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
            where = f"{what}: rank {self.rank}" if what else f"rank {self.rank}"
            fault = f"{where}: {kind}{error}.\n\n{remedy}".rstrip()
        found = [text for text in self.all(fault) if text]
        if found:
            raise CheckpointError(found[0])
        return result

    def on_first(self, work: Callable[[], Any], what: str = "", remedy: str = "") -> Any:
        """Do a piece of work on rank 0; its result on every rank, errors as in `do`."""
        found = self.do(work if self.rank == 0 else lambda: None, what, remedy)
        return self.from_first(found)

    def alike(self, verb: str, **given: Any) -> None:
        """Raise unless a verb was given the same on every rank."""
        rows = self.all({name: repr(value) for name, value in given.items()})
        for name in given:
            if len(said := dict.fromkeys(row[name] for row in rows)) > 1:
                raise CheckpointError(
                    f"{verb} was given {name}={' and '.join(said)} on different ranks.\n\nGive the "
                    "same on every rank."
                )
