"""A torch DataLoader that yields each data rank its part of one global batch.

The global batches depend on the dataset, the batch size, the seed and the epoch, never on the
number of ranks: one process would see the same batches in the same order. Each is cut into
contiguous rows, one part a data rank; ranks of one tensor or pipeline group get the same part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from parallax.core.axes import DATA_AXES
from parallax.core.mesh import rank_on
from parallax.core.slices import cut
from parallax.core.step import map_rows
from parallax.errors import DataError


def loader(
    mesh: DeviceMesh,
    dataset: Any,
    *,
    batch_size: int,
    shuffle: bool = False,
    seed: int = 0,
    num_workers: int = 0,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    **options: Any,
) -> DataLoader[Any]:
    """A loader over this rank's part of each global batch.

    Args:
        mesh: The world's mesh, `boosted.mesh`.
        dataset: Map-style (indexed, with a length) or iterable-style.
        batch_size: Samples of all ranks together in one step; the number of data ranks divides it.
        shuffle: Draw a new order each epoch, from `seed` and the epoch. Map-style only.
        seed: Seed of the order, and of the workers (which differ by data rank).
        num_workers: Processes that load; with an iterable dataset torch's convention holds: each
            worker iterates its own copy, and the dataset shares the stream out by
            `get_worker_info()`.
        drop_last: Leave out the last batch when it is short. Otherwise it is cut like the others;
            the first ranks hold one sample more, and a rank may hold a batch of no rows, whose
            weight in `train_step` is zero. No sample is repeated.
        collate_fn: As in torch.
        **options: Further arguments of `torch.utils.data.DataLoader`.

    Returns:
        The loader. Each new iteration is a new epoch; `loader.batch_sampler.set_epoch(n, skip=k)`
        makes the next iteration epoch n without its first k batches (map-style).

    Raises:
        DataError: The dataset is empty, the batch size does not divide by the data ranks, or an
            option does not fit the dataset's style.
    """
    ranks, rank = mesh["data_replicate"].size() * mesh["data_shard"].size(), rank_on(mesh)
    _check(dataset, batch_size, shuffle, drop_last, ranks)
    taken = {"sampler", "batch_sampler", "generator"} & set(options)
    if taken:
        raise DataError(
            f"loader was given {', '.join(sorted(taken))}, which decides what each rank reads.\n\n"
            "Leave it out and use shuffle= and seed=, or build a torch DataLoader and cut each "
            "global batch with boosted.shard."
        )
    # Workers of different data ranks augment differently; those of one tensor group alike.
    generator = torch.Generator().manual_seed((seed * 100_003 + rank) % (1 << 63))
    shared: dict[str, Any] = {"num_workers": num_workers, "generator": generator, **options}
    shared.setdefault("pin_memory", mesh.device_type == "cuda")
    collate = _Collate(collate_fn or default_collate)
    if isinstance(dataset, IterableDataset):
        stream = _Stream(dataset, batch_size, drop_last, ranks, rank)
        return DataLoader(stream, batch_size=None, collate_fn=collate, **shared)
    batches = GlobalBatches(
        len(dataset),
        batch_size,
        ranks=ranks,
        rank=rank,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )
    return DataLoader(_Rows(dataset), batch_sampler=batches, collate_fn=collate, **shared)


def _check(dataset: Any, batch_size: int, shuffle: bool, drop_last: bool, ranks: int) -> None:
    if batch_size < 1 or batch_size % ranks:
        near = sorted(
            {max(1, batch_size // ranks) * ranks, -(-max(batch_size, 1) // ranks) * ranks}
        )
        raise DataError(
            f"a global batch of {batch_size} samples cannot be shared by {ranks} data ranks "
            f"({' x '.join(DATA_AXES)}).\n\nUse a multiple of {ranks}: "
            f"{' or '.join(map(str, near))}."
        )
    if isinstance(dataset, IterableDataset):
        if shuffle:
            raise DataError(
                f"shuffle=True was asked for {type(dataset).__name__}, which is iterable-style and "
                "has no order to draw.\n\nShuffle inside the dataset, or use a map-style dataset."
            )
        return
    if not isinstance(dataset, Sized):
        raise DataError(
            f"the dataset is a {type(dataset).__name__} without a length.\n\nGive it __len__ and "
            "__getitem__ (map-style), or derive it from torch.utils.data.IterableDataset."
        )
    if len(dataset) == 0:
        raise DataError(
            f"the dataset {type(dataset).__name__} is empty.\n\nCheck the path or filter it was "
            "made from; a loader needs at least one sample."
        )
    if drop_last and len(dataset) < batch_size:
        largest = len(dataset) // ranks * ranks
        other = f" or a batch size of at most {largest}" if largest else ""
        raise DataError(
            f"drop_last=True leaves no batch: {len(dataset)} samples are fewer than one global "
            f"batch of {batch_size}.\n\nUse drop_last=False{other}."
        )


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
        self.epoch, self._skip = 0, 0

    def set_epoch(self, epoch: int, *, skip: int = 0) -> None:
        """Make the next iteration the given epoch, without its first `skip` batches."""
        self.epoch, self._skip = epoch, skip

    def __len__(self) -> int:
        whole, rest = divmod(self.samples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, skip = self.epoch, self._skip
        self.epoch, self._skip = epoch + 1, 0
        order = range(self.samples)
        if self.shuffle:
            # The CPU generator keeps 32 bits of a seed: epochs must differ in the low ones.
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % (1 << 32))
            order = torch.randperm(self.samples, generator=generator).tolist()
        for batch in range(skip, len(self)):
            rows = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            start, end = cut(len(rows), self.ranks, self.rank)
            yield list(rows[start:end])


class _Part:
    """Samples of one rank, and a stand-in sample when there are none."""

    def __init__(self, samples: list[Any], stand_in: Any = None) -> None:
        self.samples, self.stand_in = samples, stand_in


class _Rows(Dataset[Any]):
    """A map-style dataset that also answers for a rank without samples."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> _Part:
        if not indices:
            return _Part([], self.dataset[0])
        many = getattr(self.dataset, "__getitems__", None)
        return _Part(many(indices) if many else [self.dataset[i] for i in indices])


class _Stream(IterableDataset[Any]):
    """An iterable dataset, grouped into global batches of which one part is kept."""

    def __init__(
        self, dataset: Any, batch_size: int, drop_last: bool, ranks: int, rank: int
    ) -> None:
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.ranks, self.rank = ranks, rank

    def __iter__(self) -> Iterator[_Part]:
        rows: list[Any] = []
        for sample in self.dataset:
            rows.append(sample)
            if len(rows) == self.batch_size:
                yield self._mine(rows)
                rows = []
        if rows and not self.drop_last:
            yield self._mine(rows)

    def _mine(self, rows: list[Any]) -> _Part:
        start, end = cut(len(rows), self.ranks, self.rank)
        return _Part(rows[start:end], rows[0])


class _Collate:
    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, part: Any) -> Any:
        if part.samples:
            return self.collate(part.samples)
        one = self.collate([part.stand_in])
        return map_rows(one, lambda x: x[:0])
