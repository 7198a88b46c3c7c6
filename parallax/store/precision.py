"""Which dtype each module's parameters are kept and computed in."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from parallax.core.plan import Plan
from parallax.core.rewrite import Draft
from parallax.core.units import kept_of, shares_outside, units_of
from parallax.errors import ParallaxError, RuleError
from parallax.store.facts import Precision, Sharding

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def check(draft: Draft, plan: Plan) -> Iterable[ParallaxError]:
    """What in the model does not fit the plan."""
    model = draft.parts[0]
    try:
        units_of(model, plan[Sharding].units)
    except RuleError as fault:
        yield fault
    for pattern in plan[Precision].keep or ():
        # "norms" is a kind, of which a model may have none; a name that matches nothing is a
        # mistake.
        found = kept_of(model, (pattern,))
        for name, module in found.items():
            if shares_outside(model, module):
                yield RuleError(
                    f"keep={pattern!r} names {name}, which shares a parameter with another module "
                    f"of {type(model).__name__}: one parameter has one dtype.\n\nKeep neither or "
                    "untie them."
                )
        if pattern != "norms" and not found:
            yield RuleError(
                f"keep={pattern!r} matches no module with parameters of {type(model).__name__}.\n\n"
                "Name 'norms', a class or a pattern of module names."
            )
    if plan[Precision].compute is None:
        yield from _mixed(model)


def _mixed(model: nn.Module) -> Iterable[ParallaxError]:
    kinds: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kinds.setdefault(parameter.dtype, name)
    if len(kinds) > 1:
        shown = ", ".join(f"{name} in {str(dtype)[6:]}" for dtype, name in kinds.items())
        yield RuleError(
            f"the trainable parameters of {type(model).__name__} have several dtypes ({shown}), "
            "and one reduction sums one dtype.\n\nAdd bf16 or fp32, which keep float32 masters of "
            "all, or convert the model to one dtype."
        )


def policy_of(precision: Precision, *, root: bool) -> MixedPrecisionPolicy:
    """What `fully_shard` is told; the root alone says the dtype of outputs."""
    if precision.compute is None:
        return MixedPrecisionPolicy()
    least = "fp64" if precision.compute == "fp64" else "fp32"
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[precision.compute],
        reduce_dtype=DTYPES[precision.reduce or least],
        output_dtype=DTYPES[precision.outputs or least] if root else None,
    )


def to_masters(model: nn.Module, dtype: torch.dtype) -> None:
    """Store trainable parameters in `dtype`. Frozen ones keep theirs: they are never updated."""
    masters: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            trained = parameter.requires_grad and parameter.is_floating_point()
            if not trained or parameter.dtype == dtype:
                continue
            # A new parameter, since a DTensor's dtype is also in its spec, which .data leaves
            # behind; the same one under each name of a tie.
            if parameter not in masters:
                masters[parameter] = nn.Parameter(parameter.detach().to(dtype))
            setattr(module, name, masters[parameter])
