"""Loaders of one rank's rows that know how many samples each batch holds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, ClassVar

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from parallax.core.mesh import agree
from parallax.data import loader
from parallax.data.rows import GlobalBatches
from parallax.errors import DataError, StepError


class Feed(DataLoader[Any]):
    """This rank's part of each global batch, with the number of samples in it.

    Where the last global batch holds fewer samples than there are data ranks, a rank without one is
    given a stand-in row, since it has to take part in every gather and reduction and few models run
    on no rows. `rows` is 0 then, and the row counts for nothing in `Booster.backward`; metrics of
    one's own should count by `rows`.

    Attributes:
        latest: The feed of this process that yielded last.
        mesh: The mesh whose data axes share the batches.
        uneven: Whether some batch may hold different numbers of samples on different data ranks;
            the same on every rank.
        idle: Whether some rank may be left without samples; the same on every rank.
        rows: Samples of this rank in the batch that was yielded last.
    """

    # A loss does not say which loader its batch came from; that it was the last one read is checked
    # against what the model ran on.
    latest: ClassVar[Feed | None] = None

    def __init__(self, part: DataLoader[Any], mesh: DeviceMesh, *, drop_last: bool) -> None:
        batches = part.batch_sampler
        what: dict[str, Any] = (
            {"batch_size": None} if batches is None else {"batch_sampler": batches}
        )
        super().__init__(
            part.dataset,
            collate_fn=part.collate_fn,
            generator=part.generator,
            pin_memory=part.pin_memory,
            **what,
            **_how(part),
        )
        ranks = mesh["data_replicate"].size() * mesh["data_shard"].size()
        self.mesh = mesh
        self.uneven = self.idle = ranks > 1 and not drop_last
        if isinstance(batches, GlobalBatches):
            tail = batches.samples % batches.batch_size
            self.uneven = not drop_last and tail % ranks != 0
            self.idle = self.uneven and tail < ranks
            # Where scripts look for set_epoch; torch reads batch_sampler when there is one, and its
            # own __setattr__ protects the name.
            self.__dict__["sampler"] = batches
        self.rows = 0
        # Rows as the model sees them, and samples among them: they differ for a stand-in.
        self._seen: set[tuple[int, int]] = set()
        self._ran, self._ahead = True, False

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._counted(super().__iter__())

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for marker, whole in batches:
            self.rows = len(marker)
            self._seen.add((max(self.rows, 1), self.rows))
            self._ran, self._ahead = False, not self._ran
            Feed.latest = self
            yield whole.batch

    def mark(self) -> None:
        """Note that a model ran since the last batch was yielded."""
        self._ran = True

    def rows_behind(self, lengths: set[int]) -> int:
        """Samples of this rank in the batch that the model ran on.

        Args:
            lengths: First dims of the tensors that the model was given.

        Returns:
            The last batch's number, or an earlier batch's when the next one was already fetched.

        Raises:
            StepError: The model ran on something else than this feed's batches, or it cannot be
                told which of them.
        """
        if not lengths:
            return self.rows
        latest = max(self.rows, 1) in lengths
        found = {rows for shown, rows in self._seen if shown in lengths}
        if {0, 1} <= found and self._ahead:
            raise _unknown(
                "the model ran on one row, and the loader had yielded another batch before: it "
                "cannot be told whether the row is a sample or stands in on a rank without one"
            )
        if latest:
            return self.rows
        if not found:
            held = " or ".join(str(rows) for rows in sorted({rows for rows, _ in self._seen}))
            given = ", ".join(map(str, sorted(lengths)))
            raise _unknown(
                f"the loader's batches hold {held} samples on this rank, and the model ran on "
                f"tensors whose first dims are {given}. The last batch holds different numbers on "
                "different ranks, so the loss must be weighed, and it cannot be told by what"
            )
        return max(found)


def _unknown(found: str) -> StepError:
    return StepError(
        f"{found}.\n\nSay how many samples the loss is the mean of, which dataloader.rows holds "
        "when a batch is taken: booster.backward(loss, optimizer, rows=...); or leave the short "
        "batch out with drop_last=True."
    )


class Whole:
    """A batch that the loader passes on as it is, where it would cut a stand-in to no rows."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def pin_memory(self) -> Whole:
        """Pin the batch; torch's loader calls this."""
        return Whole(_pinned(self.batch))


def _pinned(batch: Any) -> Any:
    def pin(leaf: Any) -> Any:
        if isinstance(leaf, MutableMapping):  # such as transformers' BatchEncoding
            changed = copy.copy(leaf)
            changed.update({key: _pinned(value) for key, value in leaf.items()})
            return changed
        return leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf

    return optree.tree_map(pin, batch, none_is_leaf=True)


class Counting:
    """A collate function that puts a tensor of as many elements as samples before the batch.

    A tensor, since the loader answers a rank without samples by cutting the tensors of a stand-in
    batch to no rows: so the count is cut to zero.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> tuple[Tensor, Whole]:
        """Collate samples, with their number in front."""
        return torch.empty(len(samples), dtype=torch.bool), Whole(self.collate(samples))


def feed_of(
    mesh: DeviceMesh,
    dataset: Any,
    *,
    batch_size: int,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    **options: Any,
) -> Feed:
    """Make a feed; arguments as in `parallax.data.loader`, `batch_size` is global."""
    counting = Counting(collate_fn or default_collate)
    part = loader(
        mesh,
        dataset,
        batch_size=batch_size,
        drop_last=drop_last,
        collate_fn=counting,
        **options,
    )
    return Feed(part, mesh, drop_last=drop_last)


def rebuilt(given: DataLoader[Any], mesh: DeviceMesh) -> Feed:
    """Make a feed of the same dataset and global batches as a plain loader; collective.

    The plain loader's batches are the global ones, as they would be in one process. A shuffled
    order is drawn from the seed of its generator, or of torch's on rank 0 when it has none.

    Raises:
        DataError: `rebuilding_fault` finds one, or the batches do not divide by the data ranks.
    """
    fault = rebuilding_fault(given)
    if fault is not None:
        raise fault
    generator = getattr(given.sampler, "generator", None) or given.generator
    seed = torch.initial_seed() if generator is None else generator.initial_seed()
    (first, *_), _ = agree(str(seed), "")
    assert given.batch_size is not None, "rebuilding_fault refuses loaders without one"
    return feed_of(
        mesh,
        given.dataset,
        batch_size=given.batch_size,
        shuffle=isinstance(given.sampler, RandomSampler),
        seed=int(first) % (1 << 32),
        drop_last=given.drop_last,
        pin_memory=given.pin_memory,
        collate_fn=given.collate_fn,
        **_how(given),
    )


def rebuilding_fault(given: object) -> DataError | None:
    """Why no feed can be made of what was passed as dataloader; None when one can."""
    if type(given) is not DataLoader:
        return _fault(
            f"a {type(given).__module__}.{type(given).__qualname__}, whose order parallax does not "
            "know"
        )
    if given.batch_size is None:
        kind = type(given.batch_sampler).__name__
        own = f"a batch_sampler of its own ({kind})" if given.batch_sampler else "batch_size=None"
        return _fault(f"a DataLoader with {own}, whose batches parallax cannot cut")
    if isinstance(given.dataset, IterableDataset):
        return None
    sampler = given.sampler
    if isinstance(sampler, DistributedSampler):
        return _fault(
            "a DataLoader with a DistributedSampler, which has already chosen what each rank reads"
        )
    if type(sampler) is SequentialSampler:
        return None
    if type(sampler) is not RandomSampler:
        return _fault(
            f"a DataLoader with a {type(sampler).__name__}, whose order parallax does not know"
        )
    if sampler.replacement or sampler.num_samples != len(given.dataset):  # pyright: ignore[reportArgumentType]
        return _fault("a DataLoader that draws with replacement, or not each sample once an epoch")
    return None


def _fault(found: str) -> DataError:
    return DataError(
        f"boost was given as dataloader {found}.\n\nGive a plain DataLoader(dataset, batch_size, "
        "shuffle=...), whose batches are then the global ones, or one made by "
        "plugin.prepare_dataloader(dataset, batch_size, ...); or leave it out and cut each global "
        "batch with booster.boosted(model).shard(batch)."
    )


def _how(given: DataLoader[Any]) -> dict[str, Any]:
    """How a loader loads, apart from what and in which order."""
    return {
        "num_workers": given.num_workers,
        "timeout": given.timeout,
        "worker_init_fn": given.worker_init_fn,
        "multiprocessing_context": given.multiprocessing_context,
        "prefetch_factor": given.prefetch_factor,
        "persistent_workers": given.persistent_workers,
        "in_order": given.in_order,
    }
