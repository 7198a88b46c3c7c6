"""The boosted pair: a model and an optimizer with the verbs that train them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from parallax.core.collect import collect
from parallax.core.late import Late
from parallax.core.mesh import device_of, rank_on
from parallax.core.names import Names
from parallax.core.plan import Plan
from parallax.core.rewrite import Draft, LossFn, Room
from parallax.core.slices import cut, local
from parallax.core.step import Seen, cut_rows, loss_of, read_loss, rows_of, to_device, weigh
from parallax.errors import CheckpointError, DataError, StepError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

Kind = Literal["params", "buffers", "moments", "rooms", "step"]

# Verbs of the pair that rooms carry out. The pair knows their addresses and nothing else of them,
# as a transform knows its rewrites': core imports no room.
LOADER = Late("parallax.data:loader")
SAVE = Late("parallax.checkpoint:save")
LOAD_ = Late("parallax.checkpoint:load_")

KINDS: tuple[Kind, ...] = ("params", "buffers", "moments", "rooms", "step")


class Boosted:
    """A rewritten model/optimizer pair. Made by calling a transform.

    A tree of optree's namespace `"parallax"` with the leaves `params`, `buffers`, `moments`,
    `rooms` and `step`, which are exactly what a checkpoint holds; they are read when the tree is
    flattened, so they are always current. `optree.tree_map(torch.clone, boosted,
    namespace="parallax")` is a snapshot; `boosted.load_(snapshot)` writes it back.

    Attributes:
        model: The model, rewritten in place. Call it as before.
        optimizer: The optimizer, re-pointed in place, or None. Its `step()` is the whole update,
            with clipping and whatever else is composed.
        mesh: The torch `DeviceMesh` with the axes pp, data_replicate, data_shard, sp, tp.
        plan: What was carried out; print it.
        rooms: What each rewrite keeps, by its name.
    """

    def __init__(
        self, draft: Draft, plan: Plan, rooms: dict[str, Room], title: str, seen: Seen
    ) -> None:
        self._draft = draft
        self._step = torch.zeros((), dtype=torch.int64)
        self._frozen: dict[str, Any] | None = None
        self.plan = plan
        self.rooms = rooms
        self.title = title
        self._seen = seen

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

    @property
    def grad_norm(self) -> Tensor | None:
        """The global gradient norm of the last update, before clipping, 0-dim.

        None unless `clip` is composed and a step was made. Reading it does not synchronise with the
        device; `.item()` does.
        """
        room = self.rooms.get("clip")
        return None if room is None else room.notes.get("norm")

    # -- verbs -------------------------------------------------------------------------------------

    def train_step(self, loss_fn: LossFn, batch: Any) -> Tensor:
        """Run forward, backward and one update, then forget the gradients.

        Gradients that are there already, from `grad` or `backward`, are added to.

        Args:
            loss_fn: `loss_fn(model, batch)` returns the mean loss over this rank's samples, or the
                pair `(sum, count)`. With a mean, ranks count by their number of samples (the first
                dim of the batch's tensors). With a pair, the global sum over the global count is
                minimised, exactly, whatever the counts are.
            batch: This rank's part of the global batch: what `loader` yields or `shard` returns.
            Its
                tensors are moved to this rank's device.

        Returns:
            The global loss, 0-dim, equal on every rank.

        Raises:
            StepError: The loss has another form, or there is no optimizer.
            DataError: A mean loss over a batch whose tensors disagree about their first dim.
        """
        loss = self.grad(loss_fn, batch)
        self.update()
        self.zero_grad()
        return loss

    def grad(self, loss_fn: LossFn, batch: Any) -> Tensor:
        """The first half of `train_step`: fills `.grad`, changes no parameter."""
        self._live("grad")
        try:
            return self._draft.grad(loss_fn, to_device(batch, device_of(self.mesh)))
        except BaseException:
            self.zero_grad()  # part of an interrupted backward must not reach the next update
            raise

    def update(self) -> None:
        """The second half of `train_step`: consumes `.grad`. The same as `optimizer.step()`.

        Raises:
            StepError: There is no optimizer, or it can only step with a closure.
        """
        self._live("update")
        if self.optimizer is None:
            raise StepError(
                "this model was boosted without an optimizer, so there is nothing to step.\n\n"
                "Give one: transform(model, optimizer)."
            )
        self.optimizer.step()  # not past it: attached schedulers watch this call

    @property
    def grads(self) -> dict[str, Tensor]:
        """This rank's gradients by original name, reduced as an update would use them.

        Collective when a composition leaves a reduction to the update: read it on every rank.
        """
        self._live("grads")
        self._draft.settle()
        return {name: p.grad for name, p in self.params.items() if p.grad is not None}

    def zero_grad(self) -> None:
        """Forget all gradients, also those of parameters that no optimizer group holds."""
        for part in self._draft.parts:
            for parameter in part.parameters():
                parameter.grad = None
        self._draft.forget()

    def eval_step(self, loss_fn: LossFn, batch: Any) -> Tensor:
        """The global loss of a batch in evaluation mode, without gradients; as in `train_step`."""
        self._live("eval_step")
        training = [m for part in self._draft.parts for m in part.modules() if m.training]
        try:
            for part in self._draft.parts:
                part.eval()
            with torch.no_grad(), self.context():
                batch = to_device(batch, device_of(self.mesh))
                value, count, is_sum = loss_of(loss_fn, self.model, batch, self._draft.stand_in)
                return weigh(value, count, is_sum, self.mesh)[0]
        finally:
            for module in training:
                module.training = True

    def context(self) -> AbstractContextManager[Any]:
        """What must surround the loss function in a hand-written loop; mostly nothing.

        `train_step` and `eval_step` enter it themselves. `tp(n, loss_parallel=True)` needs it:
        `with boosted.context(): loss = loss_fn(boosted.model, batch); boosted.backward(loss)`.
        """
        return self._draft.context()

    def backward(self, loss: Tensor, *, count: Tensor | float | None = None) -> None:
        """Backward of a hand-written loop.

        Args:
            loss: This rank's mean loss over the rows that the model ran on last; ranks weigh by
                these. With `count`: this rank's sum, to be divided by the sum of all ranks' counts.
            count: What this rank's sum is over (samples, tokens).

        Raises:
            StepError: The loss is no scalar, or the count is negative or not finite.
        """
        self._live("backward")
        if isinstance(count, int | float) and not 0 <= count < math.inf:
            raise StepError(
                f"backward was given count={count!r}.\n\nGive what this rank's sum is over: a "
                "number of samples or tokens, zero or more."
            )
        value, _, is_sum = read_loss(loss if count is None else (loss, count), None)
        weight = count if count is not None else (1 if self._seen.rows is None else self._seen.rows)
        factor = weigh(value, weight, is_sum, self.mesh)[1]
        (value.to(factor.dtype) * factor).backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only add up on this rank; the next one outside reduces the sum."""
        self._live("no_sync")
        self._draft.sync(False)
        try:
            yield
        finally:
            self._draft.sync(True)

    # -- data --------------------------------------------------------------------------------------

    def shard(self, batch: Any) -> Any:
        """Cut a global batch along its first dim over the data axes.

        Args:
            batch: Any tree of tensors and other values, equal on all ranks. Arrays, and lists of
                values, of as many rows as the tensors are cut too; the rest is passed on.

        Returns:
            This rank's part: contiguous rows; the first ranks hold one more when the rows do not
            divide.

        Raises:
            DataError: The tensors' first dims differ, or there are no rows.
        """
        rows = rows_of(batch)
        if rows is None:
            return batch
        if rows == 0:
            raise DataError(
                "shard was given a batch without rows.\n\nA step needs one row at least, on one "
                "rank."
            )
        self._draft.stand_in.remember(batch)
        ranks, rank = self.plan.size(), rank_on(self.mesh)
        start, end = cut(rows, ranks, rank)
        return cut_rows(batch, rows, start, end)

    def loader(
        self,
        dataset: Any,
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        num_workers: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> DataLoader[Any]:
        """Make a loader of this rank's part of each batch; see `parallax.data.loader`."""
        return LOADER(
            self.mesh,
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            num_workers=num_workers,
            drop_last=drop_last,
            **options,
        )

    # -- state -------------------------------------------------------------------------------------

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

    def gather(self) -> dict[str, Any] | None:
        """The whole, unsharded state on the CPU of rank 0; None on the other ranks.

        Returns:
            A dict of `params`, `buffers`, `moments`, `rooms` and `step`; on rank 0 only.

        Cost:
            One tensor at a time: beside rank 0's result no rank holds more than one whole tensor.
        """
        return collect({kind: self.leaves(kind) for kind in KINDS}, self.mesh)

    def load_(self, source: Boosted | str | os.PathLike[str]) -> None:
        """Write a snapshot, or a checkpoint directory, back into this pair, in place.

        Raises:
            CheckpointError: The source is missing, damaged, or does not fit.
        """
        self._live("load_")
        if not isinstance(source, Boosted):
            LOAD_(self, source)
            return
        if source.plan != self.plan:
            raise CheckpointError(
                f"a snapshot of\n{source.plan}\nwas given to a pair of\n{self.plan}\n\n"
                "Save to a directory and load that: files fit any composition."
            )
        self.write_({kind: source.leaves(kind) for kind in KINDS})

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the training state, each rank its part; see `parallax.checkpoint.save`."""
        self._live("save")
        SAVE(self, directory)

    @torch.no_grad()
    def write_(self, tree: dict[str, Any], *, kinds: tuple[Kind, ...] = KINDS) -> None:
        """Write leaves (as laid out on this rank) into the live pair."""
        self.zero_grad()  # gradients of other weights must not reach the next update
        self._draft.settle()
        for kind in ("params", "buffers"):
            if kind in kinds:
                mine = self.leaves(kind)
                for name, value in tree[kind].items():
                    local(mine[name]).copy_(local(value))
        if self.optimizer is not None and "moments" in kinds:
            self._write_moments(tree["moments"])
        for name, state in tree["rooms"].items():
            self.rooms[name].state.update(_copied(state))
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
            state[parameter] = _copied(moments[name])

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

    def __repr__(self) -> str:
        kind = "snapshot" if self._frozen is not None else "boosted"
        return f"<{kind} {self.title} at step {self.step}: {self.plan.composition}>"


def _copied(entries: dict[str, Any]) -> dict[str, Any]:
    return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in entries.items()}
