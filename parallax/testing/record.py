"""What one training run did: everything that verify compares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Named = dict[str, Tensor]


@dataclass
class Record:
    """Numbers of one run, whole and on the CPU.

    Attributes:
        losses: The loss of each step.
        grads: The gradients of each step by parameter name.
        norms: The global gradient norm of each step.
        start: Parameters before the first step.
        params: Parameters after the last step.
        buffers: Saved buffers after the last step.
        moments: Optimizer state after the last step, by `<parameter>/<entry>`.
        averages: Averaged parameters after the last step, where there are any.
        took_place: Whether each step's update was made, or skipped; a skipped one has no gradients
            and no norm here.
        evaluation: Loss of the first batch after the last step, in evaluation mode.
    """

    losses: list[float] = field(default_factory=list)
    grads: list[Named] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    start: Named = field(default_factory=dict)
    params: Named = field(default_factory=dict)
    buffers: Named = field(default_factory=dict)
    moments: Named = field(default_factory=dict)
    averages: Named = field(default_factory=dict)
    took_place: list[bool] = field(default_factory=list)
    evaluation: float = 0.0


@dataclass
class Trial:
    """What a composition did in a world.

    Attributes:
        record: The run itself.
        resumed: The last steps once more, from a checkpoint saved half-way; losses, parameters,
            buffers and moments only.
        losses: The losses of each rank, in rank order: they must be equal.
        randomness: For each rank its data rank and the first numbers of its random stream.
    """

    record: Record
    resumed: Record
    losses: list[list[float]]
    randomness: list[tuple[int, tuple[float, ...]]]


def flat_moments(moments: dict[str, dict[str, Any]]) -> Named:
    """Optimizer state by one name an entry; entries that are no tensors are left out."""
    return {
        f"{name}/{entry}": value
        for name, entries in moments.items()
        for entry, value in entries.items()
        if isinstance(value, Tensor)
    }
