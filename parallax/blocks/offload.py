"""Keeping the inputs of recomputed units in host memory from the forward to the backward."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from parallax.core.slices import local
from parallax.errors import StepError


class Parcel:
    """One tensor in host memory. Its buffer goes back to the shelf when autograd lets go of it.

    Attributes:
        there: The host's copy.
        here: The device's copy, from the prefetch to its use.
        device: Where the original was.
    """

    def __init__(self, there: Tensor, device: torch.device) -> None:
        self.there = there
        self.device = device
        self.here: Tensor | None = None
        self.arrived: Any = None


class Stay:
    """The parcels of one unit's call, and the call before, whose turn is next in the backward."""

    def __init__(self, before: Stay | None) -> None:
        self.parcels: weakref.WeakSet[Parcel] = weakref.WeakSet()
        self.before = weakref.ref(before) if before is not None else lambda: None


class Shelf:
    """Host buffers for one model, used again step by step, and the stream that copies.

    All copies run on one side stream, in order: a buffer that is filled again has been read before.

    Args:
        device: Where the model lives. On a CPU the copies are made in turn.

    Attributes:
        stored: Number of tensors put here so far.
        fetched: Number brought back.
        buffers: Number of host buffers made.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._gpu else None
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        # A weak reference holds no call alive, nor its parcels.
        self._last: Any = lambda: None
        self.stored = self.fetched = self.buffers = 0

    @contextmanager
    def of_unit(self, name: str, leaves: list[Any]) -> Iterator[None]:
        """Put the activations among a unit's arguments here while it runs.

        Masks and the like, which need no gradient, are shared by all units and stay where they are.
        """
        inputs = [x for x in leaves if isinstance(x, Tensor) and _moves(x)]
        versions = [x._version for x in inputs]  # noqa: SLF001  (documented for this very use)
        wanted = {_key(x) for x in inputs}
        stay = Stay(self._last())

        def pack(x: Tensor) -> Any:
            return self._store(x, stay) if _key(x) in wanted else x

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            parcel, stay, wrap = packed
            return wrap(self._fetch(parcel, stay))

        with saved_tensors_hooks(pack, unpack):
            yield
        if [x._version for x in inputs] != versions:  # noqa: SLF001
            raise StepError(
                f"{name} changes its input in place, and the input was on its way to host memory."
                "\n\nChange a copy, or leave offload out of remat."
            )
        if stay.parcels:
            self._last = weakref.ref(stay)

    def _store(self, x: Tensor, stay: Stay) -> Any:
        mine = local(x.detach())
        size = max(1, mine.numel() * mine.element_size())
        buffer = self._buffer(1 << (size - 1).bit_length())
        there = buffer[: mine.numel() * mine.element_size()].view(mine.dtype)
        there = there.as_strided(mine.shape, mine.stride())
        parcel = Parcel(there, mine.device)
        with self._aside():
            there.copy_(mine, non_blocking=True)
        if self._stream is not None:
            mine.record_stream(self._stream)  # its memory is not given out before it was read
        weakref.finalize(parcel, self._free[len(buffer)].append, buffer).atexit = False
        stay.parcels.add(parcel)
        self.stored += 1
        return parcel, stay, _wrapper(x)

    def _fetch(self, parcel: Parcel, stay: Stay) -> Tensor:
        self._start(parcel)
        before = stay.before()
        for other in list(before.parcels) if before is not None else ():
            self._start(other)
        found, parcel.here = parcel.here, None
        assert found is not None, "_start put it there"
        if parcel.arrived is not None:
            torch.cuda.current_stream(parcel.device).wait_event(parcel.arrived)
        self.fetched += 1
        return found

    def _start(self, parcel: Parcel) -> None:
        if parcel.here is not None:
            return
        parcel.here = torch.empty_like(parcel.there, device=parcel.device)  # the same strides
        with self._aside():
            parcel.here.copy_(parcel.there, non_blocking=True)
            if self._stream is not None:
                parcel.arrived = self._stream.record_event()
        if self._stream is not None:
            # A prefetch that nobody comes for is freed while the copy may still run.
            parcel.here.record_stream(self._stream)

    def _aside(self) -> Any:
        """The side stream, once all that was asked of the current one is done."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def _buffer(self, size: int) -> Tensor:
        """A free buffer of so many bytes, a power of two as torch's pinned memory is given out."""
        if self._free[size]:
            return self._free[size].pop()
        self.buffers += 1
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._gpu)


def _moves(x: Tensor) -> bool:
    """Whether a tensor is an activation that can be copied as it lies."""
    mine = local(x.detach())
    plain = type(mine) is Tensor
    dense = plain and torch.empty_like(mine, device="meta").stride() == mine.stride()
    return x.requires_grad and not isinstance(x, nn.Parameter) and dense


def _key(x: Tensor) -> tuple[Any, ...]:
    mine = local(x.detach())
    return mine.data_ptr(), mine.shape, mine.stride(), mine.dtype


def _wrapper(x: Tensor) -> Any:
    if not isinstance(x, DTensor):
        return lambda found: found
    mesh, placements, shape, stride = x.device_mesh, x.placements, x.shape, x.stride()
    return lambda found: DTensor.from_local(
        found, mesh, placements, run_check=False, shape=shape, stride=stride
    )
