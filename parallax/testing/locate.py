"""Finding the first module whose output, or gradient, differs from one process."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallax.core.mesh import rank_on
from parallax.core.step import read_loss
from parallax.core.transform import Transform
from parallax.testing.setting import Setting, quiet
from parallax.testing.world import RankError, World

# Activations are compared against the largest value of their tensor, layers deep: a fault is of
# that size; rounding stays within a few hundred times the roundoff of one layer.
SLACK = 256.0

Trace = dict[str, Tensor]


def locate(transform: Transform, setting: Setting, ranks: World, noise: float) -> str:
    """Say where a composition first departs from one process, in the first step.

    Returns:
        A sentence with the module's full name, or what is right although the result is not.
    """
    forward, backward, grads = _here(setting)
    try:
        rows = ranks.run(_traced, setting, transform)
    except RankError:
        return ""
    copies = {row[0]: row for row in reversed(rows)}  # one rank for each data rank
    data = [copies[rank] for rank in sorted(copies)]
    for name, whole in forward.items():
        parts = [row[1].get(name) for row in data]
        if _differs(parts, whole, noise, scale=1):
            return (
                f"In the first forward, the output of {name or 'the model'} is the first to differ."
            )
    for name, whole in backward.items():  # filled in backward order
        parts = [row[2].get(name) for row in data]
        if _differs(parts, whole, noise, scale=len(data)):
            return (
                f"In the first backward, the gradient that reaches the output of "
                f"{name or 'the model'} is the first to differ."
            )
    mine = rows[0][3]
    for name, whole in reversed(grads.items()):
        if name not in mine or _differs([mine[name]], whole, noise, scale=1):
            return (
                f"What activations can be compared agree; in backward order the gradient of {name} "
                "is the first parameter's to differ: a reduction of parameter gradients is at "
                "fault."
            )
    return (
        "The first step's activations and gradients agree: what differs is what is done with them "
        "(clipping, the optimizer's step, later steps, or saving and loading)."
    )


def _here(setting: Setting) -> tuple[Trace, Trace, Trace]:
    model = setting.model().to(torch.float64)
    batch = setting.batch(0, wide=True)
    with quiet():
        forward, backward = _watch(model)
        value, count, is_sum = read_loss(setting.loss_fn(model, batch), batch)
        (value / count if is_sum else value).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return forward, backward, grads


def _traced(setting: Setting, transform: Transform) -> tuple[int, Trace, Trace, Trace]:
    from parallax.core.collect import collect

    model = setting.model()
    optimizer = setting.optimizer_fn(model) if setting.optimizer_fn else None
    boosted = transform(model, optimizer)
    with quiet():
        forward, backward = _watch(model)
        boosted.grad(setting.loss_fn, boosted.shard(setting.batch(0)))
    grads = collect(boosted.grads, boosted.mesh)
    return rank_on(boosted.mesh), forward, backward, grads if dist.get_rank() == 0 else {}


def _watch(model: nn.Module) -> tuple[Trace, Trace]:
    """Write down the first output of every module, and the gradient that reaches it."""
    forward: Trace = {}
    backward: Trace = {}

    def note_gradient(name: str, gradient: Tensor) -> None:
        backward.setdefault(name, _whole(gradient))

    def hook(name: str) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple | list) and output else output
            if not isinstance(tensor, Tensor) or name in forward:
                return
            forward[name] = _whole(tensor)
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(note_gradient, name))

        return note

    for name, module in model.named_modules():
        module.register_forward_hook(hook(name))
    return forward, backward


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()


def _differs(parts: list[Tensor | None], whole: Tensor, noise: float, *, scale: int) -> bool:
    """Whether the data ranks' parts, put together, are another tensor.

    Not if their shapes do not fit, as where a tensor axis cuts the activation.
    """
    if any(p is None or p.ndim != whole.ndim for p in parts):
        return False
    rows = [p for p in parts if p is not None]
    if whole.ndim and any(p.shape[1:] != whole.shape[1:] for p in rows):
        return False
    together = torch.cat(rows).double() if whole.ndim else rows[0].double()
    if together.shape != whole.shape:
        return False
    apart = (together / scale - whole).abs().max() if whole.numel() else torch.zeros(())
    size = whole.abs().max() if whole.numel() else torch.zeros(())
    return bool(apart > SLACK * noise * size) or bool(apart.isnan())
