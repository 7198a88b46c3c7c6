"""Which part of a whole tensor a rank holds, as a box of offsets and lengths."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Box(NamedTuple):
    """A contiguous block of a tensor: `tensor[o0:o0+l0, o1:o1+l1, ...]`."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def window(self) -> tuple[slice, ...]:
        """The block as an index of the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.lengths, strict=True))

    @property
    def empty(self) -> bool:
        """Whether the block has no elements."""
        return any(n == 0 for n in self.lengths)

    def overlap(self, other: Box) -> Box:
        """The block that both cover; empty when they do not meet."""
        starts = [max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True)]
        ends = [
            min(a + n, b + m)
            for a, n, b, m in zip(
                self.offsets, self.lengths, other.offsets, other.lengths, strict=True
            )
        ]
        return Box(tuple(starts), tuple(max(0, e - s) for s, e in zip(starts, ends, strict=True)))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Index of this block inside the block `outer`."""
        starts = [a - b for a, b in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(s, s + n) for s, n in zip(starts, self.lengths, strict=True))


def box(tensor: Tensor) -> Box:
    """The block of the whole tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.ndim, tuple(tensor.shape))
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank of the world is in the mesh"
    return box_at(tensor, coordinate)


def is_cut(tensor: DTensor) -> bool:
    """Whether any axis of more than one rank cuts a tensor, so that no rank surely has it whole."""
    mesh = tensor.device_mesh
    return any(hasattr(p, "dim") and mesh.size(i) > 1 for i, p in enumerate(tensor.placements))


def boxes(tensor: DTensor) -> dict[int, Box]:
    """The blocks that make up the whole tensor, by the rank that answers for each."""
    ranks = tensor.device_mesh.mesh
    found: dict[int, Box] = {}
    for coordinate in itertools.product(*map(range, ranks.shape)):
        copies = zip(coordinate, tensor.placements, strict=True)
        if all(c == 0 or hasattr(p, "dim") for c, p in copies):
            found[int(ranks[coordinate])] = box_at(tensor, coordinate)
    return found


def box_at(tensor: DTensor, coordinate: Sequence[int]) -> Box:
    """The block of the whole tensor at a place of the tensor's own mesh."""
    # A fully_shard parameter that was tensor-sharded first carries a strided placement: the data
    # axis cuts the block that the tensor axis left. So strided placements are applied last, which
    # makes every rank's part one contiguous block.
    offsets, lengths = [0] * tensor.ndim, list(tensor.shape)
    cuts = [(p, coordinate[i], tensor.device_mesh.size(i)) for i, p in enumerate(tensor.placements)]
    cuts = [cut for cut in cuts if hasattr(cut[0], "dim")]
    for placement, rank, size in sorted(cuts, key=lambda cut: hasattr(cut[0], "split_factor")):
        dim = placement.dim % tensor.ndim  # pyright: ignore[reportAttributeAccessIssue]
        chunk = -(-lengths[dim] // size)
        start = min(rank * chunk, lengths[dim])
        offsets[dim] += start
        lengths[dim] = min(chunk, lengths[dim] - start)
    return Box(tuple(offsets), tuple(lengths))


def cut(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """First and last-plus-one row of a rank; the first `rows % ranks` ranks hold one more.

    Example:
        >>> [cut(7, 3, rank) for rank in range(3)]
        [(0, 3), (3, 5), (5, 7)]
    """
    each, more = divmod(rows, ranks)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


def held_once(tensor: Tensor, coordinate: Sequence[int], axes: Sequence[str]) -> bool:
    """Whether this rank is the one that answers for its part where several hold the same part.

    Args:
        tensor: A plain tensor (the same on every rank) or a DTensor.
        coordinate: This rank's place in the world's mesh.
        axes: The names of the mesh's axes.
    """
    sharded: set[str] = set()
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        sharded = {n for n, p in zip(names, tensor.placements, strict=True) if hasattr(p, "dim")}
    return all(c == 0 for c, axis in zip(coordinate, axes, strict=True) if axis not in sharded)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its storage; call under `no_grad`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def like(part: Tensor, model: Tensor) -> Tensor:
    """Wrap a rank's part so that it is laid out as `model` is, sharing storage."""
    if not isinstance(model, DTensor):
        return part
    return DTensor.from_local(
        part,
        model.device_mesh,
        model.placements,
        run_check=False,
        shape=model.shape,
        stride=model.stride(),
    )
