"""How a bound optimizer steps: on this rank's parts, or on the whole tensors that this rank owns.

The optimizer shows the model's own parameters in `param_groups` and `state` (DTensors where they
are sharded), and runs its step on plain tensors: no DTensor dispatch, and parameters on different
meshes, or on none, may share a group (foreach kernels refuse such a mixture).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallax.core.lower import held, lend_gradients, moved, take_back_gradients
from parallax.core.probe import Way, find_ways, optimizer_fault
from parallax.core.slices import like, local
from parallax.core.whole import Exchange, stepped_whole

Entries = dict[str, Any]


class _Steady:
    """Whether the values of a state are the very ones that they were.

    One pass in C, where a look-up of each parameter would cost more than a fused step does.
    """

    _END = object()

    def __init__(self) -> None:
        self._values: list[Any] | None = None

    def __call__(self, state: Any) -> bool:
        if self._values is None:
            return False
        # The mark at the end tells a state with more or fewer values apart.
        now = chain(chain.from_iterable(map(dict.values, state.values())), (self._END,))
        try:
            return all(map(is_, now, self._values))
        except TypeError:  # a row that is no dict
            return False

    def note(self, state: Any) -> None:
        """Remember how things are; a state with rows that are no dicts is never steady."""
        self._values = None
        if all(isinstance(row, dict) for row in state.values()):
            self._values = [v for row in state.values() for v in row.values()] + [self._END]


class _Cut:
    """A sharded parameter that is stepped in parts.

    State is kept twice, as shown (DTensors) and as used (plain), sharing storage. What both were
    after the last step is remembered, so that a step only has to look whether it is still so.
    """

    __slots__ = (
        "base",
        "pairs",
        "parameter",
        "part",
        "shown",
        "shown_values",
        "used",
        "used_values",
    )

    def __init__(self, parameter: DTensor) -> None:
        self.parameter = parameter
        self.base = held(parameter)
        self.part = _plain(self.base, parameter)
        self.shown: Entries | None = None
        self.used: Entries | None = None
        self.shown_values: tuple[Any, ...] = ()
        self.used_values: tuple[Any, ...] = ()
        self.pairs: dict[str, tuple[Any, Any]] = {}

    def adopt(self, row: Entries | None) -> None:
        """Take over state that was put there by load_state_dict or by hand since the last step."""
        if row is None:
            self.shown, self.used, self.pairs = None, None, {}
            self.shown_values = self.used_values = ()
            return
        pairs: dict[str, tuple[Any, Any]] = {}
        for key, value in row.items():
            pair = self.pairs.get(key)
            if pair is None or pair[0] is not value:
                pair = (value, local(value) if isinstance(value, Tensor) else value)
            pairs[key] = pair
        self.pairs = pairs
        self._remember(row, {key: pair[1] for key, pair in pairs.items()})

    def show(self, row: Entries, target: Entries) -> None:
        """Show what the optimizer made new in a step."""
        for key, value in row.items():
            pair = self.pairs.get(key)
            if pair is not None and pair[1] is value and target.get(key) is pair[0]:
                continue
            full = isinstance(value, Tensor) and value.ndim and value.shape == self.part.shape
            target[key] = like(value, self.parameter) if full else value
            self.pairs[key] = (target[key], value)
        for key in [key for key in target if key not in row]:
            del target[key], self.pairs[key]
        self._remember(target, row)

    def _remember(self, shown: Entries, used: Entries) -> None:
        self.shown, self.shown_values = shown, tuple(shown.values())
        self.used, self.used_values = used, tuple(used.values())


class Binding:
    """The optimizer's own step, run on plain tensors.

    Args:
        optimizer: The bound optimizer, whose groups hold the parameters that exist now.
        parameters: This rank's parameters by original name.
        mesh: The world's mesh.

    Attributes:
        optimizer: The bound optimizer.
        own_step: Its step as it was before binding.
        closure: What an optimizer that evaluates the loss itself is given.
        owners: For each parameter that is stepped whole, the rank that steps it.
        notes: What was decided, for people to read: `way`, the `ways` of the groups, `owners`, and
            the bytes that all ranks together send in a step (`traffic`).

    Cost:
        Host time: four look-ups a parameter, and for state that a step made new one wrapping.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: dict[str, nn.Parameter], mesh: DeviceMesh
    ) -> None:
        self.optimizer = optimizer
        self.own_step: Callable[..., Any] = optimizer.step
        self.closure: Callable[[], Any] | None = None
        self.owners: dict[str, int] = {}
        self.notes: dict[str, Any] = {}
        self._mesh = mesh
        self._names = {id(p): name for name, p in parameters.items()}
        self._exchange: Exchange | None = None
        self._given: list[list[nn.Parameter]] = []
        self._stepped: list[list[_Cut | nn.Parameter | str]] = []
        self._rows: list[list[Tensor]] = []
        self._cuts: list[_Cut] = []
        self._plain: list[nn.Parameter] = []
        self._wholes: dict[str, DTensor] = {}
        self._extras: list[Any] = []
        self._used: defaultdict[Any, Any] = defaultdict(dict)
        self._shown_before, self._used_before = _Steady(), _Steady()
        self._steady = False
        self._read()

    def _read(self) -> None:
        """Decide how the groups' parameters are stepped; again whenever a group has changed."""
        groups = self.optimizer.param_groups
        self._given = [list(group["params"]) for group in groups]
        cut = any(stepped_whole(p) for row in self._given for p in row)
        ways: tuple[Way, ...] = ("parts",) * len(groups)
        if cut:
            fault = optimizer_fault(self.optimizer, "the composition")
            if fault is not None:  # of a group that was added after boosting
                raise fault
            ways = find_ways(self.optimizer).ways
        known = {id(c.parameter): c for c in self._cuts}
        self._cuts, self._plain, self._wholes, self._stepped = [], [], {}, []
        for way, row in zip(ways, self._given, strict=True):
            stepped: list[_Cut | nn.Parameter | str] = []
            for p in row:
                if not isinstance(p, DTensor):
                    self._plain.append(p)
                    stepped.append(p)
                elif way == "whole" and stepped_whole(p):
                    name = self._names[id(p)]
                    self._wholes[name] = p
                    stepped.append(name)
                else:
                    self._cuts.append(known.get(id(p)) or _Cut(p))
                    stepped.append(self._cuts[-1])
            self._stepped.append(stepped)
        self._used = defaultdict(dict)
        for c in self._cuts:
            if c.used is not None:
                self._used[c.part] = c.used
        self._extras = []
        self._shown_before, self._used_before = _Steady(), _Steady()
        self._exchange = None
        if self._wholes:
            # Owners stay: the state of what they stepped so far is theirs.
            self._exchange = Exchange(self._wholes, self._mesh, self.owners)
            self.owners.update(self._exchange.owners)
        self._list()
        self.notes.update(
            way=" and ".join(sorted(set(ways))) or "parts",
            ways=ways,
            owners=self.owners,
            traffic=self._exchange.traffic if self._exchange else 0,
        )

    def _list(self) -> None:
        self._rows = [
            [s.part if isinstance(s, _Cut) else s for s in row if not isinstance(s, str)]
            for row in self._stepped
        ]
        self._sharded = [c.parameter for c in self._cuts]
        self._bases = [c.base for c in self._cuts]
        self._parts = [c.part for c in self._cuts]
        self._ids = {id(p) for p in self._plain} | {id(c.part) for c in self._cuts}

    @torch.no_grad()
    def step(self) -> None:
        """Run one step of the optimizer on what this rank steps."""
        closure = [self.closure] if self.closure is not None else []
        optimizer = self.optimizer
        if self.notes["way"] == "dtensor":
            self.own_step(*closure)
            return
        groups, shown = optimizer.param_groups, optimizer.state
        same = len(groups) == len(self._given) and all(
            len(group["params"]) == len(given) and all(map(is_, group["params"], given))
            for group, given in zip(groups, self._given, strict=True)
        )
        if not same:
            self._read()
        given = [group["params"] for group in groups]
        used = self._take(shown)
        standing = self._bring(shown)
        try:
            for group, row in zip(groups, self._present(standing), strict=True):
                group["params"] = row
            optimizer.state = used
            self.own_step(*closure)
        finally:
            optimizer.state = shown
            for group, params in zip(groups, given, strict=True):
                group["params"] = params
            take_back_gradients(self._parts)
            rows = {name: used.pop(whole, None) for name, whole in standing.items()}
        self._send_back(shown, standing, rows)
        self._show(shown)

    def _take(self, shown: Any) -> defaultdict[Any, Any]:
        """This rank's parts with their gradients, and the state as it is used."""
        used = self._used
        if moved(self._sharded, self._bases):  # fully_shard pads once, on the first forward
            for c in self._cuts:
                base = held(c.parameter)
                if base is not c.base:
                    used.pop(c.part, None)
                    c.base, c.part = base, _plain(base, c.parameter)
                    if c.used is not None:
                        used[c.part] = c.used
            self._list()
        lend_gradients(self._sharded, self._parts)
        self._steady = self._exchange is None and self._shown_before(shown)
        if not self._steady:
            self._adopt(shown)
        return used

    def _adopt(self, shown: Any) -> None:
        """Use the state that is shown, where it is not what was shown last."""
        used = self._used
        seen = sum(p in shown for p in self._wholes.values())
        for c in self._cuts:
            row = shown.get(c.parameter)
            if row is not None:
                seen += 1
            if (
                row is not c.shown
                or (row is not None and len(row) != len(c.shown_values))
                or not all(map(is_, row.values() if row is not None else (), c.shown_values))
            ):
                c.adopt(row)
                used.pop(c.part, None)
                if row is not None:
                    used[c.part] = c.used
        for parameter in self._plain:
            row = shown.get(parameter)
            used.pop(parameter, None)
            if row is not None:
                seen += 1
                used[parameter] = row
        for key in self._extras:
            used.pop(key, None)
        self._extras = []
        if seen != len(shown):  # keys of the optimizer's own, or parameters of no group
            mine = {id(c.parameter) for c in self._cuts} | {id(p) for p in self._plain}
            mine |= {id(p) for p in self._wholes.values()}
            self._extras = [key for key in shown if id(key) not in mine]
            used.update({key: shown[key] for key in self._extras})

    def _bring(self, shown: Any) -> dict[str, nn.Parameter]:
        """The whole tensors that this rank steps, with their gradients and state."""
        standing: dict[str, nn.Parameter] = {}
        if self._exchange is None:
            return standing
        for name, parameter in self._wholes.items():
            if not self._exchange.owns(name):
                shown.pop(parameter, None)  # as a whole state dict, loaded on every rank, leaves it
        parts = {n: (held(p), local(p.grad)) for n, p in self._wholes.items() if p.grad is not None}
        for name, (weight, grad) in self._exchange.gather(parts).items():
            parameter = self._wholes[name]
            standing[name] = whole = _plain(weight, parameter)
            whole.grad = grad
            if parameter in shown:
                self._used[whole] = shown[parameter]
        return standing

    def _present(self, standing: dict[str, nn.Parameter]) -> list[list[Tensor]]:
        """What stands in each group during the step."""
        if not self._wholes:
            return self._rows
        rows: list[list[Tensor]] = []
        for stepped in self._stepped:
            row: list[Tensor] = []
            for s in stepped:
                if isinstance(s, str):
                    row += [standing[s]] if s in standing else []
                else:
                    row.append(s.part if isinstance(s, _Cut) else s)
            rows.append(row)
        return rows

    def _send_back(
        self, shown: Any, standing: dict[str, nn.Parameter], rows: dict[str, Entries | None]
    ) -> None:
        if self._exchange is None:
            return
        for name, row in rows.items():
            if row is not None:
                shown[self._wholes[name]] = row
            else:
                shown.pop(self._wholes[name], None)
        parts = {n: held(p) for n, p in self._wholes.items() if p.grad is not None}
        self._exchange.scatter({n: w.detach() for n, w in standing.items()}, parts)

    def _show(self, shown: Any) -> None:
        """Show the state that the optimizer has made new, or changed other than in place."""
        used = self._used
        if self._steady and self._used_before(used):  # and nobody saw `shown` in between
            return
        seen = len(self._extras)
        for c in self._cuts:
            row = used.get(c.part)
            if row is None:
                if c.shown is not None:  # the optimizer dropped it
                    shown.pop(c.parameter, None)
                    c.adopt(None)
                continue
            seen += 1
            if (
                row is not c.used
                or len(row) != len(c.used_values)
                or not all(map(is_, row.values(), c.used_values))
            ):
                c.show(row, shown[c.parameter])
        for parameter in self._plain:
            row = used.get(parameter)
            if row is None:
                shown.pop(parameter, None)
            else:
                seen += 1
                shown[parameter] = row
        if seen != len(used):
            fresh = [key for key in used if id(key) not in self._ids]
            self._extras = fresh
            shown.update({key: used[key] for key in fresh})
        self._shown_before.note(shown)
        self._used_before.note(used)


def _plain(tensor: Tensor, parameter: DTensor) -> nn.Parameter:
    """A parameter of one's own on a tensor's storage, since it needs a gradient of its own."""
    return nn.Parameter(tensor.detach(), requires_grad=parameter.requires_grad)
