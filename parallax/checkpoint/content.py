"""What of a boosted pair a checkpoint holds, as this rank sees it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallax.checkpoint.files import flat
from parallax.checkpoint.groups import settings
from parallax.checkpoint.layout import Spec
from parallax.checkpoint.plain import plain
from parallax.checkpoint.random import generators
from parallax.checkpoint.texts import texts
from parallax.core.axes import AXES
from parallax.core.boosted import Boosted
from parallax.core.slices import Box, box, held_once, local
from parallax.core.state import KINDS, Kind
from parallax.errors import CheckpointError


class Row(NamedTuple):
    """A piece that this rank writes: the tensor's key, dtype and shape, and which box of it."""

    key: str
    spec: Spec
    box: Box


@dataclass
class Content:
    """This rank's share of a checkpoint.

    Attributes:
        rows: The pieces it writes.
        parts: Their bytes, as live tensors on any device.
        values: State that is no tensor, of which it has the only word.
        about: What the index says of the run; of rank 0.
        texts: Further files; of rank 0.
        prefix: What is put into the names of the model's files.
    """

    rows: list[Row] = field(default_factory=list)
    parts: list[Tensor] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    prefix: str | None = None

    @property
    def size(self) -> int:
        """Bytes of its pieces, as they are in memory."""
        return sum(part.nbytes for part in self.parts)

    def add(self, key: str, value: Tensor, piece: Box | None = None) -> None:
        """Write a tensor, or this rank's box of it."""
        dtype = str(value.dtype).removeprefix("torch.")
        piece = box(value) if piece is None else piece
        self.rows.append(Row(key, Spec(dtype, tuple(value.shape)), piece))
        self.parts.append(local(value.detach()))

    def add_plain(self, key: str, state: Any, what: str) -> None:
        """Write a state of plain values and tensors."""
        tensors: list[Tensor] = []
        self.values[key] = plain(state, what, tensors)
        for number, tensor in enumerate(tensors):
            self.add(f"{key}/{number}", tensor)


@torch.no_grad()
def content(boosted: Boosted, kinds: tuple[Kind, ...]) -> Content:
    """This rank's share of a checkpoint of the given kinds of state.

    Raises:
        CheckpointError: The optimizer, or something attached, keeps what no file can hold.
    """
    found = Content()
    coordinate = boosted.mesh.get_coordinate()
    assert coordinate is not None, "every rank of the world is in the mesh"
    rank = boosted.mesh.get_rank()
    leaves = ("params", "buffers", "moments", "rooms")
    _refuse_nested(boosted, kinds)
    for key, value in flat({kind: boosted.leaves(kind) for kind in kinds if kind in leaves}):
        owner = owner_of(boosted, key)
        if owner not in (None, rank):
            continue
        if not isinstance(value, Tensor):
            found.values[key] = _value(boosted, key, value)
            continue
        if type(value) not in (Tensor, DTensor, nn.Parameter):
            # A subclass (quantised state, say) computes its elements from others inside.
            raise CheckpointError(_no_file(boosted, key, value))
        piece = box(value)
        answers = owner is not None or held_once(value, coordinate, AXES)
        if answers and (not piece.empty or value.numel() == 0):
            found.add(key, value, piece)
    if "random" in kinds:
        found.add_plain(f"random/{rank}", generators(), "the random generators")
    if rank == 0:
        if "attached" in kinds:
            for name, state in boosted.along.states().items():
                found.add_plain(f"attached/{name}", state, name)
        if "params" in kinds:
            found.texts = texts(boosted.model)
        found.about = _about(boosted, kinds)
    return found


def _refuse_nested(boosted: Boosted, kinds: tuple[Kind, ...]) -> None:
    """Refuse dicts in the optimizer's state: a path of names would not tell where one begins."""
    for name, row in (boosted.moments if "moments" in kinds else {}).items():
        for slot, value in row.items():
            if isinstance(value, dict):
                raise CheckpointError(_no_file(boosted, f"moments/{name}/{slot}", value))


def wrong_kinds(kinds: object) -> bool:
    """Whether something is no choice of kinds of state."""
    if isinstance(kinds, str) or not isinstance(kinds, Collection) or not kinds:
        return True
    return any(kind not in KINDS for kind in kinds)


def owner_of(boosted: Boosted, key: str) -> int | None:
    """The rank that alone holds the state under a key; None where ranks hold parts, or the same."""
    kind, _, rest = key.partition("/")
    return boosted.owners.get(rest.rpartition("/")[0]) if kind == "moments" else None


def _about(boosted: Boosted, kinds: tuple[Kind, ...]) -> dict[str, Any]:
    about: dict[str, Any] = {
        "composition": boosted.plan.composition,
        "step": boosted.step,
        "world": dict(boosted.plan.sizes),
        "kinds": list(kinds),
    }
    if boosted.optimizer is not None and "moments" in kinds:
        about |= {"groups": settings(boosted), "optimizer": type(boosted.optimizer).__name__}
    return about


def _value(boosted: Boosted, key: str, value: Any) -> Any:
    try:
        return plain(value, key)
    except CheckpointError:
        raise CheckpointError(_no_file(boosted, key, value)) from None


def _no_file(boosted: Boosted, key: str, value: Any) -> str:
    kind, _, rest = key.partition("/")
    name, _, slot = rest.rpartition("/")
    who = f"{type(boosted.optimizer).__name__} keeps" if kind == "moments" else "model holds"
    what = f"{slot} of {name}" if kind == "moments" else rest
    return (
        f"the {'optimizer ' * (kind == 'moments')}{who} a {type(value).__name__} as {what}, and a "
        "checkpoint holds plain tensors, numbers and text.\n\nUse an optimizer whose state is "
        "plain, or save the rest: boosted.save(directory, kinds=('params', 'buffers', 'rooms', "
        "'step'))."
    )
