"""REMAT: has units compute their activations again in the backward."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn

from parallax.blocks.facts import Recomputation
from parallax.blocks.found import found, nested, shards_inside
from parallax.blocks.lower import Unit
from parallax.blocks.offload import Shelf
from parallax.blocks.transforms import clash
from parallax.blocks.trial import Trial
from parallax.blocks.which import fit, need, spread
from parallax.core.amount import shown
from parallax.core.mesh import device_of
from parallax.core.plan import Plan
from parallax.core.rewrite import Draft, Room
from parallax.core.units import units_of
from parallax.errors import ParallaxError, RuleError, StepError
from parallax.store.facts import Precision, Sharding


def check(draft: Draft, plan: Plan) -> Iterable[ParallaxError]:
    """What in the model or in the joined facts does not fit."""
    (model,) = draft.parts
    fact = plan[Recomputation]
    if fault := clash(fact.which, fact.keep, fact.offload):
        yield RuleError(f"the composition states {fault}")
    own = _own_checkpointing(model)
    if own:
        yield RuleError(
            f"{own} of {type(model).__name__} has gradient checkpointing of its own switched on, "
            "and remat would compute it twice again.\n\nCall "
            "model.gradient_checkpointing_disable(), or leave remat out."
        )
    try:
        units = found(model, fact.units)
    except RuleError as fault:
        yield fault
        return
    if not units:
        yield RuleError(
            f"remat found no repeated blocks in {type(model).__name__}, and recomputing a whole "
            "model at once saves no memory.\n\nName its parts: remat(units='Class') or "
            "remat(units='pattern.*')."
        )
    if pair := nested(units):
        yield RuleError(
            f"remat was given units of {type(model).__name__} that lie in one another: {pair[1]} "
            f"in {pair[0]}.\n\nName the outer ones, or the inner ones."
        )
    if fact.keep is not None:
        yield from _sharded_inside(model, units, plan)


def _sharded_inside(
    model: nn.Module, units: dict[str, nn.Module], plan: Plan
) -> Iterable[ParallaxError]:
    """Keeping results counts operations, and gathering a module inside a unit adds some."""
    finer: set[str] = set()
    with suppress(RuleError):  # STORE's own check tells of it
        finer = set(units_of(model, plan[Sharding].units)) if plan[Sharding].said() else finer
    if inside := shards_inside(units, model, plan[Precision].keep or (), finer):
        more = f" and {len(inside) - 1} more" if len(inside) > 1 else ""
        yield RuleError(
            f"remat(keep={plan[Recomputation].keep!r}) keeps results inside units, where "
            f"{inside[0]}{more} would be gathered by themselves.\n\nLeave keep out of remat, or "
            "shard and keep in float32 nothing smaller than its units."
        )


def _own_checkpointing(model: nn.Module) -> str:
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            return name or "the root"
    return ""


def build(draft: Draft, plan: Plan) -> tuple[Draft, Room]:
    """Carry out what the plan says; see `REMAT`."""
    (model,) = draft.parts
    fact = plan[Recomputation]
    modules = found(model, fact.units)
    kind, number = fact.which or ("fraction", 1.0)
    chosen = set(range(len(modules)))
    if kind == "fraction":
        chosen = set(spread(len(modules), number))
    elif kind == "every":
        chosen = set(range(0, len(modules), int(number)))
    shelf = Shelf(device_of(draft.mesh)) if fact.offload else None
    units = [
        Unit(name, module, recompute=i in chosen, keep=fact.keep is not None, shelf=shelf)
        for i, (name, module) in enumerate(modules.items())
    ]
    for unit in units:
        unit.module.forward = unit
    room = Room(notes={"units": list(modules), "recomputed": _recomputed(units), "shelf": shelf})
    if kind != "budget":
        return draft, room
    budget = Budget(int(number), units, room, plan.said_by(Recomputation, "which"), draft)
    return draft._replace(settle=budget.settle), room


def _recomputed(units: list[Unit]) -> list[str]:
    return [unit.name for unit in units if unit.recompute]


class Budget:
    """Recomputes all units in the first step, measures them, then spares as many as fit.

    Args:
        budget: Bytes that the units of one rank may keep.
        units: All units, in the order of the model.
        room: Where the figures are shown.
        by: Who gave the budget, for messages.
        draft: The pair so far.
    """

    def __init__(self, budget: int, units: list[Unit], room: Room, by: str, draft: Draft) -> None:
        self._budget = budget
        self._units = units
        self._room = room
        self._by = by
        self._device = device_of(draft.mesh)
        self._before = draft.settle
        self._trial = Trial(offloaded=bool(room.notes["shelf"]))
        self._open = True
        for unit in units:
            unit.trial = self._trial

    def settle(self) -> None:
        """Before an update: decide, once, on every rank alike."""
        self._before()
        if self._open:
            self._decide()

    def _decide(self) -> None:
        trial = self._trial
        rows = [[of.get(u.name, 0) for u in self._units] for of in (trial.held, trial.inputs)]
        sizes = torch.tensor(rows, dtype=torch.int64, device=self._device)
        # The largest of all ranks: a unit that runs collectives must be recomputed by all or none.
        if dist.get_world_size() > 1:
            dist.all_reduce(sizes, dist.ReduceOp.MAX)
        held, inputs = sizes.tolist()
        if not any(held):
            return  # no step was made yet
        least = need(held, inputs, set(range(len(held))))
        chosen = fit(held, inputs, self._budget)
        if chosen is None:
            raise StepError(
                f"{self._by} allows {shown(self._budget)} of activations, and the units of this "
                f"model need {shown(least)} ({least} bytes) on a rank when all are "
                "recomputed.\n\nRaise the budget, or make the batch of a rank smaller."
            )
        for i, unit in enumerate(self._units):
            # What ran on no rank was not measured: it stays recomputed, which is the safe side.
            unit.recompute = i in chosen or held[i] == 0
            unit.trial = None
        self._open = False
        names = [unit.name for unit in self._units]
        self._room.notes |= {
            "recomputed": _recomputed(self._units),
            "held": dict(zip(names, held, strict=True)),
            "inputs": dict(zip(names, inputs, strict=True)),
            "least": least,
            "need": need(held, inputs, chosen),
        }
