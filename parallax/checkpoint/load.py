"""Reading a checkpoint into any composition: every rank reads the slices it holds."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallax.checkpoint.background import wait_for
from parallax.checkpoint.content import wrong_kinds
from parallax.checkpoint.files import INDEX, flat
from parallax.checkpoint.folder import damaged, find
from parallax.checkpoint.groups import set_groups, settings
from parallax.checkpoint.layout import Spec
from parallax.checkpoint.plain import back
from parallax.checkpoint.random import restore, source
from parallax.checkpoint.read import Read, Reader, whole_box
from parallax.checkpoint.together import Ranks
from parallax.core.boosted import Boosted
from parallax.core.slices import Box, box, like, local
from parallax.core.state import KINDS, Kind
from parallax.errors import CheckpointError

OTHER = "Load another checkpoint."

Resume = Literal["must", "auto"]


def load(
    directory: str | os.PathLike[str],
    transform: Any,
    model_fn: Callable[[], nn.Module],
    optimizer_fn: Callable[[nn.Module], Optimizer] | None = None,
    *,
    kinds: tuple[Kind, ...] = KINDS,
    resume: Resume = "must",
) -> Boosted:
    """Make a model and an optimizer, boost them, and read a checkpoint into them.

    Args:
        directory: What `boosted.save` wrote: a checkpoint, or a folder of them, of which the newest
            is taken.
        transform: The composition to go on under; None takes the one it was saved under.
        model_fn: Makes the model.
        optimizer_fn: Makes its optimizer from the model.
        kinds: Which kinds of state to read.
        resume: `"auto"` begins anew where there is no checkpoint yet, so that a job that is
            restarted goes on by itself.

    Returns:
        The pair, at the step of the checkpoint.

    Raises:
        CheckpointError: There is none, it is damaged, or it does not fit.

    Example:
        >>> boosted = parallax.load("runs/a", zero(2), make_model, make_adamw)  # doctest: +SKIP
    """
    ranks = Ranks()
    path = _resolve(ranks, Path(directory), resume)
    if transform is None:
        if path is None:
            raise CheckpointError(
                f"load was given no transform, and there is no checkpoint at {directory} to take "
                "one from.\n\nGive the transform to begin with."
            )
        transform = ranks.do(lambda: _said(path), "the composition cannot be read", OTHER)
    model = model_fn()
    boosted = transform(model, optimizer_fn(model) if optimizer_fn else None)
    if path is not None:
        load_(boosted, path, kinds=kinds)
    return boosted


def _said(path: Path) -> Any:
    from parallax.core.late import Late

    with Reader(path) as reader:
        return Late("parallax.parse:parse")(reader.index.composition)


def load_(
    boosted: Boosted,
    directory: str | os.PathLike[str],
    *,
    kinds: tuple[Kind, ...] = KINDS,
    resume: Resume = "must",
) -> bool:
    """Read a checkpoint into a boosted pair, in place, whatever composition saved it.

    Args:
        boosted: The pair to write into; collective over all ranks.
        directory: What `save` wrote: a checkpoint, or a folder of them, of which the newest is
            taken.
        kinds: Which kinds of state to read.
        resume: `"auto"` changes nothing where there is no checkpoint yet.

    Returns:
        Whether there was one.

    Raises:
        CheckpointError: It is missing, damaged, or does not fit this model or optimizer. Raised on
            every rank before anything is changed.

    Cost:
        Each rank reads the slices it holds twice, to check them and to copy them; optimizer state
        that replaces none, once. Beside what it holds it needs two chunks (of about 4 MiB) of
        memory.
    """
    wait_for(boosted)
    boosted.free("load_")
    ranks = Ranks()
    ranks.do(lambda: _checked(kinds, resume))
    ranks.alike("load_", kinds=kinds, resume=resume)
    path = _resolve(ranks, Path(directory), resume)
    if path is None:
        return False
    what = f"the checkpoint {path} cannot be read"
    reader: Reader = ranks.do(lambda: Reader(path), what, OTHER)
    with reader:
        tree, states = ranks.do(lambda: _checked_leaves(boosted, reader, kinds), what, OTHER)
        if "attached" not in kinds:
            boosted.along.waiting = {}
        else:
            _give(boosted, ranks, states)
        ranks.do(
            lambda: boosted.write_(tree, kinds=kinds),
            f"{what} any more, and a part of the pair is loaded",
            "Load another checkpoint before training goes on.",
        )
        if boosted.optimizer is not None and "moments" in kinds:
            boosted.along.again = partial(set_groups, boosted.optimizer, reader.index.groups)
            boosted.along.again()
        if "random" in kinds and "random" in reader.index.kinds:
            ranks.do(lambda: restore(*_randomness(boosted, reader)), what, OTHER)
    return True


def _give(boosted: Boosted, ranks: Ranks, states: dict[str, Any]) -> None:
    """Hand states to what is attached; where one rank's refuses, no rank's has it."""
    undo: list[Callable[[], None]] = []
    what = "what is attached took no state"
    try:
        ranks.do(lambda: undo.append(boosted.along.load(states)), what, OTHER)
    except CheckpointError:
        for back_again in undo:
            back_again()
        raise


def _checked(kinds: tuple[Kind, ...], resume: str) -> None:
    if wrong_kinds(kinds):
        raise CheckpointError(
            f"load_ was given kinds={kinds!r}.\n\nGive some of {', '.join(KINDS)}."
        )
    if resume not in ("must", "auto"):
        raise CheckpointError(f"load_ was given resume={resume!r}.\n\nGive 'must' or 'auto'.")


def _resolve(ranks: Ranks, directory: Path, resume: str) -> Path | None:
    """The checkpoint that is meant, as rank 0 sees it; None where none need be and none is."""
    path = directory.expanduser().absolute()

    def look() -> Path | None:
        lost = damaged(path)
        if lost is not None and (lost != path or resume == "auto"):
            raise CheckpointError(
                f"{lost} holds tensors and no {INDEX}, so it is a checkpoint that was damaged.\n\n"
                "Remove it, or load another one by its own path."
            )

        return find(path)

    found = ranks.on_first(look, f"{path} cannot be looked into", OTHER)
    return found if found is not None or resume == "auto" else path


def _checked_leaves(
    boosted: Boosted, reader: Reader, kinds: tuple[Kind, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """This rank's leaves, still in the files but checked, and the states of what goes along."""
    faults = [*_faults(boosted, reader, kinds)]
    if faults:
        shown = "\n".join(f"  {fault}" for fault in faults[:8])
        more = f"\n  and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise CheckpointError(
            f"the checkpoint {reader.directory} does not fit {boosted.title}:\n{shown}{more}\n\n"
            "Build the model and the optimizer's groups as they were when it was saved, attach "
            "what was attached, or read less of it with kinds=."
        )
    tree = _leaves(boosted, reader, kinds)
    slices = [leaf for _, leaf in flat(tree) if isinstance(leaf, Slice)]
    reader.check(*(Read(leaf.key, leaf.wanted, leaf.early) for leaf in slices))
    states = {}
    if "attached" in kinds:
        states = {
            key.removeprefix("attached/"): _plain_state(reader, key)
            for key in reader.index.values
            if key.startswith("attached/")
        }
    if "random" in kinds and "random" in reader.index.kinds:
        _randomness(boosted, reader)
    return tree, states


def _faults(boosted: Boosted, reader: Reader, kinds: tuple[Kind, ...]) -> list[str]:
    index, faults = reader.index, []
    told = [kind for kind in kinds if kind not in index.kinds and kind in ("params", "moments")]
    if told and index.kinds and (told != ["moments"] or boosted.optimizer is not None):
        return [f"it holds {', '.join(index.kinds)} only; read them with kinds={(*index.kinds,)!r}"]
    for kind in ("params", "buffers"):
        if kind not in kinds:
            continue
        here = {f"{kind}/{name}": t for name, t in boosted.leaves(kind).items()}
        saved = {key for key in index.tensors if key.startswith(f"{kind}/")}
        faults += [
            f"{key[len(kind) + 1 :]} is in the model only" for key in here if key not in saved
        ]
        faults += [
            f"{key[len(kind) + 1 :]} is in the checkpoint only" for key in sorted(saved - set(here))
        ]
        faults += [
            f"{key[len(kind) + 1 :]} has shape {index.tensors[key].shape} in the checkpoint and "
            f"{tuple(t.shape)} in the model"
            for key, t in here.items()
            if key in saved and index.tensors[key].shape != tuple(t.shape)
        ]
    if boosted.optimizer is not None and "moments" in kinds:
        kind = type(boosted.optimizer).__name__
        if index.optimizer != kind:
            faults.append(f"the optimizer is {kind}, the checkpoint's is {index.optimizer}")
        mine = [row["params"] for row in settings(boosted)]
        theirs = [row["params"] for row in index.groups]
        if mine != theirs:
            faults.append(
                f"the optimizer has {len(mine)} groups of {[len(m) for m in mine]} parameters, the "
                f"checkpoint {len(theirs)} of {[len(m) for m in theirs]}, or in another order"
            )
    if "attached" in kinds and "attached" in index.kinds:
        saved = {key.removeprefix("attached/") for key in index.values}
        faults += [f"{name} is attached here only" for name in boosted.along.missing(saved)]
    return faults


@dataclass(frozen=True)
class Slice:
    """A leaf that is still in a file: this rank's box of a tensor.

    Attributes:
        reader: What reads it.
        key: The tensor's key.
        wanted: This rank's box.
        model: What the leaf is laid out like; None for a plain tensor.
        device: Where it goes.
        dtype: What it becomes.
        early: The new tensor, filled while checking; None where it waits until all is checked.
    """

    reader: Reader
    key: str
    wanted: Box
    model: Tensor | None
    device: torch.device
    dtype: torch.dtype
    early: Tensor | None = None

    def read(self) -> Tensor:
        """The leaf as a new tensor."""
        part = self.early
        if part is None:
            part = torch.empty(self.wanted.lengths, dtype=self.dtype, device=self.device)
            self.reader.copy_(part, self.key, self.wanted)
        return part if self.model is None else like(part, self.model)

    def read_into(self, target: Tensor) -> None:
        """The leaf, written into a rank's part."""
        self.reader.copy_(target, self.key, self.wanted)

    def like(self, other: Any) -> bool:
        """Whether something is laid out as the leaf will be."""
        if not isinstance(other, Tensor) or isinstance(other, DTensor) is (self.model is None):
            return False
        part = local(other)
        found = tuple(part.shape), part.dtype, part.device
        return found == (self.wanted.lengths, self.dtype, self.device)


def _slice(reader: Reader, key: str, target: Tensor) -> Slice:
    part = local(target)
    return Slice(reader, key, box(target), target, part.device, part.dtype)


def _leaves(boosted: Boosted, reader: Reader, kinds: tuple[Kind, ...]) -> dict[str, Any]:
    index = reader.index
    tree: dict[str, Any] = {"params": {}, "buffers": {}, "moments": {}, "rooms": {}}
    tree["step"] = torch.tensor(index.step)
    with torch.no_grad():
        for kind in ("params", "buffers"):
            if kind in kinds:
                for name, target in boosted.leaves(kind).items():
                    tree[kind][name] = _slice(reader, f"{kind}/{name}", target)
        if "moments" in kinds and boosted.optimizer is not None:
            tree["moments"] = _moments(boosted, reader)
        if "rooms" in kinds:
            for room, state in boosted.rooms.items():
                for entry, target in flat(state.state):
                    key = f"rooms/{room}/{entry}"
                    if key in index.tensors and isinstance(target, Tensor):
                        leaf: Any = _slice(reader, key, target)
                    elif key in index.values:
                        leaf = back(index.values[key])
                    else:
                        continue
                    _put(tree["rooms"].setdefault(room, {}), entry, leaf)
    return tree


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split("/")
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[last] = value


def _moments(boosted: Boosted, reader: Reader) -> dict[str, dict[str, Any]]:
    moments: dict[str, dict[str, Any]] = {}
    index, params, held = reader.index, boosted.params, boosted.moments
    counts = _counts_on_device(boosted)
    for key in (*index.tensors, *index.values):
        if not key.startswith("moments/"):
            continue
        name, _, slot = key.removeprefix("moments/").rpartition("/")
        owner = boosted.owners.get(name)
        if name not in params or owner not in (None, boosted.mesh.get_rank()):
            continue
        row = moments.setdefault(name, {})
        if key in index.values:
            row[slot] = back(index.values[key])
            continue
        entry, parameter = index.tensors[key], params[name]
        # What is stepped whole keeps its state whole, at its owner.
        shaped = owner is None and entry.shape == tuple(parameter.shape) and len(entry.shape) > 0
        # The step count lives on the CPU unless a kernel reads it; everything else with its
        # parameter.
        on_cpu = slot == "step" and id(parameter) not in counts
        wanted = box(parameter) if shaped else whole_box(entry.shape)
        device = torch.device("cpu") if on_cpu else local(parameter).device
        dtype = _dtype(reader, name, entry.spec, parameter)
        # Where no state is replaced, there is room for the new one, and nothing that it changes.
        fresh = name not in held
        early = torch.empty(wanted.lengths, dtype=dtype, device=device) if fresh else None
        model = parameter if shaped else None
        row[slot] = Slice(reader, key, wanted, model, device, dtype, early)
    return moments


def _dtype(reader: Reader, name: str, spec: Spec, parameter: Tensor) -> torch.dtype:
    """What state becomes: that of its parameter's shape and dtype follows it into another dtype."""
    saved = reader.index.tensors.get(f"params/{name}")
    follows = saved is not None and saved.spec == spec and len(spec.shape) > 0
    return parameter.dtype if follows else getattr(torch, spec.dtype)


def _counts_on_device(boosted: Boosted) -> set[int]:
    """Parameters whose step count torch keeps on their device: of capturable and fused groups."""
    assert boosted.optimizer is not None, "only asked for where there is one"
    return {
        id(p)
        for group in boosted.optimizer.param_groups
        if group.get("capturable") or group.get("fused")
        for p in group["params"]
    }


def _plain_state(reader: Reader, key: str) -> Any:
    tensors = []
    while (name := f"{key}/{len(tensors)}") in reader.index.tensors:
        tensors.append(reader.tensor(name))
    try:
        return back(reader.index.values[key], tensors)
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise CheckpointError(
            f"{key} in {reader.directory} cannot be read: {error}.\n\nThe checkpoint is damaged; "
            "load another one."
        ) from None


def _randomness(boosted: Boosted, reader: Reader) -> tuple[dict[str, Any], int]:
    here = dict(boosted.plan.sizes)
    rank, number = source(reader.index.world, here, boosted.mesh.get_rank())
    return _plain_state(reader, f"random/{rank}"), number
