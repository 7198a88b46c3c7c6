"""COMPILE: compiles each unit's forward, inside every hook on the unit."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from parallax.blocks.facts import Compilation, Recomputation
from parallax.blocks.found import found, nested
from parallax.blocks.lower import Unit, allow_graphs, recomputed_keeping
from parallax.blocks.transforms import REMAT
from parallax.core.plan import Plan
from parallax.core.rewrite import Draft, Room
from parallax.errors import ParallaxError, RuleError

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
        odd = next(iter(set(units) ^ set(other)))
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
    twins = _Twins()
    for module in modules.values():
        _compile(module, options, twins)
    return draft, Room(notes={"units": list(modules), **options})


def _compile(module: nn.Module, options: dict[str, Any], twins: _Twins) -> None:
    # The forward and not the module: module.compile() takes in the module's hooks, of which
    # fully_shard's cannot be traced, and the code of all classes' calls then shares one cache.
    unit = module.forward
    if not isinstance(unit, Unit):
        module.forward = torch.compile(twins.of(unit), **options)
        return
    if unit.keep:
        # In a graph that broke nothing could be kept, and dynamo would run it uncompiled unasked.
        whole = torch.compile(twins.of(recomputed_keeping), **options | {"fullgraph": True})
        unit.kept = functools.partial(whole, unit.forward)
    unit.forward = torch.compile(twins.of(unit.forward), **options)


class _Twins(dict[Any, Any]):
    """Functions by what they are copies of, each with code of its own.

    Compiled forms are kept with the code they were made from, up to a limit, and are shared by all
    that run it. Equal units of one model shall share them; units of another model, or of another
    class with the same decorator around its forward, shall not use up the limit.
    """

    def __missing__(self, function: types.FunctionType) -> types.FunctionType:
        twin = types.FunctionType(
            function.__code__.replace(),
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        twin.__kwdefaults__ = function.__kwdefaults__
        self[function] = functools.update_wrapper(twin, function)
        del twin.__wrapped__  # it is no wrapper: nobody shall unwrap it
        return twin

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The copy of a function, or of a method's function; of other callables themselves."""
        if isinstance(function, types.MethodType):
            inner = function.__func__
            own = isinstance(inner, types.FunctionType)
            return types.MethodType(self[inner], function.__self__) if own else function
        return self[function] if isinstance(function, types.FunctionType) else function
