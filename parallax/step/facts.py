"""What may be said about a training step."""

from __future__ import annotations

from dataclasses import dataclass

from parallax.core.fact import Fact


@dataclass(frozen=True)
class Clipping(Fact):
    """Bound on the global gradient norm.

    Attributes:
        max_norm: Largest L2 norm of all gradients together.
    """

    max_norm: float | None = None
