"""The optimizer, pointed at the parameters that exist now.

`fully_shard` and DTensor replace every Parameter, so an optimizer made earlier is left holding dead
tensors. Binding re-points it by original name, in place: groups, their settings, hooks and attached
schedulers stay, and state from earlier steps is cut up as its parameter was.

How it then steps is in `parallax.core.stepping`.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.core.names import Names
from parallax.core.phase import Phase
from parallax.core.plan import Plan
from parallax.core.probe import find_ways, optimizer_fault
from parallax.core.rewrite import Draft, Rewrite, Room
from parallax.core.slices import box, like, local
from parallax.core.stepping import Binding
from parallax.core.whole import stepped_whole
from parallax.errors import OptimizerError, ParallaxError


def group_names(optimizer: Optimizer, names: Names, model: nn.Module) -> list[list[str]]:
    """The parameters of each group by original name.

    Raises:
        OptimizerError: A parameter is not in the model, or stands in two groups.
    """
    known = {id(p): name for name, p in names.parameters_of(model).items()}
    groups: list[list[str]] = []
    place: dict[str, int] = {}
    for g, group in enumerate(optimizer.param_groups):
        row: list[str] = []
        for i, parameter in enumerate(group["params"]):
            name = known.get(id(parameter))
            if name is None:
                raise OptimizerError(
                    f"the optimizer {type(optimizer).__name__} holds a parameter that is not in "
                    f"the model {type(model).__name__}: group {g}, position {i}, shape "
                    f"{tuple(parameter.shape)}.\n\nMake the optimizer from this model's "
                    "parameters(), after the last change to the model and before boosting."
                )
            if name in place:
                raise OptimizerError(
                    f"the parameter {name} stands twice in the optimizer "
                    f"{type(optimizer).__name__}: in group {place[name]} and in group {g}.\n\n"
                    "List each parameter in one group."
                )
            place[name] = g
            row.append(name)
        groups.append(row)
    return groups


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer evaluates the loss itself, so that it cannot step without a closure."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _check(draft: Draft, plan: Plan) -> Iterable[ParallaxError]:
    assert draft.optimizer is not None, "BIND is only part of a plan with an optimizer"
    try:
        group_names(draft.optimizer, draft.names, draft.parts[0])
    except OptimizerError as fault:
        yield fault
    if any(Phase.SPLIT <= r.phase < Phase.BIND for r in plan.rewrites):
        yield from _held_aside(draft.optimizer)
    sharding = [axis for axis in ("data_shard", "tp") if plan.size(axis) > 1]
    if sharding:
        who = " and ".join(sorted({plan.who(axis) for axis in sharding}))
        fault = optimizer_fault(draft.optimizer, who)
        if fault is not None:
            yield fault


def _held_aside(optimizer: Optimizer) -> Iterable[OptimizerError]:
    """Find parameters that an optimizer keeps outside its groups, out of re-pointing's reach."""
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, value in vars(optimizer).items():
        if name in ("param_groups", "state"):
            continue
        rows = value.values() if isinstance(value, dict) else value
        rows = rows if isinstance(rows, list | tuple | set) or isinstance(value, dict) else (rows,)
        if any(id(row) in mine for row in rows):
            kind = type(optimizer).__name__
            yield OptimizerError(
                f"the optimizer {kind} keeps parameters of its own in the attribute {name}, and "
                "this composition replaces the model's parameters: its step would change the old "
                "ones.\n\nUse an optimizer that reads its parameters from param_groups, or train "
                "without dp, zero, tp and mixed_precision."
            )
            return


def snapshot_state(optimizer: Optimizer, names: dict[int, str]) -> dict[str, dict[str, Any]]:
    """An optimizer's state by parameter name, as it stands."""
    return {names[id(p)]: dict(entries) for p, entries in optimizer.state.items() if id(p) in names}


def rebind(
    optimizer: Optimizer,
    groups: list[list[str]],
    state: dict[str, dict[str, Any]],
    parameters: dict[str, nn.Parameter],
) -> None:
    """Point an optimizer at parameters by name, cutting its state up as they are cut.

    Names that this rank does not hold are dropped from the groups. State of parameters that are
    stepped whole stays whole; the binding drops it where another rank owns it.
    """
    uncut: set[str] = set()
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [parameters[name] for name in names if name in parameters]
    cut = any(stepped_whole(p) for p in parameters.values())
    for way, names in zip(find_ways(optimizer).ways if cut else (), groups, strict=cut):
        if way == "whole":
            uncut.update(n for n in names if n in parameters and stepped_whole(parameters[n]))
    fresh: defaultdict[nn.Parameter, Any] = defaultdict(dict)
    for name, entries in state.items():
        if name in parameters:
            parameter = parameters[name]
            fresh[parameter] = {
                key: _cut(value, parameter, whole=name in uncut) for key, value in entries.items()
            }
    optimizer.state = fresh  # pyright: ignore[reportAttributeAccessIssue]


@torch.no_grad()
def _cut(value: Any, parameter: nn.Parameter, *, whole: bool) -> Any:
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    part = local(parameter)
    if value.shape != parameter.shape:
        return value.to(part.device) if whole else value
    # Moments keep their own dtype: a model stored in bf16 has its masters, and so its state, in
    # fp32 from here on only if the state is converted with it.
    dtype = part.dtype if value.is_floating_point() else value.dtype
    if whole:
        return value.to(device=part.device, dtype=dtype, copy=True)
    mine = value[box(parameter).window].to(device=part.device, dtype=dtype, copy=True)
    return like(mine.contiguous(), parameter)


def _build(draft: Draft, plan: Plan) -> tuple[Draft, Room]:
    assert draft.optimizer is not None, "BIND is only part of a plan with an optimizer"
    binding = Binding(draft.optimizer, draft.names.parameters_of(*draft.parts), draft.mesh)
    return draft._replace(update=binding.step), Room(notes={"binding": binding, **binding.notes})


BIND = Rewrite("optimizer", Phase.BIND, _build, _check)
"""Points the optimizer at the parameters that exist now; part of every boost with an optimizer."""
