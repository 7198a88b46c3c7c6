"""Learning-rate schedules as functions over torch's LambdaLR.

Each takes the optimizer and gives a `torch.optim.lr_scheduler.LambdaLR`, to be stepped after each
update. With b the learning rate the optimizer was made with, w updates of warm-up from 0 and s
updates in all, the rate before update t (counted from 0) is b times the factor that is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def constant(optimizer: Optimizer, *, warmup: int = 0) -> LambdaLR:
    """A constant rate: t / w, then 1.

    Args:
        optimizer: What to schedule.
        warmup: Updates of linear warm-up.

    Raises:
        ValueError: A number of updates is negative or no whole number.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> constant(sgd, warmup=4).get_last_lr()
        [0.0]
    """
    _driven("constant", optimizer)
    _whole("constant", warmup=warmup)
    return LambdaLR(optimizer, _warm(warmup, lambda t: 1.0))


def linear(optimizer: Optimizer, *, steps: int, warmup: int = 0, floor: float = 0.0) -> LambdaLR:
    """A straight line down: t / w, then from 1 at w to `floor` at s, and `floor` from there on.

    Args:
        optimizer: What to schedule.
        steps: Updates in all.
        warmup: Updates of linear warm-up.
        floor: Factor at the end.

    Raises:
        ValueError: The numbers do not fit: see the message.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> (factor,) = linear(sgd, steps=4, warmup=2).lr_lambdas
        >>> [round(factor(t), 4) for t in range(5)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    return _down("linear", optimizer, steps, warmup, floor, lambda way: 1 - way)


def cosine(optimizer: Optimizer, *, steps: int, warmup: int = 0, floor: float = 0.0) -> LambdaLR:
    """Half a cosine down (arXiv:1608.03983): t / w, then from 1 at w to `floor` at s.

    Args:
        optimizer: What to schedule.
        steps: Updates in all.
        warmup: Updates of linear warm-up.
        floor: Factor at the end.

    Raises:
        ValueError: The numbers do not fit: see the message.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> (factor,) = cosine(sgd, steps=2, floor=0.5).lr_lambdas
        >>> [round(factor(t), 4) for t in range(3)]
        [1.0, 0.75, 0.5]
    """
    return _down(
        "cosine", optimizer, steps, warmup, floor, lambda way: (1 + math.cos(math.pi * way)) / 2
    )


def inverse_sqrt(optimizer: Optimizer, *, warmup: int) -> LambdaLR:
    """The first Transformer's schedule (arXiv:1706.03762): t / w, then sqrt(w / t).

    Args:
        optimizer: What to schedule.
        warmup: Updates of linear warm-up, one at least.

    Raises:
        ValueError: The warm-up is not a positive whole number.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> (factor,) = inverse_sqrt(sgd, warmup=1).lr_lambdas
        >>> [round(factor(t), 4) for t in range(3)]
        [0.0, 1.0, 0.7071]
    """
    _driven("inverse_sqrt", optimizer)
    _whole("inverse_sqrt", warmup=warmup)
    if warmup == 0:
        raise ValueError(
            "inverse_sqrt was given warmup=0, and its decay is measured by the warm-up. Give one "
            "update at least."
        )
    return LambdaLR(optimizer, _warm(warmup, lambda t: math.sqrt(warmup / t)))


def wsd(
    optimizer: Optimizer, *, steps: int, decay: int, warmup: int = 0, floor: float = 0.0
) -> LambdaLR:
    """Warm-up, stable, decay (arXiv:2404.06395): t / w, then 1, then in a line to `floor` at s.

    Args:
        optimizer: What to schedule.
        steps: Updates in all.
        decay: Updates of decay at the end.
        warmup: Updates of linear warm-up.
        floor: Factor at the end.

    Raises:
        ValueError: The numbers do not fit: see the message.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> (factor,) = wsd(sgd, steps=4, decay=2).lr_lambdas
        >>> [round(factor(t), 4) for t in range(5)]
        [1.0, 1.0, 1.0, 0.5, 0.0]
    """
    _driven("wsd", optimizer)
    _whole("wsd", warmup=warmup, decay=decay, steps=steps)
    _fits("wsd", steps, floor, warmup=warmup, decay=decay)
    begin = steps - decay
    return LambdaLR(
        optimizer,
        _warm(warmup, lambda t: floor + (1 - floor) * (1 - _share(t, begin, steps))),
    )


def _down(
    name: str,
    optimizer: Optimizer,
    steps: int,
    warmup: int,
    floor: float,
    shape: Callable[[float], float],
) -> LambdaLR:
    """From 1 at the end of the warm-up to `floor` at the end; `shape` is 1 at 0 and 0 at 1."""
    _driven(name, optimizer)
    _whole(name, warmup=warmup, steps=steps)
    _fits(name, steps, floor, warmup=warmup)
    return LambdaLR(
        optimizer,
        _warm(warmup, lambda t: floor + (1 - floor) * shape(_share(t, warmup, steps))),
    )


def _warm(warmup: int, then: Callable[[int], float]) -> Callable[[int], float]:
    return lambda t: t / warmup if t < warmup else then(t)


def _share(t: int, start: int, end: int) -> float:
    """How far t is on the way from start to end, within 0 and 1."""
    return min(max((t - start) / (end - start), 0.0), 1.0) if end > start else float(t >= end)


def _driven(name: str, optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"{name} was given {optimizer!r} as its optimizer. Give boosted.optimizer, or the "
            "optimizer that is boosted."
        )


def _whole(name: str, **numbers: int) -> None:
    for key, value in numbers.items():
        least = 1 if key == "steps" else 0
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(
                f"{name} was given {key}={value!r}. Give a whole number of updates, {least} or "
                "more."
            )


def _fits(name: str, steps: int, floor: float, **parts: int) -> None:
    if sum(parts.values()) > steps or steps == 0:
        listed = " and ".join(f"{key}={value}" for key, value in parts.items())
        raise ValueError(
            f"{name} was given {listed} of steps={steps} updates. Give "
            f"steps={sum(parts.values()) or 1} or more."
        )
    if not 0 <= floor <= 1:
        raise ValueError(
            f"{name} was given floor={floor!r}. Give the share of the learning rate that is left "
            "at the end, from 0 to 1."
        )
