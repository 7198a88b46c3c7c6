"""What may be said about the modules that a model is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from parallax.core.fact import Fact

Recipe = Literal["tensorwise", "rowwise", "off"]


@dataclass(frozen=True)
class Float8(Fact):
    """Which linear layers multiply in float8, and how.

    Attributes:
        recipe: What shares a scale: a tensor or a row; "off" leaves all layers as they are.
        keep: Layers left out, by name pattern.
        least: Smallest size of both dims of a weight that is worth it.
        gather: Whether weights cross the ranks in float8; they do not when unsaid.
        emulate: Whether products are computed in the layer's own dtype from rounded operands.
    """

    recipe: Recipe | None = None
    keep: tuple[str, ...] | None = None
    least: int | None = None
    gather: bool | None = None
    emulate: bool | None = None
