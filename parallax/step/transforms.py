"""Transforms of the training step: accumulate, clip, ema."""

from __future__ import annotations

import math
from typing import Any

from parallax.core.late import Late
from parallax.core.phase import Phase
from parallax.core.rewrite import Rewrite
from parallax.core.spell import one_of, spell
from parallax.core.transform import Transform, state
from parallax.step.facts import Accumulation, Averaging, Clipping, NonFinite, Reduce

AVERAGE = Rewrite("ema", Phase.AVERAGE, Late("parallax.step.average:build"))
"""Averages the parameters after each update."""

CLIP = Rewrite("clip", Phase.CLIP, Late("parallax.step.lower:build"))
"""Bounds gradients before the optimizer's step."""

ACCUMULATE = Rewrite(
    "accumulate",
    Phase.ACCUMULATE,
    Late("parallax.step.accumulate:build"),
    Late("parallax.step.accumulate:check"),
)
"""Runs a batch in several parts before one update."""


def clip(
    max_norm: float | None = None,
    *,
    norm_type: float | str | None = None,
    value: float | None = None,
    nonfinite: NonFinite | None = None,
) -> Transform:
    """Scale gradients down when their global norm is larger than `max_norm`.

    The norm is that of the whole model's gradient, as one process would compute it, over any mix of
    sharded, tensor-parallel and replicated parameters. `boosted.grad_norm` holds it after each
    step. A gradient within the bounds is left as it is, bit for bit.

    States:
        Clipping.

    Cost:
        One read of the gradients, one all-reduce of one number, one scaling. The host waits for
        nothing where the optimizer is torch's fused Adam or AdamW, or with `nonfinite="zero"`
        (which costs one kernel a gradient); otherwise it reads one number on GPUs to learn whether
        the norm is finite. A fused optimizer leaves a bad update out by itself; with `"raise"` the
        error then comes with the next update.

    Args:
        max_norm: Positive bound on the norm; None bounds elements only.
        norm_type: 2, or `"inf"` for the largest element; 2 when unsaid.
        value: Positive bound on each element's magnitude, after the norm's.
        nonfinite: What to do when the norm is not finite: `"raise"` an error that names the
            parameters (when unsaid), `"skip"` the update, or take all gradients as `"zero"`.

    Raises:
        ValueError: A bound is not a positive number, none is given, or a choice is unknown.

    Example:
        >>> clip(1.0)
        clip(1.0)
        >>> clip(value=0.5, nonfinite="skip")
        clip(value=0.5, nonfinite='skip')
    """
    _positive("max_norm", max_norm)
    _positive("value", value)
    if max_norm is None and value is None:
        raise ValueError("clip was given no bound. Give max_norm, or value=, or both.")
    if norm_type is not None:
        norm_type = "inf" if norm_type in ("inf", math.inf) else norm_type
        one_of("clip", "norm_type", norm_type, (2, "inf"))
        norm_type = norm_type if norm_type == "inf" else 2
    if nonfinite is not None:
        one_of("clip", "nonfinite", nonfinite, ("raise", "skip", "zero"))
    bound = float(max_norm) if max_norm is not None else None
    size = float(value) if value is not None else None
    by = spell("clip", bound, norm_type=norm_type, value=size, nonfinite=nonfinite)
    fact = Clipping(max_norm=bound, norm_type=norm_type, value=size, nonfinite=nonfinite)  # pyright: ignore[reportArgumentType]
    return state(by, fact, rewrites=(CLIP,))


def _positive(name: str, bound: Any) -> None:
    number = isinstance(bound, int | float) and not isinstance(bound, bool)
    if bound is not None and not (number and 0 < bound < math.inf):
        raise ValueError(
            f"clip was given {name}={bound!r}. Give a positive number; to leave gradients as "
            "they are, leave clip out."
        )


def accumulate(
    microbatches: int, *, reduce: Reduce | None = None, batchnorm: str | None = None
) -> Transform:
    """Run each batch in several parts, one after the other, and update once: memory of one part.

    Exactly what the whole batch gives, means and pairs `(sum, count)` alike. Batches are cut along
    their first dim; when rows do not divide, parts differ by one. A window of batches that come one
    by one is given as `parallax.MicroBatches([...])`, of `microbatches` batches or fewer, the
    same number on every rank; `boosted.windows(loader)` makes them.

    States:
        Accumulation.

    Cost:
        Activations: 1 / n. Stages 0 and 1 reduce gradients once a step and hold whole gradients
        meanwhile, stage 1 whole parameters too; stages 2 and 3 reduce each part's, beside the next
        part's forward: n times the traffic for 1 / d of the gradients' memory.

    Args:
        microbatches: Number of parts n.
        reduce: `"step"` or `"microbatch"`, to overrule what the stage says.
        batchnorm: `"microbatch"` accepts that BatchNorm uses each part's statistics.

    Raises:
        ValueError: The number is not a positive whole one, or a choice is unknown.

    Example:
        >>> accumulate(4)
        accumulate(4)
    """
    good = isinstance(microbatches, int) and not isinstance(microbatches, bool)
    if not good or microbatches < 1:
        raise ValueError(
            f"accumulate was given {microbatches!r} micro-batches. Give a whole number, 1 or more."
        )
    if reduce is not None:
        one_of("accumulate", "reduce", reduce, ("step", "microbatch"))
    if batchnorm is not None:
        one_of("accumulate", "batchnorm", batchnorm, ("microbatch",))
    by = spell("accumulate", microbatches, reduce=reduce, batchnorm=batchnorm)
    fact = Accumulation(microbatches=microbatches, reduce=reduce, batchnorm=batchnorm)  # pyright: ignore[reportArgumentType]
    return state(by, fact, rewrites=(ACCUMULATE,))


def ema(decay: float, *, warmup: bool | None = None) -> Transform:
    """Keep an exponential moving average of the parameters, for evaluation and export.

    After each update that took place: average = decay x average + (1 - decay) x parameter, from the
    parameters before the first. `with boosted.averaged():` computes with it. It is saved and
    loaded like all state, under any composition.

    States:
        Averaging.

    Cost:
        4 bytes for each trained parameter, sharded as it is; one pass over them an update; no
        traffic.

    Args:
        decay: From 0 up to 1, without 1.
        warmup: Let the decay grow with the number of updates t: min(decay, (1 + t) / (10 + t)).

    Raises:
        ValueError: The decay is out of bounds.

    Example:
        >>> ema(0.999)
        ema(0.999)
    """
    number = isinstance(decay, int | float) and not isinstance(decay, bool)
    if not number or not 0 <= decay < 1:
        raise ValueError(
            f"ema was given decay={decay!r}. Give the share of the average that stays at each "
            "update, from 0 up to 1, such as 0.999."
        )
    if warmup is not None and not isinstance(warmup, bool):
        raise ValueError(f"ema was given warmup={warmup!r}. Choose one of True, False.")
    warm = True if warmup else None
    fact = Averaging(decay=float(decay), warmup=warm)
    return state(spell("ema", float(decay), warmup=warm), fact, rewrites=(AVERAGE,))
