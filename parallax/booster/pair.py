"""A boosted pair with what its model last ran on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from parallax.booster.feed import Feed
from parallax.core.boosted import Boosted
from parallax.core.step import tensor_rows
from parallax.errors import DataError, StepError, raise_all
from parallax.store.batchnorm import KINDS


class Pair:
    """A boosted pair, and what its model was last given."""

    def __init__(self, boosted: Boosted) -> None:
        self.boosted = boosted
        self._lengths: set[int] = set()
        boosted.model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        if Feed.latest is not None:
            Feed.latest.mark()
        if torch.is_grad_enabled():
            inputs = (*args, *kwargs.values())
            self._lengths = {len(x) for given in inputs for _, x in tensor_rows(given)}

    def rows(self) -> int | None:
        """Samples of this rank in the batch that the model last ran on.

        None when all ranks count the same, or no loader of this mesh was read.
        """
        feed = Feed.latest
        if feed is None or feed.mesh is not self.boosted.mesh or not feed.uneven:
            return None
        raise_all(batchnorm_faults(self.boosted.model, feed))
        return feed.rows_behind(self._lengths)


def batchnorm_faults(model: nn.Module, feed: Feed) -> Iterator[DataError]:
    """Why a model's statistics would be wrong on a feed's last batch."""
    found = [name for name, module in model.named_modules() if isinstance(module, KINDS)]
    if feed.idle and found:
        yield DataError(
            "the last global batch may hold fewer samples than there are data ranks, and "
            f"{found[0]} would count the rows that stand in for them in its batch's statistics.\n\n"
            "Use drop_last=True, or a batch size that leaves a longer rest."
        )


def loss_of(outputs: Any) -> Tensor:
    """The loss that a model's outputs hold, as transformers' models return it.

    Raises:
        StepError: They hold none.

    Example:
        >>> loss_of({"loss": torch.tensor(2.0), "logits": torch.zeros(3)})
        tensor(2.)
    """
    held = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(held, Tensor):
        raise StepError(
            f"the model returned a {type(outputs).__name__} without a loss, and boost was given no "
            "criterion.\n\nGive one: booster.boost(model, optimizer, criterion=...)."
        )
    return held
