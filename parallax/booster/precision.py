"""Precision as plugins and Booster are told it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from parallax.core.fact import join
from parallax.core.transform import Transform, compose
from parallax.errors import ConflictError, ParallaxError
from parallax.store import mixed_precision
from parallax.store.facts import Dtype, Precision

NAMES = ("bf16", "fp16", "fp32")
SCALES = {
    "initial_scale": "scale",
    "min_scale": "min_scale",
    "max_scale": "max_scale",
    "growth_factor": "growth",
    "backoff_factor": "backoff",
    "growth_interval": "growth_interval",
}
"""Knobs of the loss scale, with their names in `parallax.mixed_precision`."""

DTYPES: dict[object, Dtype] = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def with_precision(plugin: Transform, name: str | None) -> Transform:
    """A plugin with the precision that Booster was given beside it.

    Raises:
        ConflictError: The plugin computes in another one.
        ParallaxError: It is none of those that are known.
    """
    if name is None:
        return plugin
    if name not in NAMES:
        raise ParallaxError(
            f"Booster was given mixed_precision={name!r}, and it knows bf16, fp16 and fp32.\n\nFor "
            "float8 products compose the transform: Booster(mixed_precision='bf16', "
            "plugin=compose(..., fp8()))."
        )
    said = join(plugin.claims).get(Precision)
    compute = said.compute if isinstance(said, Precision) else None
    if compute not in (None, name):
        raise ConflictError(
            f"Booster was given mixed_precision={name!r} and a plugin that computes in {compute}: "
            f"{plugin!r}.\n\nSay the precision once."
        )
    return compose(plugin, mixed_precision(name))


def precision_of(
    who: str, precision: str, knobs: Mapping[str, Any], *, reduce: Dtype | None = None
) -> tuple[Transform, dict[str, Any], list[ParallaxError]]:
    """The precision of a plugin, with its loss scale where there is one.

    Args:
        who: The plugin, for messages.
        precision: "bf16", "fp16" or "fp32".
        knobs: The plugin's other knobs.
        reduce: Dtype of the gradient sum.

    Returns:
        The transform, the knobs that are left to look at, and what is wrong.
    """
    if precision not in NAMES:
        fault = ParallaxError(
            f"{who} was given precision={precision!r}.\n\nSay precision='bf16', 'fp16' or 'fp32'."
        )
        return compose(), dict(knobs), [fault]
    rest, options = dict(knobs), {}
    if precision == "fp16":
        options = {SCALES[name]: rest.pop(name) for name in knobs if name in SCALES}
    try:
        return mixed_precision(cast(Dtype, precision), reduce=reduce, **options), rest, []
    except ValueError as error:
        return compose(), rest, [ParallaxError(f"{who}: {error}")]


def reduction_faults(who: str, dtype: torch.dtype | None) -> list[ParallaxError]:
    """Why a plugin does not sum gradients in a dtype."""
    if dtype is None or dtype in DTYPES:
        return []
    return [
        ParallaxError(
            f"{who} was given communication_dtype={dtype!r}, and gradients are summed in float32 "
            "or bfloat16.\n\nUse torch.float32 (what None means) or torch.bfloat16."
        )
    ]


def policy_faults(who: str, policy: Any) -> list[ParallaxError]:
    """What of torch's `MixedPrecision` a plugin does not do."""
    faults: list[ParallaxError] = []
    for name in ("param_dtype", "reduce_dtype"):
        dtype = getattr(policy, name)
        if dtype is not None and dtype not in DTYPES:
            faults.append(
                ParallaxError(
                    f"{who} was given a mixed_precision with {name}={dtype!r}, and it takes "
                    "float32 and bfloat16.\n\nUse torch.bfloat16; for float16, which needs a loss "
                    f"scale, Booster(mixed_precision='fp16', plugin={who}())."
                )
            )
    if policy.buffer_dtype is not None:
        faults.append(
            ParallaxError(
                f"{who} was given a mixed_precision with buffer_dtype={policy.buffer_dtype!r}, and "
                "buffers keep their dtype.\n\nLeave buffer_dtype out, or convert the buffers in "
                "the model."
            )
        )
    for name, only in (("keep_low_precision_grads", False), ("cast_root_forward_inputs", True)):
        value = getattr(policy, name, only)
        if value is not only:
            faults.append(
                ParallaxError(
                    f"{who} was given a mixed_precision with {name}={value!r}, and inputs are "
                    "always cast and gradients always kept in their parameter's dtype.\n\n"
                    f"Leave {name} out."
                )
            )
    return faults
