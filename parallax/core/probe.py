"""How an optimizer may be run where parameters are sharded, found out by trying it.

Three answers: on *parts* (its update of an element depends on that element's history alone), on
*whole* tensors (it depends on the whole parameter, but on no other), or not at all. torch's own
classes are known by their source; any other class is tried on small tensors.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.errors import OptimizerError

Way = Literal["parts", "whole", "dtensor"]

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

# Newton-Schulz on a parameter; row and column means and the norm of a parameter. No more than that.
WHOLE: frozenset[type[Optimizer]] = frozenset({torch.optim.Muon, torch.optim.Adafactor})


class Finding(NamedTuple):
    """What was found out about an optimizer.

    Attributes:
        ways: How each group is stepped.
        fault: Why a group cannot be, as the end of a sentence; and what to do about it. None when
            all can.
    """

    ways: tuple[Way, ...]
    fault: tuple[str, str] | None


_OTHERS = (
    "changes a parameter differently when it steps others beside it (by a norm or an estimate over "
    "all of them, or by random numbers that it draws), and each rank would step other ones"
)
_ALONE = (
    "Turn that off in its settings (in place of a global clip of its own, compose "
    "clip(max_norm)), or {}"
)
_COMPANY = "counts its steps only where a group has parameters, and a rank may own none of a group"

# By optimizer, since check and build both ask, and trying takes a while.
_FOUND: WeakKeyDictionary[Optimizer, tuple[tuple[Any, ...], Finding]] = WeakKeyDictionary()


def find_ways(optimizer: Optimizer) -> Finding:
    """How each group of an optimizer is stepped where its parameters are sharded.

    Args:
        optimizer: The user's optimizer; it is not touched.

    Cost:
        Nothing for torch's own classes. Others: up to 30 steps on four cuts of a tensor of each
        group's largest shape, of at most 2^18 elements.

    Example:
        >>> parameters = [torch.nn.Parameter(torch.zeros(2, 2))]
        >>> find_ways(torch.optim.AdamW(parameters)).ways
        ('parts',)
        >>> find_ways(torch.optim.Muon(parameters)).ways
        ('whole',)
    """
    groups = optimizer.param_groups
    kind = type(optimizer)
    if getattr(optimizer, "supports_dtensor", False):
        return Finding(("dtensor",) * len(groups), None)
    if kind in ELEMENTWISE:
        return Finding(("parts",) * len(groups), None)
    if kind in WHOLE:
        return Finding(("whole",) * len(groups), None)
    asked = tuple(tuple(p.shape for p in group["params"]) for group in groups)
    known = _FOUND.get(optimizer)
    if known is None or known[0] != asked:
        known = _FOUND[optimizer] = (asked, _try_out(optimizer))
    return known[1]


def known_ways(optimizer: Optimizer) -> tuple[Way, ...]:
    """What trying an optimizer found, if it was tried: ranks on unlike machines must agree."""
    known = _FOUND.get(optimizer)
    return known[1].ways if known is not None else ()


def optimizer_fault(optimizer: Optimizer, why: str) -> OptimizerError | None:
    """Why this optimizer cannot run on sharded parameters; None when it can.

    Args:
        optimizer: The user's optimizer; it is not touched.
        why: Who shards the parameters, in the user's spelling, for the message.
    """
    fault = find_ways(optimizer).fault
    if fault is None:
        return None
    finding, remedy = fault
    return OptimizerError(
        f"{why} shards parameters, and the optimizer {type(optimizer).__name__} {finding}.\n\n"
        f"{remedy}"
    )


def _try_out(optimizer: Optimizer) -> Finding:
    kind = type(optimizer).__name__
    either = (
        "use an element-wise optimizer (AdamW, SGD, ...) or one that treats each parameter by "
        f"itself, or replicate with dp(), or, if {kind} computes rightly on DTensors, say so with "
        "a class attribute supports_dtensor = True."
    )
    ways: list[Way] = []
    fault: tuple[str, str] | None = None
    for index in range(len(optimizer.param_groups)):
        way: Way = "parts"
        try:
            for shape in _shapes(optimizer.param_groups[index]):
                trial = _Trial(optimizer, index, shape)
                if trial.needs_whole():
                    way = "whole"
                    if trial.needs_others():
                        fault = fault or (_OTHERS, _ALONE.format(either))
                    elif trial.needs_company():
                        fault = fault or (_COMPANY, f"Instead, {either}")
        except Exception as error:  # noqa: BLE001  whatever a trial raises is the finding
            told = f"could not be tried on a small tensor ({type(error).__name__}: {error})"
            fault = fault or (told, f"Instead, {either}")
        ways.append(way)
    return Finding(tuple(ways), fault)


def _shapes(group: dict[str, Any], most: int = 1 << 18) -> list[list[int]]:
    """The largest shape of a group's tensors with several dims, and of those with one.

    The real shape, since some optimizers factorise large matrices only; dims are halved until at
    most `most` elements are left. And one that blocks of quantised state divide: optimizers
    quantise the state of large parameters only, and only where the blocks come out even.
    """
    rows = [p for p in group["params"] if p.requires_grad and p.ndim and p.numel()]
    found = []
    for matrix in (True, False):
        same = [p for p in rows if (p.ndim > 1) == matrix]
        if same:
            shape = list(max(same, key=lambda p: p.numel()).shape)
            while math.prod(shape) > most:
                largest = shape.index(max(shape))
                shape[largest] = -(-shape[largest] // 2)
            found.append(shape)
            if math.prod(shape) >= 4096:
                found.append([64, 64] if matrix else [4096])
    return found


class _Trial:
    """Steps of one group on tensors of a shape: whole, in parts, in company, and on none.

    Many steps, since some optimizers start their matrix work late.
    """

    def __init__(
        self, optimizer: Optimizer, index: int, shape: Sequence[int], steps: int = 30
    ) -> None:
        self._optimizer = optimizer
        self._index = index
        self._shape = shape
        self._steps = steps
        self._first = self._draw(shape, seed=0)
        self._states: list[Any] = []
        ((self._alone,), self._settings) = self._run([self._first])
        self._first_state = self._states[0]

    def _draw(self, shape: Sequence[int], seed: int, scale: float = 1.0) -> list[Tensor]:
        """A start and a gradient for each step."""
        generator = torch.Generator().manual_seed(seed)
        rows = [torch.randn(*shape, generator=generator) for _ in range(1 + self._steps)]
        return [rows[0], *(row * scale for row in rows[1:])]

    def needs_whole(self) -> bool:
        """Whether a part of a tensor is changed otherwise than within the whole."""
        # A matrix beside the moments may be made every thousandth step only; so may what an object
        # holds.
        if any(not _like_an_element(v, self._alone.shape) for v in self._first_state.values()):
            return True
        for dim, size in enumerate(self._shape[:2]):
            # A third, and a single row: quantised state comes in blocks, which one cut may respect.
            for first in {size // 3 or 1, 1} if size > 1 else ():
                cuts = zip(*(t.tensor_split([first], dim) for t in self._first), strict=True)
                parts = [self._run([list(part)])[0][0] for part in cuts]
                if not _close(torch.cat(parts, dim), self._alone):
                    return True
        return False

    def needs_others(self) -> bool:
        """Whether a tensor is changed otherwise when another is stepped with it."""
        # Of another shape, since tensors of one shape may be batched, and of larger gradients,
        # which a norm over both would show.
        other = self._draw([self._shape[0] + 1, *self._shape[1:]], seed=1, scale=100.0)
        mine, theirs = self._run([self._first, other])[0]
        return not (_close(mine, self._alone) and _close(theirs, self._run([other])[0][0]))

    def needs_company(self) -> bool:
        """Whether a group without tensors goes on otherwise than one with."""
        return repr(self._run([])[1]) != repr(self._settings)

    def _run(self, rows: list[list[Tensor]]) -> tuple[list[Tensor], dict[str, Any]]:
        # Not copy.copy, which Optimizer.__getstate__ makes forget every attribute of a subclass.
        trial = object.__new__(type(self._optimizer))
        trial.__dict__.update(vars(self._optimizer))
        for bound in ("step", "zero_grad", "add_param_group"):  # schedulers and bindings put theirs
            trial.__dict__.pop(bound, None)
        for name, value in list(vars(trial).items()):
            if isinstance(value, list | dict | set | Tensor) and name not in _OWN:
                setattr(trial, name, copy.deepcopy(value))
        trial.state = defaultdict(dict)
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(trial, hooks, OrderedDict())
        parameters = [nn.Parameter(start.clone()) for start, *_ in rows]
        settings = self._optimizer.param_groups[self._index].items()
        group = {k: copy.deepcopy(v) for k, v in settings if k != "params"}
        trial.param_groups = [{**group, "params": parameters}]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            for step in range(1, 1 + self._steps):
                for parameter, row in zip(parameters, rows, strict=True):
                    parameter.grad = row[step].clone()
                trial.step()
        self._states = [trial.state.get(p, {}) for p in parameters]
        after = {k: v for k, v in trial.param_groups[0].items() if k != "params"}
        return [p.detach() for p in parameters], after


_OWN = ("param_groups", "state", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def _like_an_element(value: Any, shape: torch.Size) -> bool:
    """Whether state can be cut as its parameter is: a value for each element, or one for all."""
    if isinstance(value, Tensor):
        return type(value) in (Tensor, nn.Parameter) and value.shape in (shape, (), (1,))
    return value is None or isinstance(value, bool | int | float | str)


def _close(one: Tensor, other: Tensor) -> bool:
    # float32 arithmetic on the same numbers may differ by vector width only.
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)
