"""What may be said about where parameters live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from parallax.core.fact import Fact

Stage = Literal[1, 2, 3]
Dtype = Literal["fp64", "fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class Sharding(Fact):
    """How much of the training state is sharded over the data_shard axis.

    Attributes:
        stage: 1 optimizer state, 2 gradients too, 3 parameters too (arXiv:1910.02054).
        units: Which modules are gathered and reduced as one: class names or name patterns.
    """

    stage: Stage | None = None
    units: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Precision(Fact):
    """Dtypes of the forward, the gradient reduction and the outputs; masters are float32.

    Attributes:
        compute: Dtype of parameters and activations in forward and backward.
        reduce: Dtype in which gradients are summed over ranks.
        outputs: Dtype of the model's floating-point outputs.
        keep: Modules that stay in float32: class names, name patterns, or "norms".
    """

    compute: Dtype | None = None
    reduce: Dtype | None = None
    outputs: Dtype | None = None
    keep: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Scaling(Fact):
    """The loss scale that keeps small gradients of a float16 backward from becoming zero.

    Attributes:
        start: First scale.
        growth: Factor on the scale after `interval` updates without a skip.
        backoff: Factor on the scale after a skipped update.
        interval: Updates without a skip before the scale grows.
        least: Smallest scale.
        most: Largest scale.
    """

    start: float | None = None
    growth: float | None = None
    backoff: float | None = None
    interval: int | None = None
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True)
class Compression(Fact):
    """How gradients are written while they cross the data ranks.

    Attributes:
        gradients: A small dtype, or "full" for the reduction's own.
    """

    gradients: Literal["fp8", "bf16", "full"] | None = None
