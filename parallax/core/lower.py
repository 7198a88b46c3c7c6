"""What core needs of torch's insides.

Many tensors at once: torch's multi-tensor kernels, whose names are private but long in use.
`torch.nn.utils.clip_grad_norm_` and torch's optimizers are written with them; there are no public
ones. Without them, a model of 300 parameters launches 300 kernels where one or two do.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def _alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors by dtype and device, as the kernels want them."""
    rows: defaultdict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        rows[tensor.dtype, tensor.device].append(tensor)
    return list(rows.values())


@torch.no_grad()
def multiply_(tensors: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiply tensors in place by one number."""
    for row in _alike(tensors):
        # A factor of a small dtype would be off by the same for all: the product is rounded, once.
        exact = torch.promote_types(row[0].dtype, torch.float32)
        by = factor.to(exact) if isinstance(factor, Tensor) else factor
        torch._foreach_mul_(row, by)


@torch.no_grad()
def clamp_(tensors: Iterable[Tensor], bound: float) -> None:
    """Bring every element into [-bound, bound], in place."""
    for row in _alike(tensors):
        torch._foreach_clamp_max_(row, bound)
        torch._foreach_clamp_min_(row, -bound)


@torch.no_grad()
def approach_(averages: Sequence[Tensor], values: Sequence[Tensor], weight: float) -> None:
    """Move each average towards its value: `average += weight * (value - average)`, in place."""
    if averages:
        torch._foreach_lerp_(list(averages), list(values), weight)


@torch.no_grad()
def norms(tensors: Sequence[Tensor], order: float) -> list[Tensor]:
    """The norm of each tensor, 0-dim, in the given order of tensors."""
    out: dict[int, Tensor] = {}
    for row in _alike(tensors):
        full = [t for t in row if t.numel()]  # a maximum over nothing is an error
        if full:
            out.update(zip(map(id, full), torch._foreach_norm(full, order), strict=True))
    return [out[id(t)] if id(t) in out else t.new_zeros(()) for t in tensors]


held: Callable[[DTensor], Tensor] = attrgetter("_local_tensor")
"""The very tensor that a DTensor holds on this rank.

Not `to_local()`, which makes a new view of a parameter at each call (torch 2.13): whether
fully_shard has put another tensor in its place could not be told by identity.
"""


def lend_gradients(parameters: Sequence[DTensor], parts: Sequence[nn.Parameter]) -> None:
    """Give each part its parameter's gradient, this rank's own share of it, without a copy."""
    try:
        for parameter, part in zip(parameters, parts, strict=True):
            part.grad = parameter.grad._local_tensor  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    except AttributeError:  # some have no gradient, or one that is no DTensor
        for parameter, part in zip(parameters, parts, strict=True):
            grad = parameter.grad
            part.grad = grad._local_tensor if isinstance(grad, DTensor) else grad


def take_back_gradients(parts: Sequence[nn.Parameter]) -> None:
    """Let the parts forget their gradients: a second owner would keep them alive."""
    deque(map(setattr, parts, repeat("grad"), repeat(None)), maxlen=0)  # a loop, in C


def moved(parameters: Sequence[DTensor], parts: Sequence[Tensor]) -> bool:
    """Whether any parameter's local tensor is another than it was."""
    return not all(map(is_, map(held, parameters), parts))
