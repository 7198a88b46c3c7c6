"""Pieces: the box of a tensor that one rank writes, and the chunks that checksums are kept of."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from parallax.checkpoint.layout import Spec
from parallax.core.slices import Box

CHUNK = 4 << 20
"""Bytes of a chunk, about: whole rows of a piece's first dim, one at least."""


def chunks(piece: Box, itemsize: int) -> list[Box]:
    """Cut a piece into boxes of whole rows of its first dim, of about `CHUNK` bytes each.

    Example:
        >>> [c.lengths for c in chunks(Box((2, 0), (5, 1 << 19)), itemsize=4)]
        [(2, 524288), (2, 524288), (1, 524288)]
    """
    if not piece.lengths or piece.empty:
        return [piece]
    row = math.prod(piece.lengths[1:]) * itemsize
    rows = max(1, CHUNK // row)
    first, rest = piece.offsets[0], piece.lengths[0]
    return [
        Box((first + i, *piece.offsets[1:]), (min(rows, rest - i), *piece.lengths[1:]))
        for i in range(0, rest, rows)
    ]


def runs(box: Box, shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[int, int]]:
    """Offset and length in bytes of each stretch of a tensor that a box covers, in order.

    Example:
        >>> list(runs(Box((1, 0), (2, 4)), (3, 4), 1)), list(runs(Box((0, 2), (2, 2)), (3, 4), 1))
        ([(4, 8)], [(2, 2), (6, 2)])
    """
    if box.empty:
        return
    strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    # Dims from `inner` on are covered whole, so that they and the one before make one stretch.
    inner = len(shape)
    while inner and box.lengths[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    length = math.prod(box.lengths[outer:]) * itemsize
    base = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
    counts, steps = box.lengths[:outer], strides[:outer]
    for index in range(math.prod(counts)):
        offset = base
        for count, step in zip(reversed(counts), reversed(steps), strict=True):
            index, place = divmod(index, count)  # noqa: PLW2901  the digits of a mixed radix
            offset += place * step
        yield offset, length


def checksum(tensor: Tensor) -> int:
    """XXH3 (64 bits) of a tensor's bytes; the tensor is contiguous and on the CPU."""
    return xxh3_64_intdigest(memory(tensor))


def memory(tensor: Tensor) -> Any:
    """The bytes of a contiguous CPU tensor, shared; the tensor must outlive them."""
    size = tensor.numel() * tensor.element_size()
    # Not through numpy, which is no dependency and knows no bfloat16.
    return (ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b""


def write(file: int, start: int, spec: Spec, piece: Box, part: Tensor) -> list[int]:
    """Write a rank's part of a tensor to its place in an open file.

    Args:
        file: A file descriptor.
        start: Where the whole tensor begins in the file.
        spec: Dtype and shape of the whole tensor in the file.
        piece: The box that the part fills.
        part: The part, on any device and of any dtype.

    Returns:
        The checksum of each chunk.

    Raises:
        OSError: The disk is full, or broken.

    Cost:
        One chunk of host memory where the part is on another device, of another dtype, or not
        contiguous.
    """
    found = []
    dtype = getattr(torch, spec.dtype)
    for chunk in chunks(piece, spec.itemsize):
        rows = part[chunk.within(piece)] if chunk.lengths else part
        rows = rows.to("cpu", dtype).contiguous()
        found.append(checksum(rows))
        data, done = memoryview(memory(rows)).cast("B"), 0
        for offset, length in runs(chunk, spec.shape, spec.itemsize):
            _write_all(file, data[done : done + length], start + offset)
            done += length
    return found


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def check(
    whole: Tensor, piece: Box, sums: tuple[int, ...], wanted: Box, target: Tensor | None = None
) -> bool:
    """Whether the chunks of a piece that meet a box have the checksums that were kept.

    Args:
        whole: The whole tensor, memory-mapped.
        piece: What one rank wrote of it.
        sums: Of its chunks.
        wanted: What is read.
        target: Takes each chunk's share of the box once it is checked, while it is in the cache.
    """
    found = chunks(piece, whole.element_size())
    if len(found) != len(sums):
        return False
    for chunk, known in zip(found, sums, strict=True):
        meet = chunk.overlap(wanted)
        if meet.empty:
            continue
        if checksum((whole[chunk.window] if chunk.lengths else whole).contiguous()) != known:
            return False
        if target is not None:
            target[meet.within(wanted)].copy_(whole[meet.window])
    return True


def copy_(target: Tensor, whole: Tensor, wanted: Box) -> None:
    """Copy a box of a memory-mapped tensor into a tensor of its lengths, chunk by chunk.

    Cost:
        One chunk of host memory where the target is on another device or of another dtype.
    """
    for chunk in chunks(wanted, whole.element_size()):
        target[chunk.within(wanted)].copy_(whole[chunk.window])
