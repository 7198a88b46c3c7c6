"""Transforms that say where parameters live: dp, zero, mixed_precision."""

from __future__ import annotations

from typing import get_args

from torch import nn

from parallax.core.axes import Axes, Fill
from parallax.core.late import Late
from parallax.core.phase import Phase
from parallax.core.rewrite import Rewrite
from parallax.core.spell import degree_fault, one_of, spell
from parallax.core.transform import Transform, state
from parallax.store.facts import Dtype, Precision, Sharding, Stage

STORE = Rewrite(
    "store",
    Phase.STORE,
    Late("parallax.store.lower:build"),
    Late("parallax.store.lower:check"),
)
"""Shards, casts and places all parameters."""

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
    wanted = _units(units)
    axes = Axes(data_shard=degree) if degree else Fill(data_shard=True)
    by = spell("zero", stage, degree=degree, units=wanted)
    return state(by, Sharding(stage=stage, units=wanted), axes, rewrites=(STORE,))


shard_zero = zero


def _units(given: object) -> tuple[str, ...] | None:
    if given is None:
        return None
    rows = given if isinstance(given, tuple | list) else (given,)
    return tuple(
        row if isinstance(row, str) else getattr(row, "__name__", str(row)) for row in rows
    )


def mixed_precision(
    compute: Dtype,
    *,
    reduce: Dtype | None = None,
    outputs: Dtype | None = None,
    keep: tuple[str, ...] | str | None = None,
) -> Transform:
    """Compute in a small dtype, with float32 master weights and optimizer state.

    Floating-point inputs of the model are cast; buffers keep their dtype; outputs come back in
    float32, so that the loss is computed there.

    States:
        Precision.

    Cost:
        bf16: 2 bytes a parameter for the compute copy beside 4 for the master; halves activations
        and gather traffic.

    Args:
        compute: `"bf16"`; `"fp32"` to compute in full precision whatever the model is stored in;
            `"fp64"` to check numbers (masters are then float64 too).
        reduce: Dtype of the gradient sum over ranks; float32 when unsaid.
        outputs: Dtype of the model's floating-point outputs; float32 when unsaid.
        keep: Modules to keep in float32: `"norms"`, class names or name patterns.

    Example:
        >>> mixed_precision("bf16") == bf16
        True
        >>> mixed_precision("bf16", reduce="bf16", keep="norms")
        mixed_precision('bf16', reduce='bf16', keep=('norms',))
    """
    one_of("mixed_precision", "compute", compute, DTYPE_NAMES)
    for name, value in (("reduce", reduce), ("outputs", outputs)):
        if value is not None:
            one_of("mixed_precision", name, value, DTYPE_NAMES)
    kept = (keep,) if isinstance(keep, str) else (tuple(keep) if keep else None)
    plain = reduce is None and outputs is None and kept is None
    short = plain and compute in ("bf16", "fp32")
    by = (
        compute
        if short
        else spell("mixed_precision", compute, reduce=reduce, outputs=outputs, keep=kept)
    )
    fact = Precision(compute=compute, reduce=reduce, outputs=outputs, keep=kept)
    return state(by, fact, rewrites=(STORE,))


bf16: Transform = mixed_precision("bf16")
"""bfloat16 compute with float32 master weights: `mixed_precision("bf16")`."""

fp32: Transform = mixed_precision("fp32")
"""float32 compute, whatever dtype the model was stored in: `mixed_precision("fp32")`."""
