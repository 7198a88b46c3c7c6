"""Named compositions: whole ways of training, written with the transforms and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from parallax.core.transform import Transform, compose
from parallax.step import clip
from parallax.store import dp, mixed_precision, zero
from parallax.store.facts import Dtype
from parallax.tensor import tp


def ddp(*, compute: Dtype | None = None, max_norm: float = 0.0) -> Transform:
    """Copies of the model on different data: `hybrid(stage=0)`.

    Args:
        compute: Dtype of forward and backward; None computes in what the model is stored in.
        max_norm: Bound on the global gradient norm; 0 leaves gradients as they are.

    Example:
        >>> ddp()
        dp()
    """
    return hybrid(stage=0, compute=compute, max_norm=max_norm)


def fsdp(*, compute: Dtype | None = "bf16", max_norm: float = 0.0) -> Transform:
    """Parameters, gradients and optimizer state sharded over all ranks: `hybrid(stage=3)`.

    Args:
        compute: Dtype of forward and backward; None computes in what the model is stored in.
        max_norm: Bound on the global gradient norm; 0 leaves gradients as they are.

    Example:
        >>> fsdp(max_norm=1.0)
        compose(bf16, clip(1.0), zero(3))
    """
    return hybrid(stage=3, compute=compute, max_norm=max_norm)


def hybrid(
    *,
    stage: Literal[0, 1, 2, 3],
    replicas: int = 1,
    tensor: int = 1,
    rules: Mapping[str, str] | None = None,
    compute: Dtype | None = None,
    reduce: Dtype | None = None,
    max_norm: float = 0.0,
) -> Transform:
    """Data parallelism with or without sharding, beside tensor parallelism.

    Args:
        stage: What the data ranks shard: nothing (0), optimizer state (1), gradients too (2),
            parameters too (3).
        replicas: Copies of each shard; the data ranks are cut into so many groups. Stage 0 shards
            nothing, so there every data rank is a copy already and the number is not needed.
        tensor: Ranks that share one batch and cut the layers.
        rules: Style by name pattern for these; None takes the model's own `tp_plan`.
        compute: Dtype of forward and backward, with float32 masters; None computes in what the
            model is stored in.
        reduce: Dtype of the gradient sum; float32 when unsaid.
        max_norm: Bound on the global gradient norm; 0 leaves gradients as they are.

    Raises:
        ValueError: A number is out of its range, or `reduce` is given without `compute`.

    Example:
        >>> hybrid(stage=2, tensor=2, compute="bf16")
        compose(bf16, tp(2), zero(2))
        >>> hybrid(stage=3, replicas=2)
        compose(dp(2), zero(3))
    """
    if reduce is not None and compute is None:
        raise ValueError(
            f"hybrid was given reduce={reduce!r} without compute. Say both: compute='fp32' keeps "
            "full precision and reduces in another dtype."
        )
    parts = [dp() if stage == 0 else zero(stage)]
    if stage and replicas != 1:
        parts.append(dp(replicas))
    if tensor != 1:
        parts.append(tp(tensor, rules=rules))
    if compute is not None:
        parts.append(mixed_precision(compute, reduce=reduce))
    if max_norm:
        parts.append(clip(max_norm))
    return compose(*parts)
