"""Saving and loading a boosted pair part by part."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from parallax.booster.moments import load_moments_, save_moments
from parallax.booster.onefile import on_first, suffix_fault
from parallax.booster.saving import check_loading, check_saving, directory_fault
from parallax.booster.schedule import load_schedule_, save_schedule
from parallax.booster.weights import MODEL, save_weights
from parallax.checkpoint import load_, load_pretrained, save
from parallax.checkpoint.folder import find
from parallax.core.boosted import Boosted
from parallax.core.state import Kind
from parallax.launch import launch

OPTIMIZER: tuple[Kind, ...] = ("moments", "rooms", "step")


class Keeping:
    """The verbs of a Booster that keep a training run in files."""

    def boosted(self, part: nn.Module | Optimizer) -> Boosted:
        """The pair that a model or an optimizer belongs to."""
        raise NotImplementedError

    def save_model(
        self,
        model: nn.Module,
        checkpoint: str | os.PathLike[str],
        shard: bool = False,
        gather_dtensor: bool | None = None,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = True,
        use_async: bool = False,
    ) -> None:
        """Save parameters and buffers; collective.

        Args:
            model: The boosted model.
            checkpoint: Where to: a `.safetensors` file, or with `shard` a directory.
            shard: A directory as transformers writes it, with an index and checksums. Otherwise
                one file of whole tensors. Any torch program reads either.
            gather_dtensor: Either value means the same: files hold whole tensors, to which each
                rank writes its own slices, so that nothing need be gathered.
            prefix: With `shard`, put into the names of files: `model.<prefix>.safetensors`.
            size_per_shard: With `shard`, the most in one file, in MiB.
            use_safetensors: Refused unless True: nothing is pickled.
            use_async: With `shard`, return when the weights are copied, and write beside training;
                `booster.boosted(model).saving.result()` waits, and so does the next save or load.

        Raises:
            CheckpointError: An argument is refused, or the files cannot be written; what was there
                before has not been changed.
        """
        boosted, path = self.boosted(model), Path(checkpoint)
        check_saving(
            "save_model",
            shard=shard,
            prefix=prefix,
            size_per_shard=size_per_shard,
            use_safetensors=use_safetensors,
            use_async=use_async,
        )
        if shard:
            on_first(lambda: directory_fault(path, MODEL), str(path))
            size, beside = size_per_shard << 20, use_async
            save(boosted, path, kinds=MODEL, shard_size=size, prefix=prefix, asynchronous=beside)
        else:
            suffix_fault(path, "save_model was given")
            save_weights(boosted, path)

    def load_model(
        self,
        model: nn.Module,
        checkpoint: str | os.PathLike[str],
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Load parameters and buffers, whatever composition and number of ranks saved them.

        Args:
            model: The boosted model.
            checkpoint: A directory that was saved with `shard`, a `.safetensors` file, or anything
                else that `boosted.load_pretrained` reads.
            strict: Whether names must be the same. False loads what both have.
            low_cpu_mem_mode: Refused unless True: each rank reads only the blocks it holds.
            num_threads: Refused unless 1, as above.

        Raises:
            CheckpointError: It is missing, damaged or does not fit. Nothing was changed.
        """
        boosted, path = self.boosted(model), Path(checkpoint)
        check_loading("load_model", low_cpu_mem_mode, num_threads)
        if not strict or find(path) is None:
            load_pretrained(boosted, path, strict=strict)
            return
        load_(boosted, path, kinds=MODEL)

    def save_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: str | os.PathLike[str],
        shard: bool = False,
        gather_dtensor: bool | None = None,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,
    ) -> None:
        """Save the optimizer's state, its groups' settings and the number of updates; collective.

        Arguments and errors as in `save_model`.
        """
        boosted, path = self.boosted(optimizer), Path(checkpoint)
        check_saving(
            "save_optimizer",
            shard=shard,
            prefix=prefix,
            size_per_shard=size_per_shard,
            use_async=use_async,
        )
        if shard:
            on_first(lambda: directory_fault(path, OPTIMIZER), str(path))
            size, beside = size_per_shard << 20, use_async
            save(boosted, path, kinds=OPTIMIZER, shard_size=size, asynchronous=beside)
        else:
            suffix_fault(path, "save_optimizer was given")
            save_moments(boosted, path)

    def load_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: str | os.PathLike[str],
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Load what `save_optimizer` saved, whatever composition and number of ranks saved it.

        Arguments and errors as in `load_model`.
        """
        boosted, path = self.boosted(optimizer), Path(checkpoint)
        check_loading("load_optimizer", low_cpu_mem_mode, num_threads)
        if find(path) is not None:
            load_(boosted, path, kinds=OPTIMIZER)
        else:
            load_moments_(boosted, path)

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | os.PathLike[str]) -> None:
        """Save a scheduler's state as JSON; collective.

        Raises:
            CheckpointError: Its state holds more than plain values, or cannot be written.
        """
        launch()
        save_schedule(lr_scheduler, Path(checkpoint))

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | os.PathLike[str]) -> None:
        """Load what `save_lr_scheduler` saved, into a scheduler of the same class; collective.

        Raises:
            CheckpointError: It is missing, damaged, or of another class.
        """
        launch()
        load_schedule_(lr_scheduler, Path(checkpoint))
