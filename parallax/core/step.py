"""One training step's loss and gradient, exact over data ranks that hold unequal parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallax.core.rewrite import Grad, LossFn
from parallax.core.weigh import Weighing
from parallax.errors import DataError, StepError


def rows_of(batch: Any) -> int | None:
    """The length of the first dim that all tensors of a batch share.

    Args:
        batch: Any tree of tensors and other values.

    Returns:
        The common length, or None when the batch holds no tensor with a dim.

    Raises:
        DataError: The tensors' first dims differ.
    """
    lengths = {path: len(leaf) for path, leaf in tensor_rows(batch)}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{path}: {n}" for path, n in lengths.items())
        raise DataError(
            f"the first dims of the batch's tensors differ ({shown}), so it cannot be told how "
            "many samples this rank holds.\n\nGive every tensor the batch as first dim, or let the "
            "loss function return the pair (sum, count)."
        )
    return next(iter(lengths.values()), None)


def tensor_rows(batch: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a batch that have a first dim, with their paths."""
    paths, leaves, _ = optree.tree_flatten_with_path(plain(batch), none_is_leaf=True)
    rows = zip(paths, leaves, strict=True)
    return [("/".join(map(str, p)), x) for p, x in rows if isinstance(x, Tensor) and x.ndim]


def map_rows(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A batch with its tensors that have a first dim changed."""
    return optree.tree_map(
        lambda x: change(x) if isinstance(x, Tensor) and x.ndim else x,
        plain(batch),
        none_is_leaf=True,
    )


def cut_rows(batch: Any, rows: int, start: int, end: int) -> Any:
    """A batch with everything that has so many rows cut: tensors, arrays, lists of values."""

    def whole(x: Any) -> bool:
        # A list of values, one a row; a list that holds tensors is a tree to go into.
        values = isinstance(x, list | tuple) and len(x) == rows
        return values and not any(isinstance(row, Tensor | list | tuple | dict) for row in x)

    def cut(x: Any) -> Any:
        array = getattr(x, "ndim", 0) and len(x) == rows
        return x[start:end] if array or whole(x) else x

    return optree.tree_map(cut, plain(batch), is_leaf=whole, none_is_leaf=True)


def plain(batch: Any) -> Any:
    """A batch as optree knows it: transformers' BatchEncoding is a UserDict, to optree a leaf."""
    return dict(batch) if isinstance(batch, Mapping) and type(batch) is not dict else batch


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device; nothing is copied when they are there already.

    Pinned tensors are copied while the host goes on. Objects with a `to` of their own, such as
    transformers' BatchEncoding, are asked.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=True)
        asked = getattr(leaf, "to", None) if isinstance(leaf, Mapping) else None
        return asked(device) if asked is not None else leaf

    return optree.tree_map(move, batch, none_is_leaf=True)


def read_loss(out: Any, batch: Any) -> tuple[Tensor, Tensor | float, bool]:
    """Take a loss function's result apart.

    Returns:
        The differentiable value, its weight (count or number of samples), and whether the value is
        a sum (a pair was returned) rather than a mean.

    Raises:
        StepError: The result is neither a scalar tensor nor a pair of scalars.
    """
    pair = isinstance(out, tuple | list) and len(out) == 2
    value, count = out if pair else (out, None)
    counted = isinstance(count, int | float) or (isinstance(count, Tensor) and count.numel() == 1)
    if not isinstance(value, Tensor) or value.numel() != 1 or (pair and not counted):
        raise StepError(
            f"the loss function returned {_describe(out)}.\n\n"
            "Return the mean loss as a scalar tensor, or the pair (sum, count)."
        )
    if isinstance(value, DTensor):
        value = value.full_tensor()  # loss_parallel leaves a replicated DTensor
    if pair:
        assert count is not None
        return value.reshape(()), count, True
    rows = rows_of(batch)
    return value.reshape(()), float(1 if rows is None else rows), False


class MicroBatches(tuple[Any, ...]):
    """The micro-batches of one update, for `accumulate`: a tuple of batches of this rank.

    Example:
        >>> len(MicroBatches([{"x": 1}, {"x": 2}]))
        2
    """

    __slots__ = ()


class Seen:
    """How many rows the model ran on last: what a hand-written loop's mean loss is over.

    Attributes:
        rows: First dim of the first tensor given to the last forward that built a graph; None
            before the first. One rule for all ranks, whatever else the model is given.
    """

    def __init__(self, model: nn.Module) -> None:
        self.rows: int | None = None
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            rows = tensor_rows([*args, *kwargs.values()])  # in the order of the call
            self.rows = len(rows[0][1]) if rows else None


class StandIn:
    """A row for a rank that got none, so that every rank runs the same forward and backward.

    Attributes:
        idle: Whether the forward that runs now is on a stand-in, so that statistics leave it out.

    Where a short batch leaves a data rank without rows, the rank has to take part in every gather
    and reduction all the same, and many models cannot run on no rows (`view(0, seq, -1, head)` is
    ambiguous). It runs one row with weight zero: the first it ever saw, or ones.
    """

    def __init__(self) -> None:
        self._row: Any = None
        self.idle = False

    def remember(self, batch: Any) -> None:
        """Keep the first row of the first batch."""
        if self._row is None and not _empty(batch):
            self._row = map_rows(batch, lambda x: x[:1].clone())

    def fill(self, batch: Any) -> tuple[Any, bool]:
        """The batch to run, and whether it is a stand-in that must not count."""
        if not _empty(batch):
            return batch, False
        ones = map_rows(batch, lambda x: x.new_ones((1, *x.shape[1:])))
        rows = self._row if _kind(self._row) == _kind(batch) else ones
        device = next(x.device for _, x in tensor_rows(batch))
        return to_device(rows, device), True


def _kind(batch: Any) -> list[tuple[str, torch.dtype, int]]:
    return [(path, x.dtype, x.ndim) for path, x in tensor_rows(batch)]


def _empty(batch: Any) -> bool:
    lengths = [len(x) for _, x in tensor_rows(batch)]
    return bool(lengths) and not any(lengths)


def loss_of(
    loss_fn: LossFn, model: nn.Module, batch: Any, stand_in: StandIn
) -> tuple[Tensor, Tensor | float, bool]:
    """Run the loss function, on a stand-in row of weight zero where this rank has no rows.

    Returns:
        As `read_loss`.
    """
    batch, stand_in.idle = stand_in.fill(batch)
    if not stand_in.idle:
        return read_loss(loss_fn(model, batch), batch)
    # Not through the loss: a weighted mean over a row that weighs nothing is not a number, and is
    # none either when multiplied by zero.
    outputs: list[Tensor] = []
    hook = model.register_forward_hook(lambda module, args, out: outputs.extend(_tensors(out)))
    try:
        value, _, is_sum = read_loss(loss_fn(model, batch), batch)
    finally:
        hook.remove()
    joined = [_plain_sum(out * 0).to(value.dtype) for out in outputs if out.requires_grad]
    return (torch.stack(joined).sum() if joined else value * 0.0), 0.0, is_sum


def _plain_sum(out: Tensor) -> Tensor:
    """A sum that is no DTensor, also of logits that were left cut."""
    total = out.sum()
    return total.full_tensor() if isinstance(total, DTensor) else total


def _tensors(out: Any) -> list[Tensor]:
    if isinstance(out, Mapping):
        return [t for value in out.values() for t in _tensors(value)]
    return [x for x in optree.tree_leaves(out) if isinstance(x, Tensor)]


def grad_of(model: nn.Module, weighing: Weighing, stand_in: StandIn) -> Grad:
    """The innermost `grad`: forward, weigh, backward."""

    def grad(loss_fn: LossFn, batch: Any) -> Tensor:
        if isinstance(batch, MicroBatches):
            raise StepError(
                f"a window of {len(batch)} micro-batches was given to a composition that "
                "accumulates none.\n\nAdd accumulate(n), or give one batch."
            )
        stand_in.remember(batch)
        return weighing.backward(*loss_of(loss_fn, model, batch, stand_in))

    return grad


def _describe(out: Any) -> str:
    if isinstance(out, tuple | list) and len(out) == 2:
        return f"the pair of {_describe(out[0])} and {_describe(out[1])}"
    if isinstance(out, Tensor):
        return f"a tensor of shape {tuple(out.shape)}"
    return f"a {type(out).__name__}"
