"""FP8: linear layers of torchao in place of torch's, under the same names."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from parallax.core.patterns import matches
from parallax.core.plan import Plan
from parallax.core.rewrite import Draft, Room
from parallax.errors import ParallaxError, RuleError
from parallax.store.facts import Precision
from parallax.surgery.facts import Float8

DIVISOR = 16
"""What both sizes of a weight must divide by: the float8 kernels' rule."""


def check(draft: Draft, plan: Plan) -> Iterable[ParallaxError]:
    """What the model, the hardware and the other transforms do not allow."""
    said = plan[Float8]
    if said.recipe == "off":
        return
    by = plan.said_by(Float8, "recipe")
    if importlib.util.find_spec("torchao") is None:
        yield RuleError(f"{by} needs torchao, which is not installed.\n\npip install torchao")
    model = draft.parts[0]
    if plan[Precision].compute != "bf16":
        yield RuleError(
            f"{by} multiplies in float8 with bfloat16 elsewhere, and the composition computes in "
            f"{plan[Precision].compute or 'the dtype of the model'}.\n\nCompose it with bf16."
        )
    device = draft.mesh.device_type
    if not said.emulate:
        able = device == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
        if not able:
            here = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
            yield RuleError(
                f"{by} needs hardware that multiplies in float8 (NVIDIA from compute capability "
                f"8.9), and this rank runs on {here}.\n\nLeave it out, or try its rounding with "
                "emulate=True."
            )
    names = [name for name, _ in model.named_modules()]
    for pattern in said.keep or ():
        if not any(matches(pattern, name) for name in names):
            yield RuleError(
                f"keep={pattern!r} matches no module of {type(model).__name__}.\n\nName a layer or "
                "a pattern of names."
            )
    chosen, _ = _choose(model, said, plan)
    if not chosen:
        yield RuleError(
            f"{by} finds no layer to convert in {type(model).__name__}: an nn.Linear inside it "
            f"whose two sizes divide by {_divisor(plan)}"
            + (f" and are {said.least} or more" if said.least else "")
            + ".\n\nLeave it out, or choose sizes that divide."
        )


def build(draft: Draft, plan: Plan) -> tuple[Draft, Room]:
    """Carry out what the plan says; see `FP8`."""
    said = plan[Float8]
    (model,) = draft.parts
    if said.recipe == "off":
        return draft, Room(notes={"converted": [], "left": {}})
    chosen, left = _choose(model, said, plan)
    _convert(model, chosen, said)
    counts: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    for name in chosen:
        module: Any = model.get_submodule(name)
        # Read by STORE: a tied weight is needed by other modules too, as exactly as ever.
        module.gathers_fp8 = bool(said.gather) and counts[id(module.weight)] == 1
    return draft, Room(notes={"converted": list(chosen), "left": left})


def _divisor(plan: Plan) -> int:
    """What sizes must divide by, so that a tensor rank's part of either still does by 16."""
    return DIVISOR * plan.size("tp")


def _choose(
    model: nn.Module, said: Float8, plan: Plan
) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """The layers to convert, and why others are not, by name."""
    chosen: dict[str, nn.Linear] = {}
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        sizes = (module.in_features, module.out_features)
        if type(module) is not nn.Linear:
            left[name] = f"is a {type(module).__name__}, whose forward may be its own"
        elif not name:
            left["the model"] = "is one layer, with nothing around it to put another into"
        elif any(matches(pattern, name) for pattern in said.keep or ()):
            left[name] = "is kept"
        elif any(size % _divisor(plan) for size in sizes):
            left[name] = f"has sizes {sizes}, which do not divide by {_divisor(plan)}"
        elif min(sizes) < (said.least or 1):
            left[name] = f"has sizes {sizes}, below {said.least}"
        else:
            chosen[name] = module
    return chosen, left


def _convert(model: nn.Module, chosen: dict[str, nn.Linear], said: Float8) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(said.recipe or "tensorwise"),
        emulate=bool(said.emulate),
        round_scales_to_power_of_2=True,
        pad_inner_dim=True,  # for a number of tokens that does not divide; others cost nothing
    )
    convert_to_float8_training(
        model, module_filter_fn=lambda module, name: name in chosen, config=config
    )
    for name, old in chosen.items():
        new = model.get_submodule(name)
        new.training = old.training
        # torchao makes a new module; what users hung on the old one goes with it.
        for key, value in vars(old).items():
            if "hooks" in key:
                setattr(new, key, value)
