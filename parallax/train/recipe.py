"""The optimizer of the main job and its learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from parallax.train.options import Job


def learning_rate(step: int, *, warmup: int, steps: int) -> float:
    """The part of the highest learning rate that is used at a step.

    Args:
        step: Counted from 0.
        warmup: Steps of linear rise.
        steps: Steps in all.

    Returns:
        A factor: rising to 1, then along a cosine to 0.1.
    """
    if step < warmup:
        return (step + 1) / warmup
    passed = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return 0.55 + 0.45 * math.cos(math.pi * passed)


def adamw(model: nn.Module, job: Job) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices and none on vectors."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {
                "params": [parameter for parameter in parameters if parameter.dim() > 1],
                "weight_decay": job.weight_decay,
            },
            {
                "params": [parameter for parameter in parameters if parameter.dim() < 2],
                "weight_decay": 0.0,
            },
        ],
        lr=job.lr,
        betas=(0.9, 0.95),
        fused=all(parameter.is_cuda for parameter in parameters),
    )


def schedule(optimizer: torch.optim.Optimizer, job: Job, start: int) -> LambdaLR:
    """Sets the learning rate of every step on from one.

    Args:
        optimizer: Whose rate to set.
        job: Says the highest rate and how long it rises.
        start: How many steps the optimizer has been through.

    Returns:
        The scheduler, to be stepped after every step.
    """
    for group in optimizer.param_groups:
        # Anew from the job, and not from a checkpoint, which holds the rate of its last step.
        group["lr"] = group["initial_lr"] = job.lr
    return LambdaLR(
        optimizer,
        lambda step: learning_rate(step, warmup=job.warmup, steps=job.steps),
        last_epoch=start - 1,
    )
