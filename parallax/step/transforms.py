"""Transforms of the training step."""

from __future__ import annotations

import math

from parallax.core.late import Late
from parallax.core.phase import Phase
from parallax.core.rewrite import Rewrite
from parallax.core.spell import spell
from parallax.core.transform import Transform, state
from parallax.step.facts import Clipping

CLIP = Rewrite(
    "clip",
    Phase.CLIP,
    Late("parallax.step.lower:build"),
)
"""Bounds the global gradient norm before the optimizer's step."""


def clip(max_norm: float) -> Transform:
    """Scale gradients down when their global L2 norm is larger than `max_norm`.

    The norm is that of the whole model's gradient, as one process would compute it, over any mix of
    sharded, tensor-parallel and replicated parameters. `boosted.grad_norm` holds it after each
    step.

    States:
        Clipping.max_norm.

    Cost:
        One read of the gradients, one all-reduce of one number, one scaling; no host
        synchronisation.

    Args:
        max_norm: Positive bound.

    Raises:
        ValueError: The bound is not a positive number.

    Example:
        >>> clip(1.0)
        clip(1.0)
    """
    good = (
        isinstance(max_norm, int | float)
        and not isinstance(max_norm, bool)
        and 0 < max_norm < math.inf
    )
    if not good:
        raise ValueError(
            f"clip was given max_norm={max_norm!r}. Give a positive number; to leave gradients as "
            "they are, leave clip out."
        )
    return state(
        spell("clip", float(max_norm)), Clipping(max_norm=float(max_norm)), rewrites=(CLIP,)
    )
