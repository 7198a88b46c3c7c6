"""What may be said about a training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from parallax.core.fact import Fact

NonFinite = Literal["raise", "skip", "zero"]
Reduce = Literal["step", "microbatch"]


@dataclass(frozen=True)
class Clipping(Fact):
    """Bounds on gradients.

    Attributes:
        max_norm: Largest norm of all gradients together.
        norm_type: Which norm: 2, or "inf" for the largest element.
        value: Largest magnitude of an element, after the norm was bounded.
        nonfinite: What an update does whose gradient norm is not finite.
    """

    max_norm: float | None = None
    norm_type: Literal[2, "inf"] | None = None
    value: float | None = None
    nonfinite: NonFinite | None = None


@dataclass(frozen=True)
class Accumulation(Fact):
    """How a batch is run in several parts before one update.

    Attributes:
        microbatches: Number of parts.
        reduce: Whether gradients are reduced over data ranks once a step or for each part.
        batchnorm: Whose statistics a BatchNorm may use.
    """

    microbatches: int | None = None
    reduce: Reduce | None = None
    batchnorm: Literal["microbatch"] | None = None


@dataclass(frozen=True)
class Averaging(Fact):
    """An exponential moving average of the parameters.

    Attributes:
        decay: How much of the average stays at each update.
        warmup: Whether the decay grows from 0.1 with the number of updates.
    """

    decay: float | None = None
    warmup: bool | None = None
