"""Carrying a composition out: check everything, then rewrite, then bind the verbs."""

from __future__ import annotations

import itertools
import types
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallax.core.bind import BIND, group_names, needs_closure, rebind, snapshot_state
from parallax.core.mesh import agree, broadcast, device_of, digest, mesh_of, rank_on
from parallax.core.names import Names
from parallax.core.phase import Phase
from parallax.core.plan import ordered
from parallax.core.probe import known_ways
from parallax.core.rewrite import Draft, Room
from parallax.core.slices import local
from parallax.core.step import Seen, StandIn, grad_of
from parallax.core.transform import OptimizerLike, Transform
from parallax.core.tree import Boosted  # registered as a tree there
from parallax.core.weigh import Weighing
from parallax.errors import (
    OptimizerError,
    ParallaxError,
    RuleError,
    StepError,
    gather_faults,
    raise_found,
)
from parallax.launch import launch

_MARK = "_parallax_plan"


def boost(transform: Transform, model: nn.Module, optimizer: OptimizerLike) -> Boosted:
    """See `Transform.__call__`."""
    if not isinstance(model, nn.Module):
        raise RuleError(
            f"{transform!r} was called on {model!r}, which is no torch.nn.Module.\n\n"
            "Call it as transform(model, optimizer)."
        )
    launch()
    faults: list[ParallaxError] = []
    empty = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if empty:
        faults.append(_without_values(model, empty))
    plan = _attempt(faults, lambda: transform.plan(dist.get_world_size()))
    if already := getattr(model, _MARK, None):
        faults.append(_boosted_twice(already, transform))
    names = Names.of(model)
    if not faults:
        optimizer = _attempt(faults, lambda: _optimizer(model, optimizer))
    statement = _statement(transform, model, optimizer)
    _raise_together(statement, faults)
    assert plan is not None
    assert optimizer is None or isinstance(optimizer, Optimizer)

    if optimizer is not None:
        plan = replace(plan, rewrites=ordered((*plan.rewrites, BIND)))
    mesh = mesh_of(plan)
    # What the pair trains, known once all is rewritten. Between forward and backward a gathered
    # model shows other parameters by these names.
    held: dict[str, nn.Parameter] = {}
    draft = Draft(
        (model,),
        optimizer,
        mesh,
        names,
        _no_grad_yet,
        _no_update,
        _any,
        lambda: _gradients(held),
        _nothing,
        _nothing,
        nullcontext,
        StandIn(),
        Weighing(mesh),
    )
    for rewrite in plan.rewrites:
        faults += rewrite.check(draft, plan)
    _raise_together(statement, faults)
    _agree_on_settings(_settings(model, optimizer))

    groups = group_names(optimizer, names, model) if optimizer is not None else []
    known = {id(p): name for name, p in names.parameters_of(model).items()}
    state = snapshot_state(optimizer, known) if optimizer is not None else {}
    broadcast((*model.parameters(), *model.buffers(), *_tensors(state)), mesh)
    seen = Seen(model)
    title = type(model).__name__  # fully_shard renames the class
    _share_randomness(mesh)
    draft = draft._replace(grad=grad_of(model, draft.weighing, draft.stand_in))
    rooms: dict[str, Room] = {}
    settled = False
    for rewrite in plan.rewrites:
        if rewrite.phase >= Phase.BIND and not settled:
            settled = _settle(draft, mesh)
        if rewrite is BIND:
            assert optimizer is not None
            rebind(optimizer, groups, state, draft.names.parameters_of(*draft.parts))
        draft, rooms[rewrite.name] = rewrite.build(draft, plan)
        draft = draft._replace(names=draft.names.follow(draft.parts, rewrite.phase, rewrite.name))
    if not settled:
        _settle(draft, mesh)
    held.update(draft.names.parameters_of(*draft.parts))
    setattr(model, _MARK, (repr(transform), title))
    boosted = Boosted(draft, plan, rooms, title, seen)
    if optimizer is not None:
        _install(optimizer, boosted)
    return boosted


def _attempt(faults: list[ParallaxError], make: Any) -> Any:
    try:
        return make()
    except ParallaxError as fault:
        faults.append(fault)
        return None


def _optimizer(model: nn.Module, given: OptimizerLike) -> Optimizer | None:
    if given is None or isinstance(given, Optimizer):
        return given
    if not callable(given):
        raise OptimizerError(
            f"the optimizer is {given!r}.\n\nGive a torch.optim.Optimizer made on the model, or a "
            "function of parameters that makes one, or None."
        )
    made = given(list(model.parameters()))
    if not isinstance(made, Optimizer):
        raise OptimizerError(
            f"the function given as optimizer made {made!r}.\n\n"
            "It must return a torch.optim.Optimizer over the parameters it is given."
        )
    return made


def _without_values(model: nn.Module, names: list[str]) -> RuleError:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return RuleError(
        f"{type(model).__name__} holds tensors without values, on the meta device: "
        f"{names[0]}{more}.\n\nMake the model on the CPU, or load its weights, before boosting."
    )


def _boosted_twice(mark: tuple[str, str], second: Transform) -> StepError:
    first, title = mark
    return StepError(
        f"{second!r} was called on a {title} that is already boosted by {first}.\n\n"
        f"Compose first, then call once: compose({first}, {second!r})(model, optimizer)."
    )


def _statement(transform: Transform, model: nn.Module, optimizer: OptimizerLike) -> str:
    shapes = ", ".join(
        f"{name}:{tuple(t.shape)}:{t.dtype}"
        for name, t in (*model.named_parameters(), *model.named_buffers())
    )
    kind = type(optimizer).__name__ if isinstance(optimizer, Optimizer) else "none"
    return f"{transform!r} | {type(model).__name__} {digest(shapes)} | {kind}"


def _settings(model: nn.Module, optimizer: OptimizerLike) -> list[str]:
    """What must agree beside shapes, a line each: what is trained, and each group's settings."""
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    lines = [f"frozen parameters: {', '.join(frozen) or 'none'}"]
    if not isinstance(optimizer, Optimizer):
        return lines
    names = {id(p): name for name, p in model.named_parameters()}
    plain = (bool, int, float, str, tuple, list, type(None))
    for number, group in enumerate(optimizer.param_groups):
        members = ", ".join(str(names.get(id(p))) for p in group["params"])
        lines.append(f"group {number} of the optimizer: {members}")
        for key, value in sorted(group.items(), key=lambda item: str(item[0])):
            told = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if key != "params" and isinstance(told, plain):
                lines.append(f"group {number} of the optimizer: {key}={told!r}")
    for number, way in enumerate(known_ways(optimizer)):
        lines.append(f"group {number} of the optimizer is stepped in the way: {way}")
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            shown = repr(value) if isinstance(value, plain) else type(value).__name__
            told = f"{tuple(value.shape)}" if isinstance(value, Tensor) else shown
            lines.append(f"state of {names.get(id(parameter))}: {key} {told}")
    return lines


def _agree_on_settings(settings: list[str]) -> None:
    digests, _ = agree(digest("\n".join(settings)), None)
    if len(set(digests)) == 1:
        return
    _, rows = agree("", settings)
    other = next(rank for rank, row in enumerate(rows) if row != rows[0])
    mine, theirs = next(
        pair
        for pair in itertools.zip_longest(rows[0], rows[other], fillvalue="nothing")
        if pair[0] != pair[1]
    )
    raise StepError(
        f"the ranks train with different settings:\n  rank 0: {mine}\n  rank {other}: {theirs}\n\n"
        "Freeze the same parameters and make the same optimizer on every rank."
    )


def _raise_together(statement: str, faults: list[ParallaxError]) -> None:
    """Raise what any rank found, with the same text on every rank."""
    statements, found = agree(statement, gather_faults(faults))
    raise_found(found)
    if len(set(statements)) > 1:
        rows = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(statements))
        raise StepError(
            f"the ranks boost different things:\n{rows}\n\n"
            "Build the same model, optimizer and composition on every rank."
        )


def _settle(draft: Draft, mesh: Any) -> bool:
    """Move what no rewrite moved (buffers, loose parameters) to this rank's device."""
    device = device_of(mesh)
    for part in draft.parts:
        for tensor in (*part.parameters(), *part.buffers()):
            if not isinstance(tensor, DTensor) and not tensor.is_meta and tensor.device != device:
                tensor.data = tensor.data.to(device)
    return True


def _tensors(state: dict[str, dict[str, Any]]) -> list[Tensor]:
    return [v for row in state.values() for v in row.values() if isinstance(v, Tensor)]


def _share_randomness(mesh: Any) -> None:
    """Give the ranks of one data rank one random stream, and different data ranks different ones.

    Data rank 0 goes on with rank 0's stream as it stands, so that a world with one data rank draws
    what one process draws. The others are seeded from the same stream's seed and their data rank.
    """
    if dist.get_world_size() == 1:
        return
    device = device_of(mesh)
    state = torch.get_rng_state().to(device)
    seed = torch.tensor([torch.initial_seed() % (1 << 62)], device=device)
    dist.broadcast(state, src=0)
    dist.broadcast(seed, src=0)
    rank = rank_on(mesh)
    if rank:
        torch.manual_seed((int(seed) + 0x9E3779B97F4A7C15 * rank) % (1 << 62))
        return
    if device.type == "cuda":
        torch.cuda.manual_seed(int(seed))
    torch.set_rng_state(state.cpu())


def _install(optimizer: Optimizer, boosted: Boosted) -> None:
    """Make `optimizer.step()` the composed update and `zero_grad()` forget all gradients."""
    draft, binding = boosted._draft, boosted.rooms[BIND.name].notes["binding"]
    inner = needs_closure(optimizer)
    skips = [name for name, room in boosted.rooms.items() if room.skips]

    def step(self: Optimizer, closure: Any = None) -> Any:
        loss: list[Any] = []
        boosted._go_on()
        known = [t for t in boosted.along.things.values() if hasattr(t, "optimizer")]
        if skips and not known and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            raise _unattached(boosted, skips)

        def evaluate() -> Any:
            with torch.enable_grad():
                loss.append(closure())
            draft.settle()
            return loss[-1]

        if inner:
            _closure_fault(optimizer, closure, plain=draft.update == binding.step)
            binding.closure = evaluate
        elif closure is not None:
            evaluate()
        draft.settle()
        boosted._count(draft.update())
        return loss[0] if loss else None

    # Schedulers attached earlier look for their mark on optimizer.step, and warn without it.
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        step._wrapped_by_lr_sched = True  # pyright: ignore[reportFunctionMemberAccess]
    # A method, since torch's schedulers re-wrap optimizer.step through its __func__.
    optimizer.step = types.MethodType(step, optimizer)
    own_zero_grad = optimizer.zero_grad

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        own_zero_grad(set_to_none)
        draft.forget()

    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)
    own_add = optimizer.add_param_group

    def add_param_group(self: Optimizer, group: dict[str, Any]) -> None:
        known = {id(p) for p in boosted.params.values()}
        params = group["params"]
        for p in [params] if isinstance(params, Tensor) else (params := list(params)):
            if id(p) not in known:
                raise OptimizerError(
                    f"add_param_group was given a parameter of shape {tuple(p.shape)} that is not "
                    f"in the boosted {boosted.title}: its gradient would not be reduced over the "
                    "ranks.\n\nRegister it in the model, and put it into the optimizer, before "
                    "boosting."
                )
        own_add({**group, "params": params})

    optimizer.add_param_group = types.MethodType(add_param_group, optimizer)


def _unattached(boosted: Boosted, skips: list[str]) -> StepError:
    return StepError(
        f"a learning-rate scheduler drives the optimizer, and {boosted.plan.composition} may skip "
        f"updates ({', '.join(skips)}): the scheduler would go on without them.\n\nLet it know: "
        "boosted.attach(scheduler), or boosted.attach(scheduler, per='epoch') where it is stepped "
        "less often than once an update."
    )


def _closure_fault(optimizer: Optimizer, closure: Any, *, plain: bool) -> None:
    kind = type(optimizer).__name__
    if closure is None:
        raise StepError(
            f"{kind} evaluates the loss several times a step and was given no closure.\n\nCall "
            "boosted.optimizer.step(closure), with a closure that clears gradients, runs the "
            "model, calls boosted.backward(loss) and returns the loss."
        )
    if not plain:
        raise StepError(
            f"{kind} evaluates the loss inside its step, where clip and the like cannot reach the "
            "gradients.\n\nLeave them out of the composition, or use another optimizer."
        )


def _no_grad_yet(loss_fn: Any, batch: Any) -> Tensor:
    raise AssertionError("grad is set before the first build")


def _any(reduce: bool, last: bool | None = None) -> None:
    """Nothing is reduced over data axes, so nothing can be put off."""


def _gradients(held: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: local(p.grad) for name, p in held.items() if p.grad is not None}


def _nothing() -> None:
    """Nothing to settle."""


def _no_update() -> None:
    raise AssertionError("update is only called where there is an optimizer, and BIND sets it")
