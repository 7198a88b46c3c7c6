"""The boosted pair: a model and an optimizer with the verbs that train them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from parallax.core.along import Along
from parallax.core.late import Late
from parallax.core.mesh import device_of, rank_on
from parallax.core.plan import Plan
from parallax.core.rewrite import Draft, LossFn, Room
from parallax.core.slices import cut
from parallax.core.state import State
from parallax.core.step import Seen, cut_rows, loss_of, read_loss, rows_of, to_device
from parallax.core.weigh import weigh
from parallax.errors import DataError, StepError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

# Verbs that a room carries out, by address, since core imports no room.
LOADER = Late("parallax.data:loader")
AVERAGED = Late("parallax.step.average:averaged")
ATTACH = Late("parallax.step.attach:attach")
WINDOWS = Late("parallax.step.accumulate:windows")


class Boosted(State):
    """A rewritten model/optimizer pair. Made by calling a transform.

    A tree of optree's namespace `"parallax"` with the leaves `params`, `buffers`, `moments`,
    `rooms` and `step`: what a checkpoint holds of the pair itself. They are read when the tree is
    flattened, so they are always current. `optree.tree_map(torch.clone, boosted,
    namespace="parallax")` is a snapshot; `boosted.load_(snapshot)` writes it back.

    Attributes:
        model: The model, rewritten in place. Call it as before.
        optimizer: The optimizer, re-pointed in place, or None. Its `step()` is the whole update,
            with clipping and whatever else is composed.
        mesh: The torch `DeviceMesh` with the axes pp, data_replicate, data_shard, sp, tp.
        plan: What was carried out; print it.
        rooms: What each rewrite keeps, by its name.
        along: What goes along into checkpoints, by name; see `attach`.
        saving: The asynchronous saving that nobody has waited for yet, or None.
    """

    def __init__(
        self, draft: Draft, plan: Plan, rooms: dict[str, Room], title: str, seen: Seen
    ) -> None:
        self._draft = draft
        self._step = torch.zeros((), dtype=torch.int64)
        self._took_place: bool | Tensor = True
        self.along = Along()
        self.saving = None
        self._frozen: dict[str, Any] | None = None
        self.plan = plan
        self.rooms = rooms
        self.title = title
        self._seen = seen
        self._loaders = 0

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
        try:
            self.update()
        finally:
            self.zero_grad()  # also after a refused update: its gradients must not reach the next
        return loss

    def grad(self, loss_fn: LossFn, batch: Any) -> Tensor:
        """The first half of `train_step`: fills `.grad`, changes no parameter."""
        self._live("grad")
        self._go_on()
        try:
            return self._draft.grad(loss_fn, to_device(batch, device_of(self.mesh)))
        except BaseException:
            self.zero_grad()  # part of an interrupted backward must not reach the next update
            raise

    def update(self) -> None:
        """The second half of `train_step`: consumes `.grad`. The same as `optimizer.step()`.

        `boosted.took_place` says afterwards whether it changed the parameters.

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
    def took_place(self) -> bool:
        """Whether the last update changed the parameters, or was skipped by `fp16` or `clip`.

        Reading it waits for the device where only the device knows.
        """
        return bool(self._took_place)

    def attach(
        self, thing: Any, *, name: str | None = None, per: Literal["update", "epoch"] = "update"
    ) -> Any:
        """Let a scheduler, or anything with state, go along; see `parallax.step.attach`."""
        self._live("attach")
        return ATTACH(self, thing, name=name, per=per)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it the model computes with averaged weights; see `parallax.ema`. Collective."""
        self._live("averaged")
        self._draft.settle()  # what a forward left gathered would be used again
        with AVERAGED(self):
            try:
                yield
            finally:
                self._draft.settle()

    @property
    def grads(self) -> dict[str, Tensor]:
        """This rank's gradients by original name, reduced as an update would use them.

        Collective when a composition leaves a reduction to the update: read it on every rank.
        """
        self._live("grads")
        self._draft.settle()
        return {name: p.grad for name, p in self.params.items() if p.grad is not None}

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
        self._draft.weighing.backward(value, weight, is_sum)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only add up on this rank; the next one outside reduces the sum."""
        self._live("no_sync")
        self._draft.sync(False, False)
        try:
            yield
        finally:
            self._draft.sync(True, True)

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
        name: str | None = None,
        **options: Any,
    ) -> DataLoader[Any]:
        """Make a loader of this rank's part of each batch; see `parallax.data.loader`.

        Its place in the data goes along into checkpoints: by `name`, or else by the order in which
        loaders are made.
        """
        made = LOADER(
            self.mesh,
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            num_workers=num_workers,
            drop_last=drop_last,
            **options,
        )
        if name is None:
            self._loaders += 1
            name = "loader" if self._loaders == 1 else f"loader-{self._loaders}"
        if self._frozen is None:
            self.along.add(made, name, weak=True)
        return made

    def windows(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Group batches of this rank into windows of one update; see `parallax.accumulate`.

        The last window is short when the batches run out.
        """
        self._live("windows")
        return WINDOWS(self, batches)

    def _go_on(self) -> None:
        """Refuse to train on without state that a checkpoint held."""
        self.along.again = None
        names = self.along.overdue()
        if not names:
            return
        raise StepError(
            f"the checkpoint holds the state of {', '.join(names)}, and nothing of that name was "
            "attached, so "
            "that training would not go on as it was.\n\nMake boosted.loader(..., name=...) and "
            "boosted.attach(scheduler, name=...) as in the run that saved it, or load without "
            "them: boosted.load_(directory, kinds=('params', 'buffers', 'moments', 'rooms', "
            "'step', 'random'))."
        )

    def _count(self, took_place: bool | Tensor | None) -> None:
        """Note what an update said of itself."""
        self._took_place = True if took_place is None else took_place
        if isinstance(took_place, Tensor):  # counted on the device, so that nobody waits
            self._step = self._step.to(took_place.device) + took_place
        else:
            self._step = self._step + int(self._took_place)

    def __repr__(self) -> str:
        kind = "snapshot" if self._frozen is not None else "boosted"
        return f"<{kind} {self.title} at step {self.step}: {self.plan.composition}>"
