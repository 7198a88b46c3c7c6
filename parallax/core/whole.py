"""Whole tensors for optimizers that need them: each at one rank, there and back again.

An optimizer whose update of a parameter depends on that whole parameter (row and column means, a
trust ratio, Newton-Schulz, blocks of quantised state) runs on whole tensors. Each sharded parameter
has an owner, the rank that steps it and holds its state. Before a step, the ranks that answer for
the parts send it weight and gradient; afterwards it sends every rank that holds a part the new
values. What the optimizer computes is then what it would compute in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallax.core.mesh import device_of
from parallax.core.slices import Box, box_at, is_cut

BUCKET = 1 << 28
"""Bytes of whole tensors that are under way at a time, over all ranks together."""


class _Route(NamedTuple):
    """The way of one parameter.

    Attributes:
        owner: The rank that steps it.
        size: Bytes of the whole.
        sends: Whether this rank is the one that answers for its part.
        part: This rank's part; None when it is empty.
        sources: The parts by the rank that answers for each.
        holders: The parts by the rank that holds each.
    """

    owner: int
    size: int
    sends: bool
    part: Box | None
    sources: list[tuple[int, Box]]
    holders: list[tuple[int, Box]]


class Exchange:
    """Brings parts of parameters to their owners, and back.

    Args:
        parameters: The sharded parameters that are stepped whole, by name, in the same order on
            every rank.
        mesh: The world's mesh.
        fixed: Owners that were chosen earlier, which stay.

    Attributes:
        owners: The owner of each parameter: largest first, each to the rank that has least.

    Cost:
        With P elements over n ranks, a part held by r of them: a rank sends at most 2 P / n to
        owners (weights and gradients) and r P / n back, in few exchanges of up to `BUCKET` bytes.
        An owner holds weight and gradient of what it owns for the time of a step: 2 P / n.
    """

    def __init__(
        self, parameters: Mapping[str, DTensor], mesh: DeviceMesh, fixed: Mapping[str, int]
    ) -> None:
        self._mesh = mesh
        self._device = device_of(mesh)
        self._rank = dist.get_rank()
        self.owners = _owners({n: p.numel() for n, p in parameters.items()}, fixed)
        self._shapes = {n: p.shape for n, p in parameters.items()}
        known: dict[object, tuple[list[tuple[int, Box]], list[tuple[int, Box]]]] = {}
        self._routes: dict[str, _Route] = {}
        for name, parameter in parameters.items():
            axes = parameter.device_mesh.mesh_dim_names
            key = (axes, parameter.placements, parameter.shape)
            if key not in known:  # layers repeat: work each layout out once
                known[key] = _layout(parameter, mesh)
            sources, holders = known[key]
            self._routes[name] = _Route(
                self.owners[name],
                parameter.numel() * parameter.element_size(),
                any(rank == self._rank for rank, _ in sources),
                next((block for rank, block in holders if rank == self._rank), None),
                sources,
                holders,
            )

    @property
    def traffic(self) -> int:
        """Bytes that all ranks together send in a step in which every parameter has a gradient."""
        total = 0
        for route in self._routes.values():
            each = route.size / max(1, sum(_count(block) for _, block in route.sources))
            there = sum(_count(b) for rank, b in route.sources if rank != route.owner)
            back = sum(_count(b) for rank, b in route.holders if rank != route.owner)
            total += round(each * (2 * there + back))
        return total

    def owns(self, name: str) -> bool:
        """Whether this rank steps a parameter."""
        return self.owners[name] == self._rank

    def gather(self, parts: Mapping[str, tuple[Tensor, ...]]) -> dict[str, tuple[Tensor, ...]]:
        """Whole tensors at their owners. Collective.

        Args:
            parts: By parameter, this rank's parts of its weight and gradient; the same names in
                the same order on every rank.

        Returns:
            The whole tensors of what this rank owns.
        """
        whole: dict[str, tuple[Tensor, ...]] = {}
        for names in self._buckets(parts):
            sent: list[tuple[int, Tensor]] = []
            wanted: list[tuple[int, Tensor]] = []
            for name in names:
                route, mine = self._routes[name], parts[name]
                if route.owner == self._rank:
                    whole[name] = tuple(t.new_empty(self._shapes[name]) for t in mine)
                    for rank, block in route.sources:
                        targets = [t[block.window] for t in whole[name]]
                        if rank == self._rank:
                            for target, part in zip(targets, mine, strict=True):
                                target.copy_(part)
                        else:
                            wanted += [(rank, target) for target in targets]
                elif route.sends:
                    sent += [(route.owner, part) for part in mine]
            self._exchange(sent, wanted)
        return whole

    def scatter(self, whole: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> None:
        """Write owners' whole tensors into the parts of all ranks. Collective.

        Args:
            whole: What this rank owns of the parameters that `parts` names.
            parts: By parameter, this rank's part, which is overwritten; the same names in the same
                order on every rank.
        """
        for names in self._buckets(parts):
            sent: list[tuple[int, Tensor]] = []
            wanted: list[tuple[int, Tensor]] = []
            for name in names:
                route = self._routes[name]
                if route.owner == self._rank:
                    for rank, block in route.holders:
                        if rank == self._rank:
                            parts[name].copy_(whole[name][block.window])
                        else:
                            sent.append((rank, whole[name][block.window]))
                elif route.part is not None:
                    wanted.append((route.owner, parts[name]))
            self._exchange(sent, wanted)

    def _buckets(self, names: Iterable[str]) -> Iterator[list[str]]:
        bucket: list[str] = []
        size = 0
        for name in names:
            if bucket and size + self._routes[name].size > BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(name)
            size += self._routes[name].size
        if bucket:
            yield bucket

    def _exchange(self, sent: list[tuple[int, Tensor]], wanted: list[tuple[int, Tensor]]) -> None:
        """Send tensors to ranks and fill others from ranks, as bytes, so that dtypes may mix.

        Between two ranks, tensors travel in the order in which both list them.
        """
        ranks = range(dist.get_world_size())
        outgoing = [_bytes(t) for rank in ranks for to, t in sent if to == rank]
        incoming = [t for rank in ranks for source, t in wanted if source == rank]
        nothing = torch.empty(0, dtype=torch.uint8, device=self._device)
        packed = torch.cat(outgoing).to(self._device) if outgoing else nothing
        sizes = [t.numel() * t.element_size() for t in incoming]
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        dist.all_to_all_single(
            received,
            packed,
            [sum(t.numel() * t.element_size() for s, t in wanted if s == rank) for rank in ranks],
            [sum(t.numel() * t.element_size() for to, t in sent if to == rank) for rank in ranks],
        )
        for target, piece in zip(incoming, received.split(sizes), strict=True):
            # A copy, since a view in a wider dtype must start at a multiple of its size.
            target.copy_(piece.clone().view(target.dtype).view(target.shape))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _count(block: Box) -> int:
    count = 1
    for length in block.lengths:
        count *= length
    return count


def _owners(sizes: Mapping[str, int], fixed: Mapping[str, int]) -> dict[str, int]:
    loads = [0] * dist.get_world_size()
    owners = {name: fixed[name] for name in sizes if name in fixed}
    for name, rank in owners.items():
        loads[rank] += sizes[name]
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):  # stable: all ranks alike
        if name not in owners:
            owners[name] = loads.index(min(loads))
            loads[owners[name]] += size
    return {name: owners[name] for name in sizes}


def _layout(
    tensor: DTensor, mesh: DeviceMesh
) -> tuple[list[tuple[int, Box]], list[tuple[int, Box]]]:
    """Over the whole world: the ranks that answer for the parts of a tensor, and that hold them.

    A parameter may lie on some axes of the world only (a norm under `tp` is replicated over that
    axis); its own mesh then names only the ranks that this one meets there.
    """
    axes = tensor.device_mesh.mesh_dim_names or ()
    assert mesh.mesh_dim_names is not None, "the world's axes have names"
    places = [mesh.mesh_dim_names.index(axis) for axis in axes]
    cuts = [places[i] for i, p in enumerate(tensor.placements) if hasattr(p, "dim")]
    sources: list[tuple[int, Box]] = []
    holders: list[tuple[int, Box]] = []
    for coordinate in (mesh.mesh >= 0).nonzero().tolist():
        block = box_at(tensor, [coordinate[place] for place in places])
        if block.empty:
            continue
        rank = int(mesh.mesh[tuple(coordinate)])
        holders.append((rank, block))
        if all(c == 0 or place in cuts for place, c in enumerate(coordinate)):
            sources.append((rank, block))
    return sources, holders


def stepped_whole(tensor: Tensor) -> bool:
    """Whether a parameter has to be brought together: plain and uncut ones are whole already."""
    return isinstance(tensor, DTensor) and is_cut(tensor)
