"""One training step's loss and gradient, exact over data ranks that hold unequal parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallax.core.axes import DATA_AXES
from parallax.core.mesh import device_of, size_of, total
from parallax.core.rewrite import Grad, LossFn
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


class Weighing:
    """From a rank's loss to the number whose backward gives its share of the global gradient.

    Gradients are averaged over D data ranks. With local sums s_r and counts c_r the global loss is
    sum(s_r) / sum(c_r); its gradient is the average of D / sum(c_r) times the gradient of s_r.

    Attributes:
        mesh: The world's mesh.
        scale: Gives the loss scale of the moment; asked once for each backward.
        window: The larger batch that what is weighed now is a part of.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.scale: Callable[[], float] | None = None
        self.window: Window | None = None

    def backward(self, value: Tensor, count: Tensor | float, is_sum: bool) -> Tensor:
        """Run the backward of a loss.

        Args:
            value: Differentiable mean, or sum where `is_sum`; 0-dim.
            count: What it is over.
            is_sum: Whether it is a sum.

        Returns:
            The global loss; inside a window this rank's share of it, unscaled.
        """
        if self.window is not None:
            loss, factor = self.window.weigh(value, count, is_sum)
        else:
            loss, factor = weigh(value, count, is_sum, self.mesh)
        if self.scale is not None:
            factor = factor * self.scale()
        (value.to(factor.dtype) * factor).backward()
        return loss


class Window:
    """One batch in several parts: what their sums are divided by.

    Args:
        mesh: The world's mesh.
        rows: This rank's rows in all parts together; None when they cannot be counted.

    Means weigh by rows, which are known beforehand. Counts of pairs are known one by one: all parts
    are divided by the global count of the first, and `correction` is what remains to multiply by.
    """

    def __init__(self, mesh: DeviceMesh, rows: int | None) -> None:
        self._mesh = mesh
        self._rows = rows
        self._total: Tensor | None = None
        self._sum: Tensor | None = None
        self._count: Tensor | None = None
        self._pairs: bool | None = None

    def weigh(
        self, value: Tensor, count: Tensor | float, is_sum: bool
    ) -> tuple[Tensor, Tensor]:
        """This rank's share of one part, and the factor on its value; as `weigh`."""
        if self._pairs not in (None, is_sum):
            raise StepError(
                "the loss function returned a mean for one micro-batch and a pair for another.\n\n"
                "Return the pair (sum, count) for all, or the mean."
            )
        self._pairs = is_sum
        share, here = _shares(value, count, is_sum, device_of(self._mesh))
        if self._total is None:
            # Not as_tensor: a number copied from the host would wait for the device.
            over = here if is_sum else torch.full_like(here, float(self._rows or 0))
            self._total = total(over.clone(), self._mesh, DATA_AXES)
        self._sum = share if self._sum is None else self._sum + share
        self._count = here if self._count is None else self._count + here
        weight = torch.where(here > 0, 1.0 if is_sum else here, 0.0)
        divisor = torch.where(self._total > 0, self._total, 1.0)
        return share, size_of(self._mesh) * weight / divisor

    def close(self) -> tuple[Tensor, Tensor | None]:
        """The global loss, and what remains to multiply all gradients by; None: nothing.

        Cost:
            One all-reduce of two numbers.
        """
        assert self._sum is not None
        assert self._count is not None
        assert self._total is not None
        sums = total(torch.stack([self._sum, self._count]), self._mesh, DATA_AXES)
        loss = sums[0] / sums[1]
        if not self._pairs:
            return loss, None
        first = torch.where(self._total > 0, self._total, 1.0)
        # Nothing counted anywhere: no gradient, rather than one that is not a number.
        return loss, torch.where(sums[1] > 0, first / torch.where(sums[1] > 0, sums[1], 1.0), 0.0)


def weigh(
    value: Tensor, count: Tensor | float, is_sum: bool, mesh: DeviceMesh
) -> tuple[Tensor, Tensor]:
    """The global loss, and the factor on the local value whose data-averaged gradient is its own.

    Returns:
        The global loss (detached, float32 or float64) and the factor, both 0-dim.

    Cost:
        One all-reduce of two numbers for each data axis larger than 1.
    """
    share, here = _shares(value, count, is_sum, device_of(mesh))
    data_ranks = size_of(mesh)
    if data_ranks == 1:
        loss = share / here if is_sum else value.detach().to(here.dtype)
        counted = torch.where(here > 0, 1 / torch.where(here > 0, here, 1.0), 0.0)
        return loss, (counted if is_sum else torch.ones_like(here))
    sums = total(torch.stack([share, here]), mesh, DATA_AXES)
    # Nothing counted anywhere: no gradient, rather than one that is not a number.
    counts = torch.where((here > 0) & (sums[1] > 0), 1.0 if is_sum else here, 0.0)
    factor = data_ranks * counts / torch.where(sums[1] > 0, sums[1], 1.0)
    return sums[0] / sums[1], factor


def _shares(
    value: Tensor, count: Tensor | float, is_sum: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """This rank's sum and count, detached, in float32 or float64."""
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    # Not as_tensor: a number copied from the host would wait for the device.
    if isinstance(count, Tensor):
        here = count.detach().to(device=device, dtype=dtype).reshape(())
    else:
        here = torch.full((), float(count), dtype=dtype, device=device)
    share = value.detach().to(device=device, dtype=dtype)
    # A rank without samples may have a mean over nothing, which is NaN and counts for nothing.
    return torch.where(here > 0, share if is_sum else share * here, 0), here


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
    joined = [(out * 0).sum().to(value.dtype) for out in outputs if out.requires_grad]
    return (torch.stack(joined).sum() if joined else value * 0.0), 0.0, is_sum


def _tensors(out: Any) -> list[Tensor]:
    if isinstance(out, Mapping):
        return [t for value in out.values() for t in _tensors(value)]
    return [x for x in optree.tree_leaves(out) if isinstance(x, Tensor)]


def grad_of(model: nn.Module, weighing: Weighing, stand_in: StandIn) -> Grad:
    """The innermost `grad`: forward, weigh, backward."""

    def grad(loss_fn: LossFn, batch: Any) -> Tensor:
        stand_in.remember(batch)
        return weighing.backward(*loss_of(loss_fn, model, batch, stand_in))

    return grad


def _describe(out: Any) -> str:
    if isinstance(out, tuple | list) and len(out) == 2:
        return f"the pair of {_describe(out[0])} and {_describe(out[1])}"
    if isinstance(out, Tensor):
        return f"a tensor of shape {tuple(out.shape)}"
    return f"a {type(out).__name__}"
