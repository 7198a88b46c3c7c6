"""TENSOR: turns rules into torch's tensor-parallel styles, and watches that the rules are sound."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from parallax.core.axes import Axes
from parallax.core.plan import Plan
from parallax.core.rewrite import Draft, LossFn, Room
from parallax.errors import ParallaxError
from parallax.tensor.audit import Audit
from parallax.tensor.facts import Cutting
from parallax.tensor.rules import resolve, size_faults


def check(draft: Draft, plan: Plan) -> Iterable[ParallaxError]:
    """What in the model does not fit the plan."""
    (model,) = draft.parts
    found, faults = resolve(model, plan[Cutting].rules, draft.names)
    yield from faults
    if not faults:
        by = plan.said_by(Axes, "tp")
        yield from size_faults(model, found, plan.size("tp"), by)


def build(draft: Draft, plan: Plan) -> tuple[Draft, Room]:
    """Carry out what the plan says; see `TENSOR`."""
    (model,) = draft.parts
    cutting, mesh = plan[Cutting], draft.mesh["tp"]
    found, _ = resolve(model, cutting.rules, draft.names)
    keep_cut = bool(cutting.loss_parallel)
    for name, style in found.items():
        module = model.get_submodule(name)
        plan_of_module = _torch_style(style, module, keep_cut)
        if plan_of_module is not None:
            # Every rank holds the same whole weight by now, so cutting needs no communication.
            parallelize_module(module, mesh, plan_of_module, src_data_rank=None)
    _tie_again(model, draft.names.ties)

    audit = Audit(model, draft.names.parameters_of(model), draft.mesh)
    before, inner = draft.settle, draft.grad

    def settle() -> None:
        before()
        _sum_partial(model)
        audit.gradients()

    def grad(loss_fn: LossFn, batch: Any) -> Tensor:
        with loss_parallel():
            return inner(loss_fn, batch)

    notes = {"styles": found, "audit": audit}
    draft = draft._replace(settle=settle)
    if keep_cut:
        draft = draft._replace(grad=grad, context=loss_parallel)
    return draft, Room(notes=notes)


def _torch_style(style: str, module: nn.Module, keep_cut: bool) -> ParallelStyle | None:
    vocabulary = isinstance(module, nn.Embedding)
    if style == "replicate":
        return None
    if style == "colwise" or (style == "embedding_colwise" and not vocabulary):
        return ColwiseParallel()
    if style == "embedding_colwise":
        return ColwiseParallel(output_layouts=Replicate())
    if style == "colwise_gather_output":
        if keep_cut and not vocabulary:
            return ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        return ColwiseParallel(output_layouts=Replicate())
    if style == "rowwise_split_input":
        return RowwiseParallel(input_layouts=Replicate())
    if style in ("rowwise", "embedding_rowwise"):
        return RowwiseParallel(input_layouts=Replicate() if vocabulary else Shard(-1))
    # In the sequence styles activations stay DTensors, so that what follows sees how they are cut.
    if style in ("rowwise_scatter_sequence", "embedding_rowwise_scatter_sequence"):
        layout = Replicate() if vocabulary else Shard(-1)
        return RowwiseParallel(
            input_layouts=layout, output_layouts=Shard(1), use_local_output=False
        )
    if style == "sequence_parallel":
        return SequenceParallel(use_local_output=False)
    # The module sees each rank's own heads: cut along some dim it does not mix. DTensor then knows
    # that the weight's gradient is a sum over ranks; which dim carries the label does not matter.
    return SequenceParallel(sequence_dim=0, use_local_output=True)


def _tie_again(model: nn.Module, ties: tuple[tuple[str, str], ...]) -> None:
    for alias, first in ties:
        source = model.get_parameter(first)
        path, _, leaf = alias.rpartition(".")
        if model.get_parameter(alias) is not source:
            setattr(model.get_submodule(path), leaf, source)


@torch.no_grad()
def _sum_partial(model: nn.Module) -> None:
    """Give each gradient its parameter's placement.

    Without fully_shard, autograd leaves a DTensor gradient as the backward made it: for a
    replicated weight that saw a cut activation, a partial sum on each rank.
    """
    for parameter in model.parameters():
        grad = parameter.grad
        if not isinstance(grad, DTensor):
            continue
        if not isinstance(parameter, DTensor):  # a plain scalar that met a cut activation
            parameter.grad = grad.full_tensor()
        elif grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)
