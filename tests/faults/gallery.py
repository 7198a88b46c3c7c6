"""The fault gallery: small transforms, each broken in a way that users of rival systems have met.

Every one trains without an error and with wrong numbers, or drops a promise; `verify` must fail and
blame it. The kinds are those of the reports that parallax was built against: gradients wrong where
two parallelisms meet, norms and clipping, accumulation, resume, ties, options dropped in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallax.core.fact import Fact
from parallax.core.mesh import rank_on
from parallax.core.phase import Phase
from parallax.core.plan import Plan
from parallax.core.rewrite import Draft, Rewrite, Room
from parallax.core.slices import local
from parallax.core.transform import Transform, state
from parallax.step.facts import Clipping

Wrap = Callable[[Draft, Plan], Draft]


@dataclass(frozen=True)
class Planted(Fact):
    """That a fault is planted."""

    name: str | None = None


@dataclass(frozen=True)
class Exhibit:
    """A fault, what it needs to show, and where it hides.

    Attributes:
        name: What is broken.
        partners: Spellings of transforms that it takes to show; the blame names them with it.
        wrap: Breaks a draft.
        phase: When.
        pair: Whether the loss is a pair `(sum, count)`.
    """

    name: str
    wrap: Wrap
    phase: Phase = Phase.ACCUMULATE
    partners: tuple[str, ...] = ()
    pair: bool = True

    @property
    def transform(self) -> Transform:
        def build(draft: Draft, plan: Plan) -> tuple[Draft, Room]:
            return self.wrap(draft, plan), Room()

        rewrite = Rewrite(self.name, self.phase, build)
        return state(self.name, Planted(name=self.name), rewrites=(rewrite,))


def after_grad(change: Callable[[Draft, dict[str, nn.Parameter]], None]) -> Wrap:
    """Break gradients right after the backward."""

    def wrap(draft: Draft, plan: Plan) -> Draft:
        inner, parameters = draft.grad, draft.names.parameters_of(*draft.parts)

        @torch.no_grad()
        def broken() -> None:
            change(draft, parameters)

        def grad(loss_fn: Any, batch: Any) -> Tensor:
            loss = inner(loss_fn, batch)
            broken()
            return loss

        return draft._replace(grad=grad)

    return wrap


def before_update(change: Callable[[Draft, dict[str, nn.Parameter]], None]) -> Wrap:
    """Break something right before the optimizer's step."""

    def wrap(draft: Draft, plan: Plan) -> Draft:
        inner, parameters = draft.update, draft.names.parameters_of(*draft.parts)

        def update() -> None:
            with torch.no_grad():
                change(draft, parameters)
            inner()

        return draft._replace(update=update)

    return wrap


def scale(choose: Callable[[Draft, str, nn.Parameter], float]) -> Wrap:
    """Multiply gradients by a factor each."""

    def change(draft: Draft, parameters: dict[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                local(parameter.grad).mul_(choose(draft, name, parameter))

    return after_grad(change)


def is_cut(draft: Draft, parameter: nn.Parameter, axis: str) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(
        n == axis and hasattr(p, "dim") for n, p in zip(names, parameter.placements, strict=True)
    )


def tensor_size(draft: Draft) -> int:
    return draft.mesh["tp"].size()


# -- gradients where two parallelisms meet


def sum_over_tp_missing(draft: Draft, name: str, parameter: nn.Parameter) -> float:
    return 1.0 if is_cut(draft, parameter, "tp") else 1.0 / tensor_size(draft)


def norm_layers_not_reduced(draft: Draft, name: str, parameter: nn.Parameter) -> float:
    return 1.0 / tensor_size(draft) if ".norm" in name else 1.0


def expert_gradient_doubled(draft: Draft, name: str, parameter: nn.Parameter) -> float:
    return 2.0 if "up" in name else 1.0


def replicas_not_averaged(draft: Draft, name: str, parameter: nn.Parameter) -> float:
    return float(draft.mesh["data_replicate"].size())


def shards_summed_for_averaged(draft: Draft, name: str, parameter: nn.Parameter) -> float:
    return float(draft.mesh["data_shard"].size())


def rowwise_output_not_summed(draft: Draft, plan: Plan) -> Draft:
    """A row-cut layer whose partial outputs are scaled up instead of summed."""
    size = tensor_size(draft)

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output / size if isinstance(module.weight, DTensor) else output

    for name, module in draft.parts[0].named_modules():
        if name.endswith("down"):
            module.register_forward_hook(hook)
    return draft


def column_input_gradient_not_summed(draft: Draft, plan: Plan) -> Draft:
    size = tensor_size(draft)
    for name, module in draft.parts[0].named_modules():
        if name.endswith("norm2"):
            module.register_full_backward_pre_hook(lambda m, g: (g[0] / size,))
    return draft


def loose_gradient_not_averaged(draft: Draft, plan: Plan) -> Draft:
    """A parameter that no shard holds is stepped with each rank's own gradient."""
    inner = draft.update
    parameter = draft.names.parameters_of(*draft.parts)["scale"]
    rank, ranks = rank_on(draft.mesh), plan.size()

    @torch.no_grad()
    def update() -> None:
        if parameter.grad is not None and ranks > 1:
            parameter.grad.mul_(1.5 if rank == 0 else 0.5)
        inner()

    return draft._replace(update=update)


def same_rows_on_every_rank(draft: Draft, plan: Plan) -> Draft:
    """Every data rank is given rank 0's rows."""
    inner = draft.grad

    def grad(loss_fn: Any, batch: Any) -> Tensor:
        def same(x: Tensor) -> Tensor:
            x = x.clone()
            dist.broadcast(x, src=0)
            return x

        return inner(loss_fn, {key: same(value) for key, value in batch.items()})

    return draft._replace(grad=grad)


# -- norms and clipping


def clip_by(norm_of: Callable[[Draft, dict[str, nn.Parameter]], Tensor]) -> Wrap:
    """Clip by a wrong norm, inside the right clipping, which then finds nothing left to do."""

    def wrap(draft: Draft, plan: Plan) -> Draft:
        bound = plan[Clipping].max_norm

        def change(draft: Draft, parameters: dict[str, nn.Parameter]) -> None:
            if bound is None:
                return
            factor = torch.clamp(bound / (norm_of(draft, parameters) + 1e-6), max=1.0)
            for parameter in parameters.values():
                if parameter.grad is not None:
                    local(parameter.grad).mul_(factor)

        return before_update(change)(draft, plan)

    return wrap


def _squares(parameters: dict[str, nn.Parameter]) -> Tensor:
    grads = [local(p.grad).double() for p in parameters.values() if p.grad is not None]
    return torch.stack([g.square().sum() for g in grads]).sum()


def norm_of_own_shard(draft: Draft, parameters: dict[str, nn.Parameter]) -> Tensor:
    return _squares(parameters).sqrt()


def norm_counts_replicas_twice(draft: Draft, parameters: dict[str, nn.Parameter]) -> Tensor:
    square = _squares(parameters)
    dist.all_reduce(square)
    return square.sqrt()


def norm_still_scaled(draft: Draft, parameters: dict[str, nn.Parameter]) -> Tensor:
    square = _squares(parameters)
    dist.all_reduce(square)
    return 1024 * square.sqrt()


def clipped_though_below(draft: Draft, plan: Plan) -> Draft:
    bound = plan[Clipping].max_norm

    def change(draft: Draft, parameters: dict[str, nn.Parameter]) -> None:
        square = _squares(parameters)
        dist.all_reduce(square)
        for parameter in parameters.values():
            if parameter.grad is not None and bound is not None:
                local(parameter.grad).mul_(bound / square.sqrt())

    return before_update(change)(draft, plan)


def clipped_after_the_step(draft: Draft, plan: Plan) -> Draft:
    """The step sees gradients as large as they were."""
    room: dict[str, Tensor] = {}
    inner_grad, inner_update = draft.grad, draft.update
    parameters = draft.names.parameters_of(*draft.parts)

    def grad(loss_fn: Any, batch: Any) -> Tensor:
        loss = inner_grad(loss_fn, batch)
        room.update({n: local(p.grad).clone() for n, p in parameters.items() if p.grad is not None})
        return loss

    def update() -> None:
        inner_update()
        lr = 1e-2
        with torch.no_grad():
            for name, g in room.items():
                local(parameters[name]).sub_(lr * (g - local(parameters[name].grad)))

    return draft._replace(grad=grad, update=update)


# -- accumulation and weights of tokens


def halves(keep: Callable[[list[Tensor]], Tensor]) -> Wrap:
    """Two micro-batches whose gradients are put together wrongly."""

    def wrap(draft: Draft, plan: Plan) -> Draft:
        inner, parameters = draft.grad, draft.names.parameters_of(*draft.parts)

        def grad(loss_fn: Any, batch: Any) -> Tensor:
            rows = len(next(iter(batch.values()))) // 2
            losses, grads = [], []
            for part in (slice(0, rows), slice(rows, None)):
                for parameter in parameters.values():
                    parameter.grad = None
                losses.append(inner(loss_fn, {k: v[part] for k, v in batch.items()}))
                draft.settle()
                grads.append(
                    {n: local(p.grad).clone() for n, p in parameters.items() if p.grad is not None}
                )
            with torch.no_grad():
                for name in grads[0]:
                    local(parameters[name].grad).copy_(keep([g[name] for g in grads]))
            return torch.stack(losses).mean()

        return draft._replace(grad=grad)

    return wrap


def mean_of_means(draft: Draft, plan: Plan) -> Draft:
    """Each rank's mean counts the same, whatever number of tokens it is over."""
    inner = draft.grad

    def grad(loss_fn: Any, batch: Any) -> Tensor:
        def mean(model: Any, batch: Any) -> Tensor:
            out = loss_fn(model, batch)
            return out[0] / out[1]

        return inner(mean, batch)

    return draft._replace(grad=grad)


def loss_of_this_rank(draft: Draft, plan: Plan) -> Draft:
    inner = draft.grad

    def grad(loss_fn: Any, batch: Any) -> Tensor:
        seen: list[Any] = []

        def note(model: Any, batch: Any) -> Any:
            seen.append(loss_fn(model, batch))
            return seen[0]

        inner(note, batch)
        total, count = seen[0]
        return (total / count).detach()

    return draft._replace(grad=grad)


def loss_scale_left_in(draft: Draft, name: str, parameter: nn.Parameter) -> float:
    return 1024.0


def unreduced_on_one_unit(draft: Draft, name: str, parameter: nn.Parameter) -> float:
    return (1.0 + rank_on(draft.mesh)) if name.startswith("blocks.0") else 1.0


# -- the optimizer and its state


def state_dropped_on_load(draft: Draft, plan: Plan) -> Draft:
    """Moments that are there before this run's first update came from a file: forget them."""
    inner, fresh = draft.update, [True]

    def update() -> None:
        if fresh and draft.optimizer is not None:
            draft.optimizer.state.clear()
            fresh.clear()
        inner()

    return draft._replace(update=update)


def masters_rounded_on_load(draft: Draft, plan: Plan) -> Draft:
    inner, fresh = draft.update, [True]
    parameters = draft.names.parameters_of(*draft.parts)

    @torch.no_grad()
    def update() -> None:
        if fresh:
            for parameter in parameters.values():
                part = local(parameter)
                part.copy_(part.to(torch.bfloat16))
            fresh.clear()
        inner()

    return draft._replace(update=update)


def step_counted_twice(draft: Draft, parameters: dict[str, nn.Parameter]) -> None:
    assert draft.optimizer is not None
    for entries in draft.optimizer.state.values():
        if "step" in entries:
            entries["step"] += 1


def groups_collapsed(draft: Draft, parameters: dict[str, nn.Parameter]) -> None:
    assert draft.optimizer is not None
    first = draft.optimizer.param_groups[0]
    for group in draft.optimizer.param_groups[1:]:
        group.update({k: v for k, v in first.items() if k != "params"})


def learning_rate_discarded(draft: Draft, parameters: dict[str, nn.Parameter]) -> None:
    assert draft.optimizer is not None
    for group in draft.optimizer.param_groups:
        group["lr"] = 1e-3


def unused_parameter_decayed(draft: Draft, parameters: dict[str, nn.Parameter]) -> None:
    for parameter in parameters.values():
        if parameter.grad is None and parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def one_step_late(draft: Draft, plan: Plan) -> Draft:
    """The update uses the gradient of the step before."""
    inner, kept = draft.update, {}
    parameters = draft.names.parameters_of(*draft.parts)

    @torch.no_grad()
    def update() -> None:
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                mine = local(parameter.grad)
                before = kept.get(name, torch.zeros_like(mine))
                kept[name] = mine.clone()
                mine.copy_(before)
        inner()

    return draft._replace(update=update)


def update_lost_after_clip(draft: Draft, plan: Plan) -> Draft:
    """The next forward sees the weights from before the step, in one layer."""
    inner = draft.update
    parameters = draft.names.parameters_of(*draft.parts)

    @torch.no_grad()
    def update() -> None:
        stale = local(parameters["norm.weight"]).clone()
        inner()
        local(parameters["norm.weight"]).copy_(stale)

    return draft._replace(update=update)


def frozen_parameter_trained(draft: Draft, parameters: dict[str, nn.Parameter]) -> None:
    local(parameters["positions"]).mul_(0.99)


# -- the model


def head_untied(draft: Draft, plan: Plan) -> Draft:
    model = draft.parts[0]
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return draft


def weights_differ_at_start(draft: Draft, plan: Plan) -> Draft:
    with torch.no_grad():
        for parameter in draft.parts[0].parameters():
            parameter.mul_(1 + 0.1 * dist.get_rank())
    return draft


def buffer_forgotten(draft: Draft, plan: Plan) -> Draft:
    model = draft.parts[0]
    model.register_forward_hook(lambda m, a, o: m.seen.zero_() and None)
    return draft


def layer_skipped(draft: Draft, plan: Plan) -> Draft:
    block = draft.parts[0].blocks[1]
    block.down.register_forward_hook(lambda m, a, o: o * 0.5)
    return draft


# -- randomness


def same_dropout_on_every_rank(draft: Draft, plan: Plan) -> Draft:
    torch.manual_seed(0)
    return draft


def dropout_differs_in_tensor_group(draft: Draft, plan: Plan) -> Draft:
    torch.manual_seed(dist.get_rank())
    return draft


TP, ZERO, DP, CLIP = "tp(2)", "zero(2, degree=2)", "dp(2)", "clip(0.05)"

EXHIBITS: tuple[Exhibit, ...] = (
    Exhibit("sum_over_tp_missing", scale(sum_over_tp_missing), partners=(TP,)),
    Exhibit("norm_layers_not_reduced", scale(norm_layers_not_reduced), partners=(TP,)),
    Exhibit("expert_gradient_doubled", scale(expert_gradient_doubled)),
    Exhibit("replicas_not_averaged", scale(replicas_not_averaged), partners=(DP,)),
    Exhibit("shards_summed_for_averaged", scale(shards_summed_for_averaged), partners=(ZERO,)),
    Exhibit("unreduced_on_one_unit", scale(unreduced_on_one_unit), partners=(ZERO,)),
    Exhibit("rowwise_output_not_summed", rowwise_output_not_summed, Phase.RECOMPUTE, (TP,)),
    Exhibit(
        "column_input_gradient_not_summed", column_input_gradient_not_summed, Phase.RECOMPUTE, (TP,)
    ),
    Exhibit("loose_gradient_not_averaged", loose_gradient_not_averaged, partners=(ZERO,)),
    Exhibit("same_rows_on_every_rank", same_rows_on_every_rank, partners=(ZERO,)),
    Exhibit("norm_of_own_shard", clip_by(norm_of_own_shard), Phase.CLIP, (CLIP,)),
    Exhibit("norm_counts_replicas_twice", clip_by(norm_counts_replicas_twice), Phase.CLIP, (CLIP,)),
    Exhibit("norm_still_scaled", clip_by(norm_still_scaled), Phase.CLIP, (CLIP,)),
    Exhibit("clipped_though_below", clipped_though_below, Phase.CLIP, ("clip(50.0)",)),
    Exhibit("clipped_after_the_step", clipped_after_the_step, partners=(CLIP,)),
    Exhibit("last_micro_batch_kept", halves(lambda gs: gs[-1])),
    Exhibit("window_divided_twice", halves(lambda gs: torch.stack(gs).mean(0) / 2)),
    Exhibit("window_not_divided", halves(lambda gs: torch.stack(gs).sum(0))),
    Exhibit("mean_of_means", mean_of_means, partners=(ZERO,)),
    Exhibit("loss_of_this_rank", loss_of_this_rank, partners=(ZERO,)),
    Exhibit("loss_scale_left_in", scale(loss_scale_left_in)),
    Exhibit("state_dropped_on_load", state_dropped_on_load),
    Exhibit("masters_rounded_on_load", masters_rounded_on_load),
    Exhibit("step_counted_twice", before_update(step_counted_twice)),
    Exhibit("groups_collapsed", before_update(groups_collapsed)),
    Exhibit("learning_rate_discarded", before_update(learning_rate_discarded)),
    Exhibit("unused_parameter_decayed", before_update(unused_parameter_decayed)),
    Exhibit("one_step_late", one_step_late),
    Exhibit("update_lost_after_clip", update_lost_after_clip),
    Exhibit("frozen_parameter_trained", before_update(frozen_parameter_trained)),
    Exhibit("head_untied", head_untied, Phase.SURGERY),
    Exhibit("weights_differ_at_start", weights_differ_at_start, Phase.SURGERY, (ZERO,)),
    Exhibit("buffer_forgotten", buffer_forgotten),
    Exhibit("layer_skipped", layer_skipped),
    Exhibit("same_dropout_on_every_rank", same_dropout_on_every_rank, partners=(ZERO,)),
    Exhibit("dropout_differs_in_tensor_group", dropout_differs_in_tensor_group, partners=(TP,)),
)
