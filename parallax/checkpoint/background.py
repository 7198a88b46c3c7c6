"""Saving beside training: a copy in host memory, a thread that writes it, and what it says."""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

_GROUPS: dict[object, dist.ProcessGroup] = {}

_ALIGNMENT = 64
"""Bytes: each tensor of the copy begins at a multiple, as vector instructions like it."""


class Saving:
    """A checkpoint that is being written, or was.

    Attributes:
        directory: Where it is once it is complete.
        total: Bytes that this rank writes.
        written: Bytes that it has written so far.
    """

    def __init__(self, directory: Path, total: int) -> None:
        self.directory = directory
        self.total = total
        self.written = 0
        self._future: Future[Path] | None = None

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete.

        Args:
            timeout: Seconds to wait; None waits as long as it takes.

        Returns:
            Its directory.

        Raises:
            CheckpointError: It could not be written; the same on every rank.
            TimeoutError: It is still being written.
        """
        if self._future is None:
            return self.directory
        try:
            return self._future.result(timeout)
        finally:
            if self._future.done():
                _STARTED.discard(self)

    def done(self) -> bool:
        """Whether it is complete, or has failed."""
        return self._future is None or self._future.done()

    @property
    def progress(self) -> float:
        """Part of this rank's bytes that is written, from 0 to 1; durable only when `done()`."""
        return self.written / self.total if self.total else float(self.done())

    def add(self, count: int) -> None:
        """Note that so many bytes more were written."""
        self.written += count

    def start(self, work: Callable[[], None]) -> None:
        """Do the work on a thread; a program that ends waits for it."""
        future: Future[Path] = Future()
        self._future = future

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  raised where it is waited for
                future.set_exception(error)
            else:
                _STARTED.discard(self)
                future.set_result(self.directory)

        _STARTED.add(self)
        threading.Thread(target=run, name="parallax-save").start()

    def __repr__(self) -> str:
        return f"<saving {self.directory}: {self.progress:.0%}>"


def wait_for(boosted: Any) -> None:
    """Wait for a pair's asynchronous saving, and raise its error; it is forgotten once it is done.

    Not before: an interrupt that ends the waiting ends no thread, whose memory must not be reused.
    """
    saving = boosted.saving
    if saving is None:
        return
    try:
        saving.result()
    finally:
        if saving.done():
            boosted.saving = None


def _last_words() -> None:
    """Say what went wrong with a saving whose result nobody asked for before the program ended."""
    for saving in list(_STARTED):
        try:
            saving.result()
        except Exception as error:  # noqa: BLE001  there is nobody left to raise it to
            sys.stderr.write(f"{type(error).__name__}: {error}\n")


_STARTED: set[Saving] = set()
"""Savings that have failed or may yet, and whose result nobody has asked for."""

atexit.register(_last_words)


class Staging:
    """Host memory for one copy of this rank's slices, allocated once; pinned where there is a GPU.

    Pinned by registering plain memory, since torch's own allocator of pinned memory rounds sizes up
    to powers of two.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def hold(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors; returns when the copies are complete.

        Returns:
            The copies, valid until the next call.

        Raises:
            RuntimeError: There is not enough host memory.
        """
        starts, end = [], 0
        for part in parts:
            starts.append(end)
            end += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)  # freed before the larger one
            self._memory = _pinned(end)
        copies = []
        for part, start in zip(parts, starts, strict=True):
            raw = self._memory[start : start + part.nbytes]
            copy = raw.view(part.dtype).view(part.shape)
            copies.append(copy.copy_(part, non_blocking=True))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return copies


def _pinned(size: int) -> Tensor:
    memory = torch.empty(size, dtype=torch.uint8)
    if size and torch.cuda.is_available() and torch.cuda.is_initialized():
        runtime: Any = torch.cuda.cudart()
        address = memory.data_ptr()
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, size, 0)))
        weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, address)
    return memory


def own_group() -> dist.ProcessGroup | None:
    """A gloo group of all ranks for the thread, so that it never meets training's exchanges.

    Collective on its first call.
    """
    world = dist.group.WORLD
    if dist.get_world_size() == 1:
        return None
    for known in [key for key in _GROUPS if key is not world]:
        del _GROUPS[known]  # of a process group that was destroyed
    if world not in _GROUPS:
        _GROUPS[world] = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
    return _GROUPS[world]
