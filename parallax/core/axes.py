"""Mesh axes as a fact, and the layout of a world over them.

The axes, outermost (slowest link) to innermost (fastest link):

    pp              pipeline stages
    data_replicate  data ranks that hold copies of each other's shards
    data_shard      data ranks that shard parameters, gradients or optimizer state
    sp              sequence
    tp              tensor
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from parallax.core.fact import Fact
from parallax.errors import MeshError

AXES: tuple[str, ...] = ("pp", "data_replicate", "data_shard", "sp", "tp")
DATA_AXES: tuple[str, ...] = ("data_replicate", "data_shard")


@dataclass(frozen=True)
class Axes(Fact):
    """Sizes of mesh axes that were asked for by number."""

    pp: int | None = None
    data_replicate: int | None = None
    data_shard: int | None = None
    sp: int | None = None
    tp: int | None = None


@dataclass(frozen=True)
class Fill(Fact):
    """Axes that take whatever factor of the world is left when no number was given."""

    data_replicate: bool | None = None
    data_shard: bool | None = None


def layout(
    axes: Axes, fill: Fill, world: int, *, said_by: Mapping[str, str] | None = None
) -> dict[str, int]:
    """The size of every axis in a world of so many ranks.

    Args:
        axes: Sizes asked for.
        fill: Axes that take the factor that is left.
        world: Number of ranks.
        said_by: For messages: who asked for an axis, in the user's spelling, by axis name.

    Returns:
        Sizes by axis name, outermost first; axes nobody asked for have size 1. The product is
        `world`.

    Raises:
        MeshError: The sizes do not divide the world, or ranks are left that no transform takes, or
            two axes would both take what is left.

    Example:
        >>> layout(Axes(tp=2), Fill(data_shard=True), 8)
        {'pp': 1, 'data_replicate': 1, 'data_shard': 4, 'sp': 1, 'tp': 2}
    """
    if world < 1:
        raise MeshError(
            f"a plan for {world} ranks was asked for.\n\nA world has one rank at least."
        )
    said_by = said_by or {}
    sizes = axes.said()
    open_axes = [name for name in fill.said() if name not in sizes]
    asked = ", ".join(
        f"{said_by.get(name, name)} takes a factor of {size}" for name, size in sizes.items()
    )
    taken = math.prod(sizes.values())
    ranks = f"{world} rank{'s are' if world != 1 else ' is'} running"
    if world % taken:
        fits = f"Launch a multiple of {taken} ranks"
        smaller = [d for d in range(1, world + 1) if world % d == 0]
        raise MeshError(
            f"{ranks}, {asked}, and {taken} does not divide {world}.\n\n"
            f"{fits}, or choose degrees whose product is one of {_listing(smaller)}."
        )
    left = world // taken
    if len(open_axes) > 1 and left > 1:
        who = " and ".join(said_by.get(name, name) for name in open_axes)
        raise MeshError(
            f"{ranks}, and {who} would each take the factor of {left} that is left.\n\n"
            f"Give one of them a number: one of {_listing(_divisors(left))}, "
            "for instance dp(2) or zero(2, degree=2)."
        )
    if left > 1 and not open_axes:
        who = asked or "no transform asks for any"
        verb = f"no transform takes the factor of {left} that is left"
        raise MeshError(
            f"{ranks}, {who}, and {verb}.\n\n"
            f"Add zero(2) or dp() to train on different data there, or launch {taken} "
            f"rank{'s' if taken != 1 else ''}."
        )
    sizes.update({name: left if i == 0 else 1 for i, name in enumerate(open_axes)})
    return {name: sizes.get(name, 1) for name in AXES}


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _listing(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
