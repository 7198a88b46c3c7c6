"""Batch normalisation over the global batch.

A BatchNorm under data parallelism would normalise by the statistics of its own rank's samples,
which is another function than the one a single process trains. Here the statistics are summed over
the data axes, forward and backward; torch's SyncBatchNorm does the same, on GPUs only.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from parallax.core.mesh import total
from parallax.core.step import StandIn

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


class _SumOverData(Function):
    """A sum over the data axes; every rank uses it, so its gradient is the ranks' sum."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, mesh: DeviceMesh) -> Tensor:  # type: ignore[override]
        ctx.mesh = mesh
        return total(value.clone(), mesh)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return total(grad.clone().contiguous(), ctx.mesh), None


def synchronise(
    model: nn.Module, mesh: DeviceMesh, stand_in: StandIn, *, traced: bool
) -> list[str]:
    """Make every BatchNorm of a model use the global batch's statistics while training.

    Args:
        model: Changed in place.
        mesh: The world's mesh.
        stand_in: Whose rows do not count.
        traced: Whether the model is compiled. The sums over ranks then stay outside of the graph.

    Returns:
        The names of the modules that were changed; names of parameters and buffers stay.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, KINDS):
            forward = _forward_over(mesh, stand_in)
            forward = torch.compiler.disable(forward) if traced else forward
            module.forward = types.MethodType(forward, module)
            found.append(name)
    return found


def _forward_over(mesh: DeviceMesh, stand_in: StandIn) -> Callable[[BatchNorm, Tensor], Tensor]:
    def forward(self: BatchNorm, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        # Statistics are kept in float32 whatever the compute dtype, and one dtype enters a kernel.
        wide = x.double() if x.dtype == torch.float64 else x.float()
        shape = [1, -1] + [1] * (x.ndim - 2)
        if self.training or self.running_mean is None:
            mean, variance = _statistics(self, wide, shape, mesh, 0.0 if stand_in.idle else 1.0)
        else:
            assert self.running_var is not None
            mean, variance = self.running_mean.to(wide.dtype), self.running_var.to(wide.dtype)
        out = (wide - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            out = out * self.weight.to(out.dtype).view(shape) + self.bias.to(out.dtype).view(shape)
        return out.to(x.dtype)

    return forward


def _statistics(
    module: BatchNorm, x: Tensor, shape: list[int], mesh: DeviceMesh, weight: float
) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel over the global batch; a stand-in's rows weigh nothing."""
    dims = [d for d in range(x.ndim) if d != 1]
    here = torch.full((1,), weight * x.numel() / x.shape[1], device=x.device, dtype=x.dtype)
    count = total(here, mesh)
    mean = _SumOverData.apply(weight * x.sum(dims), mesh) / count
    # Two passes: the sum of squares around the mean loses no digits to cancellation.
    spread = _SumOverData.apply(weight * (x - mean.view(shape)).square().sum(dims), mesh)
    if module.training and module.track_running_stats:
        _track(module, mean.detach(), (spread / (count - 1)).detach())
    return mean, spread / count


@torch.no_grad()
def _track(module: BatchNorm, mean: Tensor, unbiased: Tensor) -> None:
    assert module.running_mean is not None
    assert module.running_var is not None
    assert module.num_batches_tracked is not None
    module.num_batches_tracked.add_(1)
    momentum = module.momentum
    if momentum is None:
        momentum = 1.0 / float(module.num_batches_tracked)
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), momentum)
    module.running_var.lerp_(unbiased.to(module.running_var.dtype), momentum)
