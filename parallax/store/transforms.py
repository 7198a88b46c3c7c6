"""Transforms that say where parameters live: dp, zero, mixed_precision."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from torch import nn

from parallax.core.axes import Axes, Fill
from parallax.core.fact import Fact
from parallax.core.late import Late
from parallax.core.phase import Phase
from parallax.core.rewrite import Rewrite
from parallax.core.spell import degree_fault, names_of, one_of, spell
from parallax.core.transform import Transform, state
from parallax.store.facts import Compression, Dtype, Precision, Scaling, Sharding, Stage

STORE = Rewrite(
    "store",
    Phase.STORE,
    Late("parallax.store.lower:build"),
    Late("parallax.store.precision:check"),
)
"""Shards, casts and places all parameters."""

SCALE = Rewrite("scale", Phase.SCALE, Late("parallax.store.scale:build"))
"""Scales the loss, and skips updates whose gradients are not finite."""

DTYPE_NAMES: tuple[str, ...] = get_args(Dtype)


def dp(degree: int | None = None) -> Transform:
    """Train copies of the model on different data and average their gradients.

    With `zero` this is hybrid sharding: `compose(dp(2), zero(3))` keeps two copies, each sharded
    over half of the ranks (HSDP).

    States:
        Axes.data_replicate, or that this axis takes the ranks that are left.

    Cost:
        Memory: parameters, gradients and optimizer state in full on every rank. Traffic a step:
        2 x bytes of gradients x (degree - 1) / degree a rank.

    Args:
        degree: Number of copies; None takes the factor of the world that no other transform takes.

    Example:
        >>> dp(2)
        dp(2)
    """
    degree_fault("dp", degree)
    axes = Axes(data_replicate=degree) if degree else Fill(data_replicate=True)
    return state(spell("dp", degree), axes, rewrites=(STORE,))


def zero(
    stage: Stage,
    *,
    degree: int | None = None,
    units: tuple[str | type[nn.Module], ...] | str | type[nn.Module] | None = None,
) -> Transform:
    """Shard the training state over data ranks (ZeRO, arXiv:1910.02054) with FSDP2.

    Stages 1 and 2 keep a unit's parameters gathered from its forward to its backward; stage 3 drops
    and gathers them again. Gradients are reduce-scattered as each unit's backward ends, in every
    stage; inside `no_sync` every stage holds whole gradients, and stage 1 whole parameters too.

    States:
        Sharding.stage, Sharding.units; Axes.data_shard, or that this axis takes the ranks left.

    Cost:
        With P parameters of which each rank's share is P / d: optimizer state, masters and reduced
        gradients take 1 / d; stages 1 and 2 hold compute copies of all P during a step, stage 3 of
        two units. Traffic a step and rank, in compute and reduce dtype: stages 1 and 2 one gather
        and one reduce-scatter, (d - 1) / d x P each; stage 3 one gather more.

    Args:
        stage: 1, 2 or 3.
        degree: Ranks to shard over; None takes the factor of the world that is left.
        units: Modules to gather as one, by class or name pattern (`"blocks.*"`); None finds the
            repeated blocks.

    Raises:
        ValueError: The stage is none of 1, 2, 3, or the degree is not a positive number.

    Example:
        >>> zero(2, units="blocks.*")
        zero(2, units=('blocks.*',))
    """
    one_of("zero", "stage", stage, (1, 2, 3))
    degree_fault("zero", degree)
    wanted = names_of("zero", "units", units)
    axes = Axes(data_shard=degree) if degree else Fill(data_shard=True)
    by = spell("zero", stage, degree=degree, units=wanted)
    return state(by, Sharding(stage=stage, units=wanted), axes, rewrites=(STORE,))


shard_zero = zero


def mixed_precision(
    compute: Dtype,
    *,
    reduce: Dtype | None = None,
    outputs: Dtype | None = None,
    keep: tuple[str, ...] | str | None = None,
    scale: float | None = None,
    growth: float | None = None,
    backoff: float | None = None,
    growth_interval: int | None = None,
    min_scale: float | None = None,
    max_scale: float | None = None,
) -> Transform:
    """Compute in a small dtype, with float32 master weights and optimizer state.

    Floating-point inputs of the model are cast; buffers keep their dtype; outputs come back in
    float32, so that the loss is computed there.

    `"fp16"` scales the loss (arXiv:1710.03740), since float16 ends at 6e-8: an update whose
    gradients are not finite on any rank is skipped on all, and the scale is lowered; it grows again
    after `growth_interval` good updates. Gradients are brought to their true size before they are
    read, clipped or used. Not finite at the smallest scale is an error that names the parameters.

    States:
        Precision; for fp16 also Scaling.

    Cost:
        2 bytes a parameter for the compute copy beside 4 for the master; halves activations and
        gather traffic. fp16: also two passes over the gradients, one all-reduce of one number, and
        one wait of the host for it a step (bf16 has none of these).

    Args:
        compute: `"bf16"`; `"fp16"`; `"fp32"` to compute in full precision whatever the model is
            stored in; `"fp64"` to check numbers (masters are then float64 too).
        reduce: Dtype of the gradient sum over ranks; float32 when unsaid.
        outputs: Dtype of the model's floating-point outputs; float32 when unsaid.
        keep: Modules to keep in float32: `"norms"`, class names or name patterns.
        scale: First loss scale, a power of two; 65536 when unsaid.
        growth: Factor of growth, a power of two; 2 when unsaid.
        backoff: Factor after a skipped update, a power of two; 1/2 when unsaid.
        growth_interval: Good updates before the scale grows; 2000 when unsaid.
        min_scale: Smallest scale, a power of two; 1 when unsaid.
        max_scale: Largest scale, a power of two; 2^24 when unsaid.

    Raises:
        ValueError: A dtype is unknown; a scale is no power of two, out of order, or given for a
            dtype that needs none.

    Example:
        >>> mixed_precision("bf16") == bf16
        True
        >>> mixed_precision("bf16", reduce="bf16", keep="norms")
        mixed_precision('bf16', reduce='bf16', keep=('norms',))
        >>> mixed_precision("fp16", scale=1024)
        mixed_precision('fp16', scale=1024.0)
    """
    one_of("mixed_precision", "compute", compute, DTYPE_NAMES)
    for name, value in (("reduce", reduce), ("outputs", outputs)):
        if value is not None:
            one_of("mixed_precision", name, value, DTYPE_NAMES)
    kept = names_of("mixed_precision", "keep", keep)
    powers = {
        "scale": scale,
        "growth": growth,
        "backoff": backoff,
        "min_scale": min_scale,
        "max_scale": max_scale,
    }
    _scales(compute, powers, growth_interval)
    floats = {name: float(value) if value is not None else None for name, value in powers.items()}
    options: dict[str, Any] = {"reduce": reduce, "outputs": outputs, "keep": kept}
    options |= {**floats, "growth_interval": growth_interval}
    plain = all(value is None for value in options.values())
    short = plain and compute in ("bf16", "fp16", "fp32")
    by = compute if short else spell("mixed_precision", compute, **options)
    facts: list[Fact] = [Precision(compute=compute, reduce=reduce, outputs=outputs, keep=kept)]
    if compute == "fp16":
        facts.append(
            Scaling(
                start=floats["scale"] or 2.0**16,
                growth=floats["growth"],
                backoff=floats["backoff"],
                interval=growth_interval,
                least=floats["min_scale"],
                most=floats["max_scale"],
            )
        )
        return state(by, *facts, rewrites=(STORE, SCALE))
    return state(by, *facts, rewrites=(STORE,))


def _scales(compute: str, powers: dict[str, float | None], interval: int | None) -> None:
    given = {k: v for k, v in (*powers.items(), ("growth_interval", interval)) if v is not None}
    if given and compute != "fp16":
        raise ValueError(
            f"mixed_precision({compute!r}) was given {next(iter(given))}, and only fp16 scales the "
            f"loss: {compute} holds small gradients as they are. Leave it out, or use fp16."
        )
    for name, value in powers.items():
        if value is not None and not _power_of_two(value):
            raise ValueError(
                f"mixed_precision was given {name}={value!r}. Give a power of two, so that scaling "
                "rounds nothing: 1024, 0.5, ..."
            )
    least, start, most = (
        powers["min_scale"] or 1.0,
        powers["scale"] or 2.0**16,
        powers["max_scale"] or 2.0**24,
    )
    if not least <= start <= most:
        raise ValueError(
            f"mixed_precision was given the loss scale {start:g}, from {least:g} to {most:g}. Give "
            "min_scale <= scale <= max_scale."
        )
    if (powers["growth"] or 2) <= 1 or (powers["backoff"] or 0.5) >= 1:
        raise ValueError(
            f"mixed_precision was given {_told(powers, 'growth', 'backoff')}. Give a growth "
            "above 1 "
            "and a backoff below 1."
        )
    if interval is not None and (
        not isinstance(interval, int) or isinstance(interval, bool) or interval < 1
    ):
        raise ValueError(
            f"mixed_precision was given growth_interval={interval!r}. Give a whole number of "
            "updates, 1 or more."
        )


def _told(values: dict[str, float | None], *names: str) -> str:
    return " and ".join(f"{n}={values[n]:g}" for n in names if values[n] is not None)


def _power_of_two(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < math.inf and math.frexp(value)[0] == 0.5


def compress(gradients: Literal["fp8", "bf16", "full"]) -> Transform:
    """Send gradients over the data axes in few bytes: rounded once, then summed as ever.

    With mean gradient g of the ranks' g_r, and A the largest magnitude among the 256 elements that
    share a scale, each element is off by at most the mean over ranks of |g_r| / 256 for `"bf16"`,
    and of max(|g_r| / 16, A x 2^-10 / 448) for `"fp8"` (e4m3, arXiv:2209.05433). Over copies (`dp`)
    the mean is rounded once more, the same on every rank.

    States:
        Compression.gradients.

    Cost:
        Bytes of gradient traffic beside float32: bf16 a half, fp8 0.254. Two passes over what is
        sent and received; memory for both, in the small dtype, of one unit.

    Args:
        gradients: `"fp8"`; `"bf16"`; `"full"` takes the same way without rounding, to check it.

    Raises:
        ValueError: The dtype is unknown.

    Example:
        >>> compress("fp8")
        compress('fp8')
    """
    one_of("compress", "gradients", gradients, ("fp8", "bf16", "full"))
    fact = Compression(gradients=gradients)
    return state(spell("compress", gradients), fact, rewrites=(STORE,))


bf16: Transform = mixed_precision("bf16")
"""bfloat16 compute with float32 master weights: `mixed_precision("bf16")`."""

fp16: Transform = mixed_precision("fp16")
"""float16 compute with float32 master weights and a loss scale: `mixed_precision("fp16")`."""

fp32: Transform = mixed_precision("fp32")
"""float32 compute, whatever dtype the model was stored in: `mixed_precision("fp32")`."""
