"""The optimizer, pointed at the parameters that exist now.

`fully_shard` and DTensor replace every Parameter, so an optimizer made earlier is left holding dead
tensors. Binding re-points it by original name, in place: groups, their settings, hooks and attached
schedulers stay, and state from earlier steps is cut up as its parameter was.

The optimizer shows the model's own parameters in `param_groups` and `state` (DTensors where they
are sharded), and runs its step on the ranks' local parts: no DTensor dispatch, and parameters on
different meshes, or on none, may share a group (foreach kernels refuse such a mixture).
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallax.core.names import Names
from parallax.core.phase import Phase
from parallax.core.plan import Plan
from parallax.core.rewrite import Draft, Rewrite, Room
from parallax.core.slices import box, like, local
from parallax.errors import OptimizerError, ParallaxError

# Their update of an element depends on that element's history alone (read in torch.optim's source).
ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.ASGD,
    }
)


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


class Binding:
    """The optimizer's own step, run on local parts.

    Attributes:
        optimizer: The bound optimizer.
        own_step: Its step as it was before binding.
        whole: Whether the optimizer takes DTensors itself (`supports_dtensor = True`).
    """

    def __init__(self, optimizer: Optimizer, whole: bool) -> None:
        self.optimizer = optimizer
        self.own_step: Callable[..., Any] = optimizer.step
        self.whole = whole
        self.closure: Callable[[], Any] | None = None
        self._parts: dict[nn.Parameter, Tensor] = {}
        # For each sharded parameter: state as shown (DTensor) and as used (local), by key.
        self._pairs: dict[nn.Parameter, dict[str, tuple[Any, Any]]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Run one step of the optimizer on this rank's parts."""
        closure = [self.closure] if self.closure is not None else []
        if self.whole:
            self.own_step(*closure)
            return
        optimizer = self.optimizer
        shown_state = optimizer.state
        shown_params = [group["params"] for group in optimizer.param_groups]
        try:
            for group in optimizer.param_groups:
                group["params"] = [self._part(p) for p in group["params"]]
            used_state = self._used(shown_state)
            optimizer.state = used_state
            self.own_step(*closure)
        finally:
            optimizer.state = shown_state
            for group, params in zip(optimizer.param_groups, shown_params, strict=True):
                group["params"] = params
        self._show(shown_state, used_state)

    def _part(self, parameter: nn.Parameter) -> Tensor:
        if not isinstance(parameter, DTensor):
            return parameter
        # fully_shard swaps the local tensor once, when it pads on the first forward.
        part = self._parts[parameter] = parameter.to_local()
        grad = parameter.grad
        part.grad = grad.to_local() if isinstance(grad, DTensor) else grad
        return part

    def _used(self, shown: Any) -> defaultdict[Tensor, Any]:
        used: defaultdict[Tensor, Any] = defaultdict(dict)
        for parameter, entries in shown.items():
            part = self._parts.get(parameter)
            if part is None:
                used[parameter] = entries
                continue
            pairs = self._pairs.get(parameter, {})
            # An entry that is not the one shown last was put there by load_state_dict or by hand.
            used[part] = {
                key: pairs[key][1]
                if key in pairs and pairs[key][0] is value
                else (local(value) if isinstance(value, Tensor) else value)
                for key, value in entries.items()
            }
        return used

    def _show(self, shown: Any, used: defaultdict[Tensor, Any]) -> None:
        parameters = {id(part): parameter for parameter, part in self._parts.items()}
        for part, entries in used.items():
            parameter = parameters.get(id(part))
            if parameter is None:
                shown[part] = entries
                continue
            pairs = self._pairs.setdefault(parameter, {})
            row = shown[parameter]
            for key, value in entries.items():
                if key in pairs and pairs[key][1] is value and row.get(key) is pairs[key][0]:
                    continue
                full = isinstance(value, Tensor) and value.ndim and value.shape == part.shape
                row[key] = like(value, parameter) if full else value
                pairs[key] = (row[key], value)
            for key in [key for key in row if key not in entries]:
                del row[key], pairs[key]
            part.grad = None  # the parameter owns the gradient; a second owner would keep it alive


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
        fault = elementwise_fault(draft.optimizer, who)
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


def elementwise_fault(optimizer: Optimizer, why: str) -> OptimizerError | None:
    """Why this optimizer cannot run on parts of its parameters; None when it can.

    torch's element-wise optimizers are known. Any other class is tried on small matrices: whole,
    and cut in two; the updates must agree.

    Args:
        optimizer: The user's optimizer; it is not touched.
        why: Who shards the parameters, in the user's spelling, for the message.
    """
    kind = type(optimizer)
    if kind in ELEMENTWISE or getattr(optimizer, "supports_dtensor", False):
        return None
    finding = _probe(optimizer)
    if finding is None:
        return None
    return OptimizerError(
        f"{why} shards parameters, and the optimizer {kind.__name__} {finding}.\n\n"
        f"Use an element-wise optimizer (AdamW, SGD, ...), or replicate with dp(), or, if "
        f"{kind.__name__} computes rightly on DTensors, say so with a class attribute "
        "supports_dtensor = True."
    )


def _probe(optimizer: Optimizer, steps: int = 30, most: int = 1 << 18) -> str | None:
    """Try each group, with its settings, on a tensor of its largest parameter's shape.

    Many steps, since some optimizers start their matrix work late, and the real shape, since some
    factorise large matrices only; dims are halved until at most `most` elements are left.
    """
    for index, group in enumerate(optimizer.param_groups):
        rows = [p for p in group["params"] if p.requires_grad and p.ndim and p.numel()]
        for matrix in (True, False):
            same = [p for p in rows if (p.ndim > 1) == matrix]
            if not same:
                continue
            shape = list(max(same, key=lambda p: p.numel()).shape)
            while math.prod(shape) > most:
                largest = shape.index(max(shape))
                shape[largest] = -(-shape[largest] // 2)
            finding = _try(optimizer, index, shape, steps)
            if finding is not None:
                return finding
    return None


def _try(optimizer: Optimizer, index: int, shape: list[int], steps: int) -> str | None:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(shape, generator=generator)
        gradients = [torch.randn(shape, generator=generator) for _ in range(steps)]
        try:
            reference = _trajectory(optimizer, index, whole, gradients)
            for dim, size in enumerate(shape[:2]):
                if size < 2:
                    continue
                parts = [
                    _trajectory(optimizer, index, start, list(grads))
                    for start, *grads in zip(
                        *(t.tensor_split([size // 3 or 1], dim) for t in (whole, *gradients)),
                        strict=True,
                    )
                ]
                # float32 arithmetic on the same numbers may differ by vector width only.
                if not torch.allclose(torch.cat(parts, dim), reference, rtol=1e-4, atol=1e-6):
                    return (
                        "updates a part of a matrix differently from the whole: it needs whole "
                        "matrices"
                    )
        except Exception as error:  # noqa: BLE001  whatever a trial raises is the finding
            return f"could not be tried on a part of a matrix ({type(error).__name__}: {error})"
    return None


def _trajectory(optimizer: Optimizer, index: int, start: Tensor, gradients: list[Tensor]) -> Tensor:
    trial = copy.copy(optimizer)
    for bound in ("step", "zero_grad"):  # schedulers and earlier bindings put their own there
        trial.__dict__.pop(bound, None)
    trial.state = defaultdict(dict)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(trial, hooks, OrderedDict())
    parameter = nn.Parameter(start.clone())
    settings = {k: v for k, v in optimizer.param_groups[index].items() if k != "params"}
    trial.param_groups = [{**settings, "params": [parameter]}]
    for gradient in gradients:
        parameter.grad = gradient.clone()
        trial.step()
    return parameter.detach()


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

    Names that this rank does not hold are dropped from the groups.
    """
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [parameters[name] for name in names if name in parameters]
    fresh: defaultdict[nn.Parameter, Any] = defaultdict(dict)
    for name, entries in state.items():
        if name in parameters:
            parameter = parameters[name]
            fresh[parameter] = {key: _cut(value, parameter) for key, value in entries.items()}
    optimizer.state = fresh  # pyright: ignore[reportAttributeAccessIssue]


@torch.no_grad()
def _cut(value: Any, parameter: nn.Parameter) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.ndim == 0 or value.shape != parameter.shape:
        return value
    part = local(parameter)
    # Moments keep their own dtype: a model stored in bf16 has its masters, and so its state, in
    # fp32 from here on only if the state is converted with it.
    dtype = part.dtype if value.is_floating_point() else value.dtype
    mine = value[box(parameter).window].to(device=part.device, dtype=dtype, copy=True)
    return like(mine.contiguous(), parameter)


def _build(draft: Draft, plan: Plan) -> tuple[Draft, Room]:
    optimizer = draft.optimizer
    assert optimizer is not None, "BIND is only part of a plan with an optimizer"
    sharded = any(
        isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]
    )
    whole = sharded and getattr(optimizer, "supports_dtensor", False)
    binding = Binding(optimizer, whole=bool(whole))
    return draft._replace(update=binding.step), Room(notes={"binding": binding})


BIND = Rewrite("optimizer", Phase.BIND, _build, _check)
"""Points the optimizer at the parameters that exist now; part of every boost with an optimizer."""
