"""Booster: boost, backward, save and load, over one composition."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from parallax.booster.feed import Feed, rebuilding_fault, rebuilt
from parallax.booster.keeping import Keeping
from parallax.booster.pair import Pair, batchnorm_faults, loss_of
from parallax.booster.precision import with_precision
from parallax.booster.preset import mesh_for
from parallax.core.boosted import Boosted
from parallax.core.transform import Transform, compose
from parallax.errors import MeshError, OptimizerError, ParallaxError, StepError, raise_all
from parallax.launch import launch


class Booster(Keeping):
    """A composition behind the calls of a hand-written training loop.

    The loop stays as it is for one process: take a batch, call the model, compute the mean loss,
    `booster.backward(loss, optimizer)`, `optimizer.step()`, `optimizer.zero_grad()`. It then trains
    as one process would on the global batches.

    Args:
        device: Where the script means to train, `"cpu"` or `"cuda"`; checked when boosting, since
            the running process group decides it. None takes what it is.
        mixed_precision: `"bf16"` or `"fp32"`, for plugins that say nothing of precision.
        plugin: What a plugin of `parallax.booster.plugin` returns, or any other composition. None
            trains in a world of one.

    Attributes:
        transform: The composition that `boost` carries out.

    Raises:
        ConflictError: The plugin computes in another precision.
        ParallaxError: A precision that is not there yet.

    Example:
        >>> from parallax.booster.plugin import TorchDDPPlugin
        >>> Booster(mixed_precision="bf16", plugin=TorchDDPPlugin())
        Booster(plugin=compose(bf16, dp()))
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        mixed_precision: str | None = None,
        plugin: Transform | None = None,
    ) -> None:
        if plugin is not None and not isinstance(plugin, Transform):
            name = getattr(plugin, "__name__", type(plugin).__name__)
            raise TypeError(
                f"Booster was given plugin={plugin!r}, which is no composition. Write "
                f"plugin={name}(...), or any transform such as zero(2)."
            )
        self.device = None if device is None else torch.device(device)
        self.transform = with_precision(compose() if plugin is None else plugin, mixed_precision)
        self._pairs: list[Pair] = []

    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: Any = None,
    ) -> tuple[nn.Module, Any, Callable[..., Any], Any, Any]:
        """Rewrite a model and its optimizer, in place, and cut the loader's batches over the ranks.

        Args:
            model: Any plain module.
            optimizer: Made on this model.
            criterion: Handed through. None gives a function of the model's outputs that returns the
                loss they hold (`outputs.loss` or `outputs["loss"]`).
            dataloader: One that `prepare_dataloader` made, or a plain torch DataLoader, whose
                batches are then the global ones: data ranks read different rows of each, ranks of
                one tensor group the same.
            lr_scheduler: Handed through; made on the optimizer, which stays the same object. Under
                fp16 it is attached: `step()` does nothing after an update that was skipped. One
                that is stepped once an epoch is not given here, but attached by itself:
                `booster.boosted(model).attach(lr_scheduler, per="epoch")`.

        Returns:
            Model, optimizer, criterion, dataloader and scheduler.

        Raises:
            ParallaxError: Something does not fit: the composition the world or the model, the
                scheduler the optimizer, the loader the data ranks. Nothing was changed.
        """
        here = launch().device
        raise_all(self._faults(here, optimizer, dataloader, lr_scheduler))
        feed = dataloader
        if dataloader is not None:
            mesh = mesh_for(self.transform)
            feed = dataloader if isinstance(dataloader, Feed) else rebuilt(dataloader, mesh)
            if feed.mesh is not mesh:
                raise MeshError(
                    f"the dataloader was prepared for other data ranks than those of "
                    f"{self.transform!r}.\n\nPrepare it with the plugin that the Booster was given."
                )
            raise_all(batchnorm_faults(model, feed))
        pair = Pair(self.transform(model, optimizer))
        self._pairs.append(pair)
        boosted = pair.boosted
        if lr_scheduler is not None and any(room.skips for room in boosted.rooms.values()):
            boosted.attach(lr_scheduler)
        return boosted.model, boosted.optimizer, criterion or loss_of, feed, lr_scheduler

    def backward(self, loss: Tensor, optimizer: Optimizer, *, rows: int | None = None) -> None:
        """Backward of a mean loss, such that the update is that of the mean over the global batch.

        Where the global batches divide by the data ranks, every rank counts the same. Where the
        last one does not, ranks hold different numbers of samples of it, and one may hold none:
        then each rank's mean counts by its number of samples, which the loader knows that `boost`
        or `prepare_dataloader` handed out. Means over something else (tokens that are not padding)
        are exact with `booster.boosted(model).backward(sum, count=...)`.

        Args:
            loss: This rank's mean over its samples; divide it by the number of backwards when
                gradients are accumulated over several.
            optimizer: The boosted optimizer.
            rows: How many samples the loss is the mean of, for batches that come from elsewhere;
                say it on every rank or on none.

        Raises:
            StepError: The optimizer is not one that this Booster returned, or the model ran on
                other tensors than the batch last read from the loader.

        Cost:
            One all-reduce of two numbers where ranks may hold different numbers of samples.
        """
        pair = self._pair(optimizer)
        count = pair.rows() if rows is None else rows
        if count is None:
            pair.boosted.backward(loss)
        else:
            pair.boosted.backward(loss * count, count=count)

    def no_sync(
        self, model: nn.Module | None = None, optimizer: Optimizer | None = None
    ) -> AbstractContextManager[None]:
        """Backwards inside only add up on this rank; the next one outside reduces the sum.

        Args:
            model: The boosted model, or
            optimizer: the boosted optimizer.
        """
        return self._pair(optimizer if model is None else model).boosted.no_sync()

    def boosted(self, part: nn.Module | Optimizer) -> Boosted:
        """The pair that a model or an optimizer belongs to, with all of its verbs.

        Args:
            part: A model or an optimizer that `boost` returned.
        """
        return self._pair(part).boosted

    # -- not there yet -----------------------------------------------------------------------------

    def execute_pipeline(
        self,
        data_iter: Iterable[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], Tensor],
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> NoReturn:
        """Refused until pipelines are there.

        Raises:
            ParallaxError: Always.
        """
        del data_iter, model, criterion, optimizer, return_loss, return_outputs
        raise ParallaxError(
            "execute_pipeline was called, and pipelines are not there yet.\n\nCall the model and "
            "booster.backward(loss, optimizer) until then."
        )

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
        quantize: bool = False,
    ) -> NoReturn:
        """Refused until LoRA is there.

        Raises:
            ParallaxError: Always.
        """
        del model, pretrained_dir, lora_config, bnb_quantization_config, quantize
        raise ParallaxError(
            "enable_lora was called, and LoRA is not there yet.\n\nFreeze parameters with "
            "requires_grad_(False) until then; frozen parameters take no optimizer state."
        )

    def save_lora_as_pretrained(
        self, model: nn.Module, checkpoint: str, use_safetensors: bool = False
    ) -> NoReturn:
        """Refused until LoRA is there.

        Raises:
            ParallaxError: Always.
        """
        del model, checkpoint, use_safetensors
        raise ParallaxError(
            "save_lora_as_pretrained was called, and LoRA is not there yet.\n\nSave the whole "
            "model with save_model until then."
        )

    def __repr__(self) -> str:
        device = "" if self.device is None else f"device={str(self.device)!r}, "
        return f"Booster({device}plugin={self.transform!r})"

    # ----------------------------------------------------------------------------------------------

    def _faults(
        self, here: torch.device, optimizer: object, dataloader: object, lr_scheduler: Any
    ) -> Iterable[ParallaxError]:
        if self.device is not None and (
            self.device.type != here.type or self.device.index not in (None, here.index)
        ):
            yield MeshError(
                f"Booster was given device={str(self.device)!r}, and this rank computes on "
                f"{here}.\n\nLeave device out: it follows from the process group, which "
                "launch(backend=...) makes."
            )
        stepped = getattr(lr_scheduler, "optimizer", optimizer)
        if stepped is not optimizer:
            yield OptimizerError(
                f"boost was given a {type(lr_scheduler).__name__} that steps another optimizer.\n\n"
                "Give the optimizer that the scheduler was made on."
            )
        if dataloader is not None and not isinstance(dataloader, Feed):
            fault = rebuilding_fault(dataloader)
            if fault is not None:
                yield fault

    def _pair(self, part: object) -> Pair:
        for pair in self._pairs:
            if part is not None and (part is pair.boosted.model or part is pair.boosted.optimizer):
                return pair
        raise StepError(
            f"Booster was asked about a {type(part).__name__} that it did not boost.\n\nPass the "
            "model or the optimizer that boost returned."
            if part is not None
            else "Booster was asked about neither a model nor an optimizer.\n\nPass one that boost "
            "returned."
        )
