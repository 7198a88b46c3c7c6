"""What a plugin returns: a composition that also prepares loaders before anything is boosted."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallax.booster.feed import Feed, feed_of
from parallax.core.mesh import agree, mesh_of
from parallax.core.transform import Transform
from parallax.errors import DataError, StepError
from parallax.launch import launch


class Preset(Transform):
    """A transform with `prepare_dataloader`. Equal to the plain transform of the same claims.

    Example:
        >>> from parallax import bf16, compose, zero
        >>> from parallax.booster.plugin import LowLevelZeroPlugin
        >>> plugin = LowLevelZeroPlugin(stage=2, precision="bf16")
        >>> plugin
        compose(bf16, zero(2))
        >>> plugin == compose(zero(2), bf16)
        True
    """

    def prepare_dataloader(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: type | None = None,
        **options: Any,
    ) -> Feed:
        """Make a loader of which each data rank reads its part; may be called before boosting.

        Args:
            dataset: Map-style or iterable-style.
            batch_size: Samples of one data rank in one step; a global batch holds this number times
                the data ranks.
            shuffle: Draw a new order each epoch, from `seed` and the epoch. Map-style only.
            seed: Seed of the order and of the workers.
            drop_last: Leave out the last global batch when it is short. Otherwise its rows are cut
                over the ranks like the others', and `Booster.backward` weighs them.
            pin_memory: As in torch.
            num_workers: As in torch.
            distributed_sampler_cls: Refused unless None: what each rank reads follows from the
                mesh.
            **options: Further arguments of `torch.utils.data.DataLoader`.

        Returns:
            A DataLoader that yields this rank's part of each global batch.

        Raises:
            MeshError: The composition does not fit the running ranks.
            DataError: The dataset or an option does not fit; see `parallax.data.loader`.
        """
        if distributed_sampler_cls is not None:
            raise DataError(
                "prepare_dataloader was given "
                f"distributed_sampler_cls={distributed_sampler_cls!r}, and what each rank reads "
                "follows from the mesh.\n\nLeave it out and use shuffle= and seed=; "
                "loader.batch_sampler.set_epoch(n, skip=k) continues within an epoch."
            )
        mesh = mesh_for(self)
        ranks = mesh["data_replicate"].size() * mesh["data_shard"].size()
        return feed_of(
            mesh,
            dataset,
            batch_size=batch_size * ranks,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            pin_memory=pin_memory,
            num_workers=num_workers,
            **options,
        )

    def __eq__(self, other: object) -> bool:
        return self.claims == other.claims if isinstance(other, Transform) else NotImplemented

    __hash__ = Transform.__hash__


def mesh_for(transform: Transform) -> DeviceMesh:
    """The mesh that boosting with a transform will use; the same one, not a second.

    Raises:
        MeshError: The composition does not fit the running ranks.
        StepError: The ranks hold different compositions.
    """
    launch()
    plan = transform.plan(dist.get_world_size())
    # Making a mesh is collective: over different shapes it would hang instead of failing.
    statements, _ = agree(repr(transform), "")
    if len(set(statements)) > 1:
        rows = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(statements))
        raise StepError(
            f"the ranks prepare data for different compositions:\n{rows}\n\n"
            "Build the same plugin on every rank."
        )
    return mesh_of(plan)
