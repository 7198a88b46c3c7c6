"""COMPILE: compiles each unit's forward, inside every hook on the unit."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import optree
import torch
from torch import nn

from parallax.blocks.facts import Compilation, Recomputation
from parallax.blocks.found import found, nested
from parallax.blocks.lower import Unit, allow_graphs, arrived, recomputed_keeping
from parallax.blocks.transforms import REMAT
from parallax.core.axes import Axes
from parallax.core.plan import Plan
from parallax.core.rewrite import Draft, Room
from parallax.core.units import kept_of, units_of
from parallax.errors import ParallaxError, RuleError
from parallax.store.facts import Precision, Sharding

GRAPHS_A_UNIT = 4
"""Training and evaluation, each for fixed sizes and for sizes as symbols."""


def check(draft: Draft, plan: Plan) -> Iterable[ParallaxError]:
    """What in the model or in the joined facts does not fit."""
    (model,) = draft.parts
    try:
        units = found(model, plan[Compilation].units)
    except RuleError as fault:
        yield fault
        return
    other = units
    with suppress(RuleError):  # of remat's wish, which its own check tells of
        other = found(model, plan[Recomputation].units) if REMAT in plan.rewrites else units
    if other and set(units) != set(other):
        odd = next(n for n in (*units, *other) if n not in units or n not in other)
        one, two = ("compile", "remat") if odd in units else ("remat", "compile")
        yield RuleError(
            f"compile and remat have different units: {odd} is one of {one}'s and none of "
            f"{two}'s.\n\nGive both the same units=, or none."
        )
    if pair := nested(units):
        yield RuleError(
            f"compile was given units of {type(model).__name__} that lie in one another: "
            f"{pair[1]} in {pair[0]}.\n\nName the outer ones, or the inner ones."
        )

    if not units and "tp" in plan[Axes].said():
        yield from _traced_at_once(model, plan)


def _traced_at_once(model: nn.Module, plan: Plan) -> Iterable[ParallaxError]:
    """A whole model in one graph, broken by shards inside, loses torch's guards on DTensors."""
    finer: set[str] = set()
    with suppress(RuleError):  # STORE's own check tells of it
        finer = set(units_of(model, plan[Sharding].units)) if plan[Sharding].said() else finer
    inside = sorted((finer | set(kept_of(model, plan[Precision].keep or ()))) - {""})
    if inside:
        more = f" and {len(inside) - 1} more" if len(inside) > 1 else ""
        yield RuleError(
            f"compile found no repeated blocks in {type(model).__name__} and would compile it as "
            f"one, where {inside[0]}{more} are sharded by themselves under "
            f"{plan.said_by(Axes, 'tp')}: torch cannot trace that.\n\nName its parts: "
            "compile(units='Class') or compile(units='pattern.*')."
        )


def build(draft: Draft, plan: Plan) -> tuple[Draft, Room]:
    """Carry out what the plan says; see `COMPILE`."""
    (model,) = draft.parts
    fact = plan[Compilation]
    modules = found(model, fact.units) or {"": model}
    allow_graphs(GRAPHS_A_UNIT * (1 + len(modules)))
    options: dict[str, Any] = {
        "backend": fact.backend or "inductor",
        "mode": fact.mode,
        "fullgraph": bool(fact.fullgraph),
        "dynamic": fact.dynamic,
    }
    forms = _Forms(options)
    for module in modules.values():
        _compile(module, forms)
    return draft, Room(notes={"units": list(modules), **options})


def _compile(module: nn.Module, forms: _Forms) -> None:
    # The forward and not the module: module.compile() takes in the module's hooks, of which
    # fully_shard's cannot be traced, and the code of all classes' calls then shares one cache.
    unit = module.forward
    if not isinstance(unit, Unit):
        module.forward = forms.of(unit)
        return
    if unit.keep:
        # In a graph that broke nothing could be kept, and dynamo would run it uncompiled unasked.
        whole = forms.function(recomputed_keeping, fullgraph=True)
        unit.kept = Compiled(unit.forward, unit.forward, whole)
    unit.forward = forms.of(unit.forward)


class Compiled:
    """A compiled function with its first argument. Copied with the module, it runs the copy.

    Args:
        forward: What it stands for.
        first: The first argument: the module.
        function: The function, compiled.
    """

    def __init__(self, forward: Any, first: Any, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self._first = first
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        call: Any = (args, kwargs)
        there: Any = optree.tree_map(arrived, call, none_is_leaf=True)
        return self._function(self._first, *there[0], **there[1])


class _Forms:
    """Compiled functions of one model, one for each function that its units' forwards are.

    Compiled code is kept with the code it was made from, up to a limit, and is shared by all that
    run it. So equal units share it; and since each function is given code of its own here, units of
    another model, or of another class with the same decorator, do not use up the limit.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._made: dict[Any, Callable[..., Any]] = {}

    def function(self, function: types.FunctionType, **more: Any) -> Callable[..., Any]:
        """A function, compiled."""
        if function not in self._made:
            options = self._options | more
            self._made[function] = torch.compile(_twin(function), **options)
        return self._made[function]

    def of(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward, compiled."""
        inner = getattr(forward, "__func__", None)
        if isinstance(forward, types.MethodType) and isinstance(inner, types.FunctionType):
            return Compiled(forward, forward.__self__, self.function(inner))
        return torch.compile(forward, **self._options)


def _twin(function: types.FunctionType) -> types.FunctionType:
    """The same function with code of its own."""
    twin = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__qualname__, twin.__module__ = function.__qualname__, function.__module__
    return twin
