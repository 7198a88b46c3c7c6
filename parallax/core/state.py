"""The tensors of a boosted pair: what a checkpoint holds, read and written in place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from parallax.core.along import Along
from parallax.core.collect import collect
from parallax.core.late import Late
from parallax.core.names import Names
from parallax.core.plan import Plan
from parallax.core.rewrite import Draft, Room
from parallax.core.slices import local
from parallax.errors import CheckpointError, StepError

Kind = Literal["params", "buffers", "moments", "rooms", "step", "random", "attached"]

KINDS: tuple[Kind, ...] = ("params", "buffers", "moments", "rooms", "step", "random", "attached")

LEAVES: tuple[Kind, ...] = KINDS[:5]
"""The kinds that are tensors of the pair; the others go along with it into checkpoints."""

# Verbs that another room carries out. The pair knows their addresses and nothing else of them, as a
# transform knows its rewrites': core imports no room.
SAVE = Late("parallax.checkpoint:save")
LOAD_ = Late("parallax.checkpoint:load_")
EXPORT = Late("parallax.checkpoint.export:export")
LOAD_PRETRAINED = Late("parallax.checkpoint.pretrained:load_pretrained")


class Unread(Protocol):
    """A leaf that is still in a file."""

    def read(self) -> Tensor:
        """The leaf as a new tensor."""
        ...

    def read_into(self, target: Tensor) -> None:
        """The leaf, written into a rank's part."""
        ...

    def like(self, other: Any) -> bool:
        """Whether something is laid out as the leaf will be."""
        ...


class Saving(Protocol):
    """A checkpoint that is being written, or was; see `parallax.checkpoint.Saving`."""

    def result(self, timeout: float | None = None) -> Path:
        """Wait until it is complete; its directory."""
        ...

    def done(self) -> bool:
        """Whether it is complete, or has failed."""
        ...

    @property
    def progress(self) -> float:
        """How much of it is written, from 0 to 1."""
        ...


class State:
    """The half of a boosted pair that is about its tensors; see `Boosted`."""

    plan: Plan
    rooms: dict[str, Room]
    along: Along
    saving: Saving | None = None
    _draft: Draft
    _step: Tensor
    _frozen: dict[str, Any] | None
    _settings: list[dict[str, Any]] | None = None

    @property
    def model(self) -> nn.Module:
        """The model, rewritten in place."""
        return self._draft.parts[0]

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, re-pointed in place; its `step()` is the whole update."""
        return self._draft.optimizer

    @property
    def names(self) -> Names:
        """Original full names of this rank's tensors."""
        return self._draft.names

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh, with all five axes."""
        return self._draft.mesh

    @property
    def step(self) -> int:
        """Number of updates made."""
        return int(self._step)

    def zero_grad(self) -> None:
        """Forget all gradients, also those of parameters that no optimizer group holds."""
        for part in self._draft.parts:
            for parameter in part.parameters():
                parameter.grad = None
        self._draft.forget()

    @property
    def params(self) -> dict[str, Tensor]:
        """This rank's parameters by original full name."""
        return self.leaves("params")

    @property
    def buffers(self) -> dict[str, Tensor]:
        """This rank's saved buffers by original full name."""
        return self.leaves("buffers")

    @property
    def moments(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state by parameter name; empty before the first step."""
        return self.leaves("moments")

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The settings of the optimizer's groups, where many optimizers also count their steps."""
        if self._settings is not None or self.optimizer is None:
            return self._settings or []
        rows = self.optimizer.param_groups
        return [_copied({k: v for k, v in group.items() if k != "params"}) for group in rows]

    @property
    def owners(self) -> dict[str, int]:
        """For each parameter that the optimizer steps whole, the rank that holds its state."""
        room = self.rooms.get("optimizer")
        return {} if room is None else room.notes["owners"]

    def gather(self) -> dict[str, Any] | None:
        """The whole, unsharded state on the CPU of rank 0; None on the other ranks.

        Returns:
            A dict of `params`, `buffers`, `moments`, `rooms` and `step`; on rank 0 only.

        Cost:
            One tensor at a time: beside rank 0's result no rank holds more than one whole tensor.
        """
        return collect({kind: self.leaves(kind) for kind in LEAVES}, self.mesh, owners=self.owners)

    def load_(
        self,
        source: State | str | os.PathLike[str],
        *,
        kinds: tuple[Kind, ...] = KINDS,
        resume: Literal["must", "auto"] = "must",
    ) -> bool:
        """Write a snapshot, or a checkpoint directory, back into this pair, in place.

        Args:
            source: A snapshot of this pair, or what `save` wrote.
            kinds: Which kinds of state to read from a directory.
            resume: `"auto"` changes nothing where the directory holds no checkpoint yet.

        Returns:
            Whether there was something to load.

        Raises:
            CheckpointError: The source is missing, damaged, or does not fit. Nothing was changed.
        """
        self._live("load_")
        self.free("load_")
        if not isinstance(source, State):
            return LOAD_(self, source, kinds=kinds, resume=resume)
        if source.plan != self.plan:
            raise CheckpointError(
                f"a snapshot of\n{source.plan}\nwas given to a pair of\n{self.plan}\n\n"
                "Save to a directory and load that: files fit any composition."
            )
        self.write_({kind: source.leaves(kind) for kind in LEAVES})
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        for group, saved in zip(groups, source.settings, strict=True):
            for key in [key for key in group if key not in saved and key != "params"]:
                del group[key]  # a count that the first step puts there
            for key, value in _copied(saved).items():
                now = group.get(key)
                if isinstance(now, Tensor) and isinstance(value, Tensor):
                    now.copy_(value)  # what reads a rate from a tensor holds that very tensor
                else:
                    group[key] = value
        return True

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        kinds: tuple[Kind, ...] = KINDS,
        keep: int | None = None,
        asynchronous: bool = False,
        **options: Any,
    ) -> Saving:
        """Write the training state, each rank its own slices; see `parallax.checkpoint.save`."""
        self._live("save")
        self.free("save")
        return SAVE(self, directory, kinds=kinds, keep=keep, asynchronous=asynchronous, **options)

    def export(
        self,
        directory: str | os.PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> Path:
        """Write a model directory for transformers; see `parallax.checkpoint.export`."""
        self._live("export")
        return EXPORT(self, directory, dtype=dtype, tokenizer=tokenizer, **options)

    def load_pretrained(self, path: str | os.PathLike[str], *, strict: bool = True) -> Any:
        """Read a model's weights by name; see `parallax.checkpoint.load_pretrained`."""
        self._live("load_pretrained")
        return LOAD_PRETRAINED(self, path, strict=strict)

    @torch.no_grad()
    def write_(self, tree: dict[str, Any], *, kinds: tuple[Kind, ...] = KINDS) -> None:
        """Write leaves (as laid out on this rank, or still in files) into the live pair."""
        self.zero_grad()  # gradients of other weights must not reach the next update
        self._draft.settle()
        for kind in ("params", "buffers"):
            if kind in kinds:
                mine = self.leaves(kind)
                for name, value in tree[kind].items():
                    _write(local(mine[name]), value)
        if self.optimizer is not None and "moments" in kinds:
            self._write_moments(tree["moments"])
        for name, room in self.rooms.items() if "rooms" in kinds else ():
            if name in tree["rooms"]:
                _write_into(room.state, tree["rooms"][name])
            elif room.restart is not None:
                room.restart()
        if "step" in kinds:
            self._step = torch.as_tensor(tree["step"]).clone()

    def _write_moments(self, moments: dict[str, dict[str, Any]]) -> None:
        assert self.optimizer is not None
        state = self.optimizer.state
        params = self.leaves("params")
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for name, parameter in params.items():
            if id(parameter) not in held:
                continue
            if name not in moments:
                state.pop(parameter, None)
                continue
            before = state.pop(parameter, {})
            state[parameter] = {
                slot: _again(before.pop(slot, None), value) for slot, value in moments[name].items()
            }

    def leaves(self, kind: Kind) -> Any:
        """The tensors of one kind, as laid out on this rank: what a checkpoint holds."""
        if self._frozen is not None:
            return self._frozen[kind]
        names, parts = self._draft.names, self._draft.parts
        if kind == "params":
            return names.parameters_of(*parts)
        if kind == "buffers":
            return names.buffers_of(*parts)
        if kind == "rooms":
            return {name: room.state for name, room in self.rooms.items() if room.state}
        if kind == "step":
            return self._step
        state = self.optimizer.state if self.optimizer is not None else {}
        named = names.parameters_of(*parts)
        return {name: dict(state[p]) for name, p in named.items() if state.get(p)}

    def _live(self, verb: str) -> None:
        if self._frozen is not None:
            raise StepError(
                f"{verb} was called on a snapshot, which holds tensors and trains nothing.\n\n"
                "Call it on the boosted pair; boosted.load_(snapshot) writes the snapshot back."
            )

    def free(self, verb: str) -> None:
        """Raise unless the pair may be saved, loaded into or copied now; on every rank alike."""
        for room in self.rooms.values():
            if room.overdue is not None:
                room.overdue(verb != "load_")
            if room.busy:
                raise StepError(
                    f"{verb} was called {room.busy}, where parameters are not what training goes "
                    "on from.\n\nLeave the block first."
                )


def _copied(entries: dict[str, Any]) -> dict[str, Any]:
    return {k: _new(v) for k, v in entries.items()}


def _again(before: Any, value: Any) -> Any:
    """A leaf of the optimizer's state, in the memory of the one before where it is still in a file.

    So that a load holds no tensor twice; the caller lets go of `before`.
    """
    if hasattr(value, "read_into") and value.like(before):
        value.read_into(local(before))
        return before
    del before
    return _new(value)


def _new(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.read() if hasattr(value, "read_into") else value


def _write(target: Tensor, value: Tensor | Unread) -> None:
    if isinstance(value, Tensor):
        target.copy_(local(value))
    else:
        value.read_into(target)


def _write_into(target: dict[str, Any], source: dict[str, Any]) -> None:
    """Write a room's state in place: its rewrite holds the very same tensors."""
    for key, value in source.items():
        if isinstance(value, dict):
            _write_into(target[key], value)
        elif isinstance(target.get(key), Tensor) and (
            isinstance(value, Tensor) or hasattr(value, "read_into")
        ):
            _write(local(target[key]), value)
        else:
            target[key] = value
