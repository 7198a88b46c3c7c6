"""Map-style datasets: global batches by index, cut over the ranks, taken up at any sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler, Subset, get_worker_info

from parallax.core.slices import cut
from parallax.data.part import Part
from parallax.data.place import Place, Resumable
from parallax.data.randomness import seed_all


class Indices(list[int]):
    """Indices of samples, and the epoch they are read in; both reach the workers."""

    epoch: int = 0


class GlobalBatches(Sampler[list[int]]):
    """Indices of this rank's part of each global batch.

    Args:
        samples: Length of the dataset.
        batch_size: Length of a global batch.
        ranks: Number of data ranks.
        rank: This rank's place among them.
        shuffle: Whether to draw an order each epoch.
        seed: Seed of the order.
        drop_last: Whether to leave out a short last batch.

    Attributes:
        place: Where the next iteration begins.
        given: Where iterations begin that are made meanwhile, all of them: torch's loader makes two
            and uses the last.

    Example:
        >>> parts = [GlobalBatches(7, 4, ranks=2, rank=r) for r in range(2)]
        >>> [list(part) for part in parts]
        [[[0, 1], [4, 5]], [[2, 3], [6]]]
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        *,
        ranks: int,
        rank: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.samples, self.batch_size = samples, batch_size
        self.ranks, self.rank = ranks, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.place = Place(0, 0)
        self.given: Place | None = None

    def set_epoch(self, epoch: int, *, skip: int = 0) -> None:
        """Make the next iteration the given epoch, without its first `skip` batches."""
        self.place = Place(epoch, skip * self.batch_size)

    def size_at(self, samples: int) -> int:
        """Length of the global batch that begins after so many samples; 0 at the end."""
        left = self.samples - samples
        return (
            0
            if left <= 0 or (self.drop_last and left < self.batch_size)
            else min(left, self.batch_size)
        )

    def __len__(self) -> int:
        whole, rest = divmod(self.samples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        if self.given is not None:
            return self._parts(self.given)
        return self._parts(self.advance())

    def advance(self) -> Place:
        """Where the next iteration begins; the one after it begins the next epoch."""
        place = self.place
        self.place = Place(place.epoch + 1, 0)
        return place

    def _parts(self, place: Place) -> Iterator[list[int]]:
        order: Any = range(self.samples)
        if self.shuffle:
            # The CPU generator keeps 32 bits of a seed: epochs must differ in the low ones.
            generator = torch.Generator().manual_seed(
                (self.seed * 1_000_003 + place.epoch) % (1 << 32)
            )
            order = torch.randperm(self.samples, generator=generator).tolist()
        first = place.samples
        while size := self.size_at(first):
            start, end = cut(size, self.ranks, self.rank)
            part = Indices(order[first + start : first + end])
            part.epoch = place.epoch
            yield part
            first += size


class Rows(Dataset[Any]):
    """A map-style dataset that also answers for a rank without samples.

    In worker processes each sample is read with generators seeded from the seed, the epoch and its
    index (a dataset with `__getitems__`: each batch, from its first index), so that random
    augmentation depends on neither ranks nor workers, nor on where a run was taken up. In the main
    process the dataset draws from the process's own generators, which checkpoints hold.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> Part:
        epoch = getattr(indices, "epoch", 0)
        if not indices:
            self._seed(epoch, 0)
            return Part([], self.dataset[0])
        if _reads_batches(self.dataset):
            self._seed(epoch, indices[0])
            return Part(self.dataset.__getitems__(list(indices)))
        samples = []
        for index in indices:
            self._seed(epoch, index)
            samples.append(self.dataset[index])
        return Part(samples)

    def _seed(self, epoch: int, index: int) -> None:
        if get_worker_info() is not None:
            seed_all(self.seed, epoch, index)


def _reads_batches(dataset: Any) -> bool:
    """Whether a dataset makes a batch at once; a Subset only asks that which it is of."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


class RowLoader(Resumable):
    """A loader over a map-style dataset; made by `parallax.data.loader`."""

    def __init__(self, rows: Rows, batches: GlobalBatches, **options: Any) -> None:
        self._batches = batches
        self.settings = {
            "samples": batches.samples,
            "shuffle": batches.shuffle,
            "seed": batches.seed if batches.shuffle else None,
            "drop_last": batches.drop_last,
        }
        super().__init__(rows, batch_sampler=batches, **options)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            return super().__iter__()
        finally:
            self._batches.given = None

    @property
    def next_place(self) -> Place:
        """The place at which the next iteration begins."""
        return self._batches.place

    def begin(self) -> Place:
        """The place at which the iteration begins that is being made."""
        self._batches.given = self._batches.advance()
        return self._batches.given

    @property
    def place(self) -> Place:
        """Where the loop is; after the last batch that is the beginning of the next epoch."""
        place = super().place
        ended = place.samples and not self._batches.size_at(place.samples)
        return Place(place.epoch + 1, 0) if ended else place

    def passed(self) -> int:
        """Samples of all ranks in the batch that was just yielded."""
        assert self.running is not None, "a batch is yielded by a running iteration"
        return self._batches.size_at(self.running.samples)

    def go_to(self, place: Place, state: dict[str, Any]) -> None:
        """Let the next iteration begin at a place."""
        del state
        # A tail that a smaller batch left may be too short for one of this size.
        ended = place.samples and not self._batches.size_at(place.samples)
        self._batches.place = Place(place.epoch + 1, 0) if ended else place
