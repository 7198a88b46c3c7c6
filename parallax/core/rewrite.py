"""Rewrites: the functions that carry out what facts state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.core.phase import Phase
from parallax.errors import ParallaxError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from parallax.core.names import Names
    from parallax.core.plan import Plan
    from parallax.core.step import StandIn
    from parallax.core.weigh import Weighing

LossFn = Callable[[Any, Any], Any]
Grad = Callable[[LossFn, Any], Tensor]
Update = Callable[[], bool | Tensor | None]


class Sync(Protocol):
    """See `Draft.sync`."""

    def __call__(self, reduce: bool, last: bool | None = None) -> None:
        """Say it of the next backward."""
        ...


Gradients = Callable[[], dict[str, Tensor]]
Settle = Callable[[], None]
Forget = Callable[[], None]
Context = Callable[[], AbstractContextManager[Any]]


class Draft(NamedTuple):
    """The model/optimizer pair under construction, with the verbs that will train it.

    Attributes:
        parts: The modules of this rank: one, or this rank's pipeline stages.
        optimizer: The optimizer, or None when only a model was given.
        mesh: The device mesh with all five named axes.
        names: Original full names of parameters and buffers.
        grad: `(loss_fn, batch) -> loss`: runs forward and backward and fills `.grad`.
        update: `() -> took place`: consumes `.grad` and changes the parameters. False, or a 0-dim
            bool tensor that is false, when it was skipped; None counts as true.
        sync: `(reduce, last=reduce) -> None`: whether the next backward reduces gradients over the
            data axes, and whether it is the last before an update, which waits for reductions to
            end.
        gradients: `() -> tensors`: this rank's parts of all gradients as they stand, reduced or
            not, to be changed in place; by name, with `"/unreduced"` behind it where they are kept
            elsewhere than in `.grad`.
        settle: `() -> None`: runs before every update, outside all wrappers of it: brings gradients
            and parameters into the form an update needs, or says why they cannot be.
        forget: `() -> None`: drops gradients that are kept elsewhere than in `.grad`.
        context: A context manager's maker: what must surround the loss function and the backward.
        stand_in: What a data rank without rows runs on.
        weighing: What turns losses into what backward runs on.
    """

    parts: tuple[nn.Module, ...]
    optimizer: Optimizer | None
    mesh: DeviceMesh
    names: Names
    grad: Grad
    update: Update
    sync: Sync
    gradients: Gradients
    settle: Settle
    forget: Forget
    context: Context
    stand_in: StandIn
    weighing: Weighing


@dataclass
class Room:
    """What a rewrite keeps at run time: its own entry of `boosted.rooms`.

    Attributes:
        state: Tensors that belong to the training state; leaves of the boosted pair, saved.
        notes: Everything else: what was decided, for people to read and for the rewrite's own use.
        restart: Puts the state back to its beginning: called where a checkpoint holds none for it,
            because the run that saved it was composed without this rewrite.
        skips: Whether its update may leave an update out.
        busy: Where the pair is, while it must be neither saved nor loaded into, as an error says
            it: `"inside boosted.averaged()"`.
        overdue: Called before saving and loading: says what the rewrite knows by now of an update
            before; told false, it forgets it.
    """

    state: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    restart: Callable[[], None] | None = None
    skips: bool = False
    busy: str = ""
    overdue: Callable[[bool], None] | None = None


def no_faults(draft: Draft, plan: Plan) -> Iterable[ParallaxError]:
    """The check of a rewrite that can refuse nothing."""
    return ()


@dataclass(frozen=True)
class Rewrite:
    """A named step of construction. Module-level constant; all arguments live in facts.

    Attributes:
        name: Key of its room in `boosted.rooms`; also what equality and hashing go by.
        phase: When it runs.
        build: `(draft, plan) -> (draft, room)`; may change modules in place.
        check: `(draft, plan) -> faults`; looks, changes nothing. All checks of a composition run
            before the first build, so that a refused composition leaves the model as it was.

    Example:
        >>> from parallax.core.phase import Phase
        >>> Rewrite("nothing", Phase.CLIP, lambda draft, plan: (draft, Room()))
        Rewrite(nothing)
    """

    name: str
    phase: Phase = field(compare=False)
    build: Callable[[Draft, Plan], tuple[Draft, Room]] = field(compare=False)
    check: Callable[[Draft, Plan], Iterable[ParallaxError]] = field(
        default=no_faults, compare=False
    )

    def __repr__(self) -> str:
        return f"Rewrite({self.name})"
