"""Gradients that cross the ranks in few bytes.

Each rank rounds what it sends once, and sums what it receives in the reduction's own dtype: the
error is that of one rounding, whatever the number of ranks, where a reduction in a small dtype
rounds at every addition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

BLOCK = 256
"""Elements that share a scale."""

TINY = torch.finfo(torch.float32).tiny
LARGEST = torch.finfo(torch.float8_e4m3fn).max

Packed = tuple[Tensor, ...]


def to_fp8(rows: Tensor) -> Packed:
    """Round rows to float8 (e4m3), a scale for each block.

    Args:
        rows: `[rank, elements]`.

    Returns:
        `[rank, blocks x BLOCK]` bytes and `[rank, blocks]` scales. An element x of a block whose
        largest magnitude is a comes back within max(|x| / 16, a x 2^-10 / 448).
    """
    blocks = -(-rows.shape[1] // BLOCK)
    padded = torch.nn.functional.pad(rows, (0, blocks * BLOCK - rows.shape[1]))
    padded = padded.view(rows.shape[0], blocks, BLOCK)
    largest = padded.abs().amax(2).float()
    # What is not finite stays so, since its scale is not: the cast alone would give 448.
    scales = torch.where(largest < TINY, TINY, largest / LARGEST).clamp(min=TINY)
    small = (padded.float() / scales[..., None]).to(torch.float8_e4m3fn)
    return small.view(rows.shape[0], blocks * BLOCK).view(torch.uint8), scales


def from_fp8(packed: Packed, elements: int, dtype: torch.dtype) -> Tensor:
    """What `to_fp8` rounded, `[rank, elements]`."""
    small, scales = packed
    wide = small.view(torch.float8_e4m3fn).float().view(*scales.shape, BLOCK) * scales[..., None]
    return wide.view(len(small), -1)[:, :elements].to(dtype)


def to_bf16(rows: Tensor) -> Packed:
    """Round rows to bfloat16, within |x| / 256."""
    return (rows.to(torch.bfloat16),)


def as_it_is(rows: Tensor) -> Packed:
    """Round nothing: the same way through the ranks, to check it."""
    return (rows,)


def cast(packed: Packed, elements: int, dtype: torch.dtype) -> Tensor:
    """What `to_bf16` or `as_it_is` gave."""
    return packed[0].to(dtype)


WAYS: dict[str, tuple[Callable[[Tensor], Packed], Callable[[Packed, int, torch.dtype], Tensor]]] = {
    "fp8": (to_fp8, from_fp8),
    "bf16": (to_bf16, cast),
    "full": (as_it_is, cast),
}


class CompressedReduceScatter:
    """A reduce-scatter in two steps, exchange and sum: what `set_custom_reduce_scatter` takes.

    Args:
        kind: `"fp8"`, `"bf16"` or `"full"`.
    """

    def __init__(self, kind: str) -> None:
        self._pack, self._unpack = WAYS[kind]

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A buffer for the input or the output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Fill `output_tensor` with this rank's part of the sum or mean over the group."""
        rows = input_tensor.view(group.size(), -1)
        received = tuple(_exchange(part, group) for part in self._pack(rows))
        wide = self._unpack(received, rows.shape[1], output_tensor.dtype)
        torch.sum(wide, 0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())

    def mean_(self, flat: Tensor, group: dist.ProcessGroup) -> None:
        """Average a tensor over a group, in place: reduce-scatter, then gather what was rounded."""
        size = group.size()
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % size))
        mine = torch.empty(len(padded) // size, dtype=flat.dtype, device=flat.device)
        self(mine, padded, group, dist.ReduceOp.AVG)  # pyright: ignore[reportArgumentType]
        # All ranks take the rounded mean, its owner too, so that copies stay equal.
        packed = self._pack(mine.view(1, -1))
        rows = tuple(_gather(part, group) for part in packed)
        flat.copy_(self._unpack(rows, len(mine), flat.dtype).reshape(-1)[: len(flat)])


def _exchange(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, rows.contiguous(), group=group)
    return out


def _gather(row: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = torch.empty((group.size(), *row.shape[1:]), dtype=row.dtype, device=row.device)
    # torch 2.13's name for it; the old one warns there.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    gather(out, row.contiguous(), group=group)
    return out
