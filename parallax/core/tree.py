"""`Boosted` as a node of optree's namespace `"parallax"`."""

from __future__ import annotations

from typing import Any

import optree

from parallax.core.boosted import Boosted
from parallax.core.state import LEAVES


class Handle:
    """What a state belongs to. Compared by plan only, so that two states of one run match."""

    def __init__(self, boosted: Boosted) -> None:
        self.boosted = boosted
        self.settings = boosted.settings

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and self.boosted.plan == other.boosted.plan

    def __hash__(self) -> int:
        return hash(self.boosted.plan)


def _flatten(boosted: Boosted) -> tuple[tuple[Any, ...], Handle, tuple[str, ...]]:
    if boosted._frozen is None:
        boosted.free("a snapshot")
    return tuple(boosted.leaves(kind) for kind in LEAVES), Handle(boosted), LEAVES


def _unflatten(handle: Handle, children: tuple[Any, ...]) -> Boosted:
    live = handle.boosted
    snapshot = Boosted(live._draft, live.plan, live.rooms, live.title, live._seen)
    snapshot._frozen = dict(zip(LEAVES, children, strict=True))
    snapshot._step = snapshot._frozen["step"]
    snapshot._settings = handle.settings
    return snapshot


# optree's annotations know collections only; any class may be a node.
optree.register_pytree_node(Boosted, _flatten, _unflatten, namespace="parallax")  # pyright: ignore[reportArgumentType]
