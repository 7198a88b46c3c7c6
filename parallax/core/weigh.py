"""What a rank's loss weighs in the global one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallax.core.axes import DATA_AXES
from parallax.core.mesh import device_of, size_of, total
from parallax.errors import StepError


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

        count: What the last window of pairs was over in all; 0 before the first.

    Means weigh by rows, which are known beforehand. Counts of pairs are known one by one: all parts
    are divided by the power of two next to what the last window's were over (or, in the first
    window, to the first part's count), and `close` says what remains to multiply by. So magnitudes
    are those of an ordinary step, which float16 needs, and what they are divided by rounds nothing.
    """

    def __init__(self, mesh: DeviceMesh, rows: int | None, count: Tensor) -> None:
        self._mesh = mesh
        self._rows = rows
        self._last = count
        self._total: Tensor | None = None
        self._sum: Tensor | None = None
        self._count: Tensor | None = None
        self._pairs: bool | None = None

    def weigh(self, value: Tensor, count: Tensor | float, is_sum: bool) -> tuple[Tensor, Tensor]:
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
            if is_sum:
                known = torch.where(self._last > 0, self._last.to(here.dtype), self._total)
                self._total = torch.exp2(torch.log2(known.clamp(min=1)).round())
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
        self._last.copy_(torch.where(sums[1] > 0, sums[1], self._last))
        # Nothing counted anywhere: no gradient, rather than one that is not a number.
        counted = torch.where(sums[1] > 0, sums[1], 1.0)
        return loss, torch.where(sums[1] > 0, self._total / counted, 0.0)


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
