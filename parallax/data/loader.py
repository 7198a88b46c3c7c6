"""A torch DataLoader that yields each data rank its part of one global batch.

The global batches depend on the dataset, the batch size, the seed and the epoch, never on the
number of ranks: one process would see the same batches in the same order. Each is cut into
contiguous rows, one part a data rank; ranks of one tensor or pipeline group get the same part.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import IterableDataset, default_collate

from parallax.core.axes import DATA_AXES
from parallax.core.mesh import rank_on
from parallax.data.part import Collate
from parallax.data.place import Resumable
from parallax.data.rows import GlobalBatches, RowLoader, Rows
from parallax.data.stream import Stream, stream_loader
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
) -> Resumable:
    """A loader over this rank's part of each global batch, which knows its place in the data.

    `state_dict()` is the place, the same on every rank: a batch counts as used once it was yielded.
    `load_state_dict(state)` takes it up, on any number of data ranks, and with another batch size:
    no sample is lost or seen again, and the global order is kept. With a map-style dataset the
    number of workers may change too. It takes effect at the next `iter()`; an iterator that is in
    use goes on as it was.

    Args:
        mesh: The world's mesh, `boosted.mesh`.
        dataset: Map-style (indexed, with a length) or iterable-style.
        batch_size: Samples of all ranks together in one step; the number of data ranks divides it.
        shuffle: Draw a new order each epoch, from `seed` and the epoch. Map-style only.
        seed: Seed of the order, and of random augmentation in workers: of each sample of a
            map-style dataset, of each global batch of an iterable one.
        num_workers: Processes that load; with an iterable dataset torch's convention holds: each
            worker iterates its own copy, and the dataset shares the stream out by
            `get_worker_info()`. The place among workers of a stream takes the extra `data`.
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
    if not options.get("in_order", True):
        raise DataError(
            "loader was given in_order=False, under which each rank takes batches as its own "
            "workers finish them; ranks would train on parts of different global batches, and no "
            "place in the data could be told.\n\nLeave it out."
        )
    stream = isinstance(dataset, IterableDataset)
    # What workers draw beside the samples differs by data rank, and is alike in a tensor group. Of
    # a stream every rank's workers read the whole, and have to read the same.
    apart = 0 if stream else rank
    generator = torch.Generator().manual_seed((seed * 100_003 + apart) % (1 << 63))
    shared: dict[str, Any] = {"num_workers": num_workers, "generator": generator, **options}
    shared.setdefault("pin_memory", mesh.device_type == "cuda")
    collate = Collate(collate_fn or default_collate)
    if stream:
        cut_as: Any = {"drop_last": drop_last, "ranks": ranks, "rank": rank, "seed": seed}
        parts = Stream(dataset, batch_size, **cut_as)
        return stream_loader(num_workers)(parts, collate_fn=collate, **shared)
    batches = GlobalBatches(
        len(dataset),
        batch_size,
        ranks=ranks,
        rank=rank,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )
    return RowLoader(Rows(dataset, seed), batches, collate_fn=collate, **shared)


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
