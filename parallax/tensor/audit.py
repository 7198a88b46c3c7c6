"""A look at the first step: do the ranks of a tensor group compute the same thing?

Rules that leave an activation cut, or a gradient unreduced, train without an error and with wrong
numbers. Both show at once: the model's output, or the gradient of a replicated parameter, then
differs between the ranks of a tensor group by as much as it is large, while right rules leave at
most rounding. So the first forward and the first backward are compared, once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallax.core.mesh import device_of
from parallax.errors import DataError, RuleError

# Replicas run the same kernels on the same numbers; only atomics may reorder a sum. A fault is of
# the size of the value itself, so any bound between is safe: a few roundings of the coarsest dtype
# used.
ROUNDINGS = 8


class Audit:
    """Watches the first forward and backward of a tensor-parallel model.

    Args:
        model: The model, cut by rules.
        parameters: Its parameters by original name.
        mesh: The world's mesh.
    """

    def __init__(
        self, model: nn.Module, parameters: dict[str, nn.Parameter], mesh: DeviceMesh
    ) -> None:
        self._mesh = mesh
        self._model = model
        self._replicated = [n for n, p in parameters.items() if not _is_cut(p)]
        self._pending = mesh["tp"].size() > 1
        self._hooks = [
            model.register_forward_pre_hook(self._inputs, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._outputs),
        ]
        self._forward = False
        self._title = type(model).__name__  # fully_shard will rename the class

    def _inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._pending or not torch.is_grad_enabled():
            return
        worst = self._worst(list(_tensors((args, kwargs))))
        if worst is not None and worst[1] > 0:
            raise DataError(
                f"the ranks of one tensor group were given different inputs (tensor {worst[0]} of "
                "the model's arguments differs).\n\nGive ranks that differ only on the tp axis the "
                "same batch: use boosted.loader, or boosted.shard on a global batch, or seed your "
                "own sampler by the data rank."
            )

    def _outputs(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._pending or not torch.is_grad_enabled():
            return
        tensors = [t for t in _tensors(output) if not isinstance(t, DTensor)]
        worst = self._worst(tensors)
        if worst is not None and worst[1] > self._bound(tensors):
            raise RuleError(
                f"the output of {self._title} (tensor {worst[0]}) differs between the ranks "
                f"of a tensor group by {worst[1]:.1e} of its size: the rules leave an activation "
                "cut.\n\nEnd every column-cut path with a rowwise module, or gather it: "
                "colwise_gather_output."
            )
        self._forward = True

    def gradients(self) -> None:
        """Compare the gradients of replicated parameters, once, after the first backward."""
        if not self._pending or not self._forward:
            return
        named = dict(self._model.named_parameters())
        rows = [(n, named[n].grad) for n in self._replicated if n in named]
        grads = [
            (n, g.to_local() if isinstance(g, DTensor) else g) for n, g in rows if g is not None
        ]
        self._pending = False
        for hook in self._hooks:
            hook.remove()
        worst = self._worst([g for _, g in grads])
        if worst is not None and worst[1] > self._bound([g for _, g in grads], coarse=True):
            name = grads[worst[0]][0]
            raise RuleError(
                f"the gradient of {name}, which every rank of a tensor group holds whole, differs "
                f"between them by {worst[1]:.1e} of its size: a sum over the tp axis is "
                f"missing.\n\n{name.rpartition('.')[0]} sees a cut activation: give it the style "
                "replicated_with_grad_allreduce, or move the cut behind it."
            )

    def _bound(self, tensors: list[Tensor], coarse: bool = False) -> float:
        epsilons = [torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point()]
        if coarse:  # gradients are kept in float32 but computed in whatever the forward used
            epsilons.append(torch.finfo(torch.bfloat16).eps)
        return ROUNDINGS * max(epsilons, default=0.0)

    @torch.no_grad()
    def _worst(self, tensors: list[Tensor]) -> tuple[int, float] | None:
        """The tensor that differs most over the tensor group, and by how much of its size."""
        if not tensors:
            return None
        device = device_of(self._mesh)
        rows = torch.stack([_projection(t).to(device) for t in tensors])
        group = self._mesh["tp"].get_group()
        low, high = rows.clone(), rows.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group)
        dist.all_reduce(high, dist.ReduceOp.MAX, group)
        size = torch.maximum(high[:, 0], torch.full_like(high[:, 0], 1e-300))
        apart = (high - low).amax(dim=1) / size
        # Over all ranks: a fault of one tensor group is raised by the whole world, together.
        dist.all_reduce(apart, dist.ReduceOp.MAX)
        worst = int(apart.argmax())
        return worst, float(apart[worst])


def _projection(tensor: Tensor) -> Tensor:
    """Four numbers that tell tensors apart: the norm, and products with fixed random signs."""
    flat = tensor.detach().reshape(-1).double()
    if not flat.numel():
        return flat.new_zeros(4)
    width = min(flat.numel(), 4096)
    generator = torch.Generator().manual_seed(width)
    signs = (torch.randint(0, 2, (3, width), generator=generator) * 2 - 1).to(flat)
    folded = torch.nn.functional.pad(flat, (0, -flat.numel() % width)).view(-1, width)
    # Rows get different weights, so that swapped rows show.
    weights = torch.arange(1, len(folded) + 1, device=flat.device).to(flat) / len(folded)
    return torch.cat([flat.norm()[None], signs @ (weights @ folded)])


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        if tree.dtype is not torch.bool:
            yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from _tensors(getattr(tree, field.name))


def _is_cut(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and any(hasattr(p, "dim") for p in parameter.placements)
