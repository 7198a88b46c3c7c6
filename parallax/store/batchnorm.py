"""Batch normalisation over the global batch.

A BatchNorm under data parallelism would normalise by the statistics of its own rank's samples,
which is another function than the one a single process trains. Here the statistics are summed over
the data axes, forward and backward; torch's SyncBatchNorm does the same, on GPUs only.
"""

from __future__ import annotations

import types

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from parallax.core.mesh import total

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


class _SumOverData(Function):
    """Sum over the data axes; the gradient of a sum that every rank uses is the sum of
    gradients.
    """

    @staticmethod
    def forward(ctx, value: Tensor, mesh: DeviceMesh) -> Tensor:  # type: ignore[override]
        ctx.mesh = mesh
        return total(value.clone(), mesh)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return total(grad.clone().contiguous(), ctx.mesh), None


def synchronise(model: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Make every BatchNorm of a model use the global batch's statistics while training.

    Returns:
        The names of the modules that were changed; names of parameters and buffers stay.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, KINDS):
            module.forward = types.MethodType(_forward_over(mesh), module)
            found.append(name)
    return found


def _forward_over(mesh: DeviceMesh):
    def forward(self: BatchNorm, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        use_batch = self.training or self.running_mean is None
        if not use_batch:
            return nn.functional.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                False,
                0.0,
                self.eps,
            )
        wide = input.double() if input.dtype == torch.float64 else input.float()
        dims = [d for d in range(input.ndim) if d != 1]
        here = torch.full(
            (1,), input.numel() / max(input.shape[1], 1), device=wide.device, dtype=wide.dtype
        )
        count = total(here, mesh)
        mean = _SumOverData.apply(wide.sum(dims), mesh) / count
        shape = [1, -1] + [1] * (input.ndim - 2)
        # Two passes: the sum of squares around the mean loses no digits to cancellation.
        spread = _SumOverData.apply((wide - mean.view(shape)).square().sum(dims), mesh)
        variance = spread / count
        if self.training and self.track_running_stats:
            _track(self, mean.detach(), (spread / (count - 1)).detach())
        out = (wide - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            out = out * self.weight.to(out.dtype).view(shape) + self.bias.to(out.dtype).view(shape)
        return out.to(input.dtype)

    return forward


@torch.no_grad()
def _track(module: BatchNorm, mean: Tensor, unbiased: Tensor) -> None:
    assert module.running_mean is not None and module.running_var is not None
    assert module.num_batches_tracked is not None
    module.num_batches_tracked.add_(1)
    momentum = module.momentum
    if momentum is None:
        momentum = 1.0 / float(module.num_batches_tracked)
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), momentum)
    module.running_var.lerp_(unbiased.to(module.running_var.dtype), momentum)
