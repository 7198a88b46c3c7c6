"""Precision as plugins and Booster are told it, and what of it is not there yet."""

from __future__ import annotations

from typing import Any

import torch

from parallax.core.fact import join
from parallax.core.transform import Transform, compose
from parallax.errors import ConflictError, ParallaxError
from parallax.store import mixed_precision
from parallax.store.facts import Dtype, Precision

DTYPES: dict[object, Dtype] = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def with_precision(plugin: Transform, name: str | None) -> Transform:
    """A plugin with the precision that Booster was given beside it.

    Raises:
        ConflictError: The plugin computes in another one.
        ParallaxError: It is not there yet.
    """
    if name is None:
        return plugin
    if name not in ("bf16", "fp32"):
        raise ParallaxError(
            f"Booster was given mixed_precision={name!r}, and bf16 is the only mixed precision "
            "that is there yet.\n\nUse mixed_precision='bf16' (float32 masters, no loss scale), or "
            "'fp32'."
        )
    said = join(plugin.claims).get(Precision)
    compute = said.compute if isinstance(said, Precision) else None
    if compute not in (None, name):
        raise ConflictError(
            f"Booster was given mixed_precision={name!r} and a plugin that computes in {compute}: "
            f"{plugin!r}.\n\nSay the precision once."
        )
    return compose(plugin, mixed_precision(name))


def precision_faults(who: str, precision: str) -> list[ParallaxError]:
    """Why a plugin does not compute in a precision."""
    if precision == "fp16":
        return [
            ParallaxError(
                f"{who} computes in fp16 unless told otherwise, and fp16 with its loss scale is "
                "not there yet.\n\nSay precision='bf16' (float32 masters, no loss scale) or "
                "precision='fp32'."
            )
        ]
    if precision not in ("bf16", "fp32"):
        return [
            ParallaxError(
                f"{who} was given precision={precision!r}.\n\nSay precision='bf16' or "
                "precision='fp32'."
            )
        ]
    return []


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
                    f"{who} was given a mixed_precision with {name}={dtype!r}, and computing and "
                    "reducing in float32 and bfloat16 is all that is there yet.\n\nUse "
                    "torch.bfloat16."
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
