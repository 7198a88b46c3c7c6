"""What may be said about tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from parallax.core.fact import Fact


@dataclass(frozen=True)
class Cutting(Fact):
    """How modules are cut over the tp axis.

    Attributes:
        rules: Pairs of name pattern and style; None takes the model's own plan.
        loss_parallel: Keep the logits cut over the vocabulary and compute the loss there.
    """

    rules: tuple[tuple[str, str], ...] | None = None
    loss_parallel: bool | None = None
