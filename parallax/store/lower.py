"""STORE: the only code that calls `fully_shard`.

`fully_shard` may be applied once to a module, and dtype, sharding and residency are its arguments:
so the transforms of this room are three statements and this one function. Every layout goes through
it, also one rank and plain replication (a shard axis of size 1), which keeps one code path.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState  # to see a failed pass
from torch.distributed.tensor import DTensor

# The same walk over outputs that fully_shard's own hooks take; a private name, stable since 2.1.
from torch.distributed.utils import _apply_to_tensors

from parallax.core.mesh import agree, axis_of, size_of, total
from parallax.core.phase import Phase
from parallax.core.plan import Plan
from parallax.core.rewrite import Draft, Room
from parallax.core.slices import local
from parallax.core.units import kept_of, units_of
from parallax.errors import StepError
from parallax.store.batchnorm import synchronise
from parallax.store.compress import CompressedReduceScatter
from parallax.store.facts import Compression, Precision, Sharding
from parallax.store.gather import from_rows, to_rows
from parallax.store.precision import DTYPES, policy_of, to_masters
from parallax.store.twins import average_twins, twins_of


def build(draft: Draft, plan: Plan) -> tuple[Draft, Room]:
    """Carry out what the plan says; see `STORE`."""
    (model,) = draft.parts
    sharding, precision = plan[Sharding], plan[Precision]
    if precision.compute is not None:
        to_masters(model, torch.float64 if precision.compute == "fp64" else torch.float32)
    # fully_shard refuses scalars, and its reduction (_chunk_cat) refuses tensors without elements.
    loose = [p for p in model.parameters() if p.ndim == 0 or p.numel() == 0]
    shared = plan.size() > 1 or precision.compute is not None
    traced = any(r.phase is Phase.COMPILE for r in plan.rewrites)
    normalised = synchronise(model, draft.mesh, draft.stand_in, traced=traced) if shared else []
    replicas = plan.size("data_replicate")
    kind = plan[Compression].gradients
    # fully_shard's own all-reduce over copies cannot be replaced: it is given the shard axis alone,
    # and copies are averaged in its hook.
    both = replicas > 1 and kind is None
    data = draft.mesh["data_replicate", "data_shard"] if both else draft.mesh["data_shard"]
    drop = sharding.stage == 3
    options: dict[str, Any] = {"mesh": data, "ignored_params": set(loose)}
    units = units_of(model, sharding.units)
    kept = kept_of(model, precision.keep or ())
    compute = DTYPES[precision.compute or "fp32"]
    wide = torch.float64 if compute == torch.float64 else torch.float32
    full = MixedPrecisionPolicy(param_dtype=wide, output_dtype=compute)
    inner = policy_of(precision, root=False)
    # Inner before outer: an outer call takes whatever is not yet taken.
    for name, module in sorted((units | kept).items(), key=lambda item: -item[0].count(".")):
        if _has_parameters(module, loose):
            _own_outputs(module, None)
            policy = full if name in kept else inner
            fully_shard(module, reshard_after_forward=drop, mp_policy=policy, **options)
    _own_outputs(model, DTYPES.get(precision.outputs or "fp32") if precision.compute else None)
    # None: torch keeps the root's parameters until its backward, which follows at once.
    fully_shard(
        model,
        reshard_after_forward=None if drop else False,
        mp_policy=policy_of(precision, root=True),
        **options,
    )
    shards: list[FSDPModule] = [m for m in model.modules() if isinstance(m, FSDPModule)]
    _drop_after_inference(model, shards)
    if kind is not None:
        _compress(shards, kind, draft.mesh)
    store = Store(
        shards, loose, dict(model.named_parameters()), draft.mesh, hold=sharding.stage in (None, 1)
    )
    model.register_forward_hook(lambda *_: store.rouse())
    before, forget_inner, reduced = draft.settle, draft.forget, draft.gradients

    twins = twins_of(draft) if kind is not None else []

    def settle() -> None:
        if twins:
            average_twins(twins, draft.mesh)
        before()
        store.settle()

    def forget() -> None:
        forget_inner()
        store.forget()

    notes = {
        "units": list(units),
        "kept": list(kept),
        "batchnorm": normalised,
        "loose": len(loose),
        "gathered": gather_in_fp8(model) if plan.size("data_shard") > 1 else {},
        "store": store,
    }

    def gradients() -> dict[str, Tensor]:
        return {**reduced(), **store.gradients()}

    draft = draft._replace(sync=store.sync, gradients=gradients, settle=settle, forget=forget)
    return draft, Room(notes=notes)


def _compress(shards: list[FSDPModule], kind: str, mesh: DeviceMesh) -> None:
    """Replace the reductions of gradients."""
    reduction = CompressedReduceScatter(kind)
    copies, _, group = axis_of(mesh, "data_replicate")
    for shard in shards:
        shard.set_custom_reduce_scatter(reduction)  # pyright: ignore[reportArgumentType]
        if copies > 1:
            shard.set_all_reduce_hook(lambda flat: reduction.mean_(flat, group))


class Store:
    """The sharded modules of one model, between steps.

    Args:
        shards: All modules under `fully_shard`.
        loose: Parameters it does not take; each data rank holds them whole.
        mesh: The world's mesh.
        hold: Keep parameters gathered between the backwards of one accumulation.
    """

    def __init__(
        self,
        shards: list[FSDPModule],
        loose: list[nn.Parameter],
        named: dict[str, nn.Parameter],
        mesh: DeviceMesh,
        *,
        hold: bool,
    ) -> None:
        self._shards = shards
        self._root = shards[0]  # modules() gives the model itself first
        self._loose = loose
        self._mesh = mesh
        self._window = False
        self._reduce = True
        self._asleep = list(shards)
        skipped = {id(p) for p in loose}
        self._trained = {
            name: p for name, p in named.items() if id(p) not in skipped and p.requires_grad
        }
        self._hold = hold

    def sync(self, reduce: bool, last: bool | None = None) -> None:
        """Whether the next backward reduces gradients, and whether it waits until that is done."""
        root, last = self._root, reduce if last is None else last
        self._window |= not reduce
        root.set_requires_gradient_sync(reduce)
        root.set_is_last_backward(last)
        if self._hold:
            root.set_reshard_after_backward(last)
        self._reduce = reduce

    def rouse(self) -> None:
        """After a forward whose gradients are not reduced: leave out what was never gathered.

        torch looks for the gradient of the gathered parameter there, which a unit that no forward
        ever ran does not have.
        """
        if self._reduce or not self._asleep:
            return
        asleep = []
        for module in self._asleep:
            group = module._get_fsdp_state()._fsdp_param_group
            never = group and not all(hasattr(p, "_unsharded_param") for p in group.fsdp_params)
            module.set_requires_gradient_sync(bool(never), recurse=False)
            asleep += [module] if never else []
        self._asleep = asleep

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients that wait for their reduction, by name."""
        return {f"{name}/unreduced": g for name, g in self._unreduced()}

    def settle(self) -> None:
        """Put parameters back into shards, and see that every gradient was reduced."""
        for module in self._shards:
            module.reshard()
        if self._window:
            self._refuse_unreduced()
            self._window = False
        self._refuse_unlike()
        if self._loose:
            self._reduce_loose()

    def _unreduced(self) -> Iterator[tuple[str, Tensor]]:
        # torch keeps an unreduced gradient in a private field, and a step would pass it over in
        # silence: the sharded parameter's own .grad is None.
        for module in self._shards:
            group = module._get_fsdp_state()._fsdp_param_group
            for held in group.fsdp_params if group else ():
                unreduced = held.unsharded_accumulated_grad
                if unreduced is None and hasattr(held, "_unsharded_param"):
                    unreduced = held._unsharded_param.grad
                if unreduced is not None:
                    yield held._param_fqn or "a parameter", local(unreduced)

    def _refuse_unreduced(self) -> None:
        for name, _ in self._unreduced():
            raise StepError(
                f"the gradient of {name} was added up inside no_sync() and never reduced over the "
                "data ranks.\n\nRun the last backward of the window outside no_sync(), then step."
            )

    def _refuse_unlike(self) -> None:
        """Refuse gradients that only some ranks have.

        A unit's reduction packs the parameters that got a gradient; where ranks packed different
        ones, it has added up different parameters. The exchange is between hosts, in eight bytes:
        it does not wait for the device.
        """
        if dist.get_world_size() == 1:
            return
        has = tuple(p.grad is not None for p in self._trained.values())
        mine = hash(has) >> 2
        pair = torch.tensor([mine, -mine], device=_host_device(self._mesh))
        dist.all_reduce(pair, dist.ReduceOp.MAX)
        highest, lowest = pair.tolist()
        if highest == -lowest:
            return
        _, rows = agree("", has)
        index = next(i for i, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1)
        some = [rank for rank, row in enumerate(rows) if row[index]]
        raise StepError(
            f"{list(self._trained)[index]} got a gradient on the ranks {some} only, so gradients "
            "of different parameters were added up. Nothing was updated.\n\nIn one step a "
            "parameter is used on all ranks or on none: run every branch on every rank, if need be "
            "on one row with weight zero."
        )

    def forget(self) -> None:
        """Drop gradients that torch keeps off `.grad`, and what a failed backward left behind."""
        states = [module._get_fsdp_state() for module in self._shards]
        if any(state._training_state is not TrainingState.IDLE for state in states):
            _reset(self._root, states)
        for module in self._shards:
            group = module._get_fsdp_state()._fsdp_param_group
            for held in group.fsdp_params if group else ():
                held.unsharded_accumulated_grad = None
                if hasattr(held, "_unsharded_param"):
                    held._unsharded_param.grad = None

    @torch.no_grad()
    def _reduce_loose(self) -> None:
        """Average loose gradients. Averaging twice changes nothing, so this may run at any time."""
        ranks = size_of(self._mesh)
        if ranks == 1:
            return
        rows = [p for p in self._loose if p.requires_grad]
        if not rows:
            return
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in rows]
        has = torch.tensor([p.grad is not None for p in rows], device=rows[0].device)
        flat = torch.cat([g.reshape(-1).double() for g in grads])
        sums = total(torch.cat([flat, has.double()]), self._mesh)
        means = (sums[: flat.numel()] / ranks).split([p.numel() for p in rows])
        for parameter, mean, count in zip(rows, means, sums[flat.numel() :].tolist(), strict=True):
            # No rank has a gradient: one process would have none either, and skip the update.
            parameter.grad = mean.to(parameter.dtype).view_as(parameter) if count else None


def _host_device(mesh: DeviceMesh) -> str:
    """Where a small exchange between hosts runs: the CPU where the world has a CPU backend."""
    return "cpu" if "cpu" in str(dist.get_backend_config()) else mesh.device_type


def _reset(root: FSDPModule, states: list[Any]) -> None:
    """Bring torch's hooks back to where an iteration starts, after one that raised half-way."""
    if hasattr(root, "reset_iter_state"):  # torch 2.13
        root.reset_iter_state()
        return
    for state in states:
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        state._comm_ctx.post_forward_order.clear()
        state._comm_ctx.all_gather_state = None
        group = state._fsdp_param_group
        if group is not None:
            group._training_state = TrainingState.IDLE
            group._post_forward_indices.clear()
            group.wait_for_unshard()
            group.reshard()


def _has_parameters(module: nn.Module, loose: list[nn.Parameter]) -> bool:
    skipped = {id(p) for p in loose}
    return any(id(p) not in skipped for p in module.parameters())


def _own_outputs(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Give out tensors of their own where the model returns views.

    fully_shard hangs its backward on the outputs, and an in-place operation on a view would cut it
    off; a tensor-parallel head's gathered output is such a view. The cast to the output dtype,
    which fully_shard does anyway, copies; only without one is a copy made for this.
    """

    def own(tensor: Tensor) -> Tensor:
        if not (tensor.requires_grad and tensor._is_view()):
            return tensor
        casts = dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype
        return tensor.to(dtype) if casts else tensor.clone()

    model.register_forward_hook(lambda module, args, output: _apply_to_tensors(own, output))


def _drop_after_inference(model: nn.Module, shards: list[FSDPModule]) -> None:
    """Put parameters back into shards after a forward without backward.

    Otherwise torch leaves them gathered until the next backward, and a weight that is loaded or
    stepped meanwhile would not be seen by the next forward.
    """

    def reshard(module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            for shard in shards:
                shard.reshard()

    model.register_forward_hook(reshard)


def gather_in_fp8(model: nn.Module) -> dict[str, str]:
    """Let the weights of float8 layers cross the ranks in float8.

    A sharded parameter whose local tensor has `fsdp_pre_all_gather` and `fsdp_post_all_gather` says
    itself what is gathered, an extension point of `fully_shard`. What comes out is the compute
    dtype; the layer rounds it to float8 again, which changes nothing that its own scale can hold.

    Returns:
        The weights' names, with `"float8"` or why it is not.
    """
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if not getattr(module, "gathers_fp8", False):
            continue
        weight = module.get_parameter("weight")
        assert isinstance(weight, DTensor), "fully_shard made all its parameters DTensors"
        part: Any = weight._local_tensor  # the very object that fully_shard asks
        ranks = _ranks(weight)
        if weight.shape[0] % ranks:
            found[name] = f"{weight.shape[0]} rows do not divide by {ranks} ranks"
            continue
        found[name] = "float8"
        part.fsdp_pre_all_gather = _Before(part)
        part.fsdp_post_all_gather = _after
    return found


def _ranks(weight: DTensor) -> int:
    """Ranks that cut the rows of a weight."""
    sizes = zip(weight.device_mesh.shape, weight.placements, strict=True)
    return math.prod(size for size, p in sizes if getattr(p, "dim", None) == 0)


class _Before:
    """What a rank gives to the gather."""

    def __init__(self, part: Tensor) -> None:
        self._part = part

    def __call__(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], tuple[()]]:
        return to_rows(self._part), ()


def _after(
    outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """What comes out of the gather."""
    small, scales = outputs
    wide = from_rows(small, scales, dtype)
    if out is None:
        return wide, (wide,)
    target = out.to_local() if isinstance(out, DTensor) else out
    # Autograd saved this buffer in the forward, and would see a change; fully_shard's own copy out
    # of a gather does the same.
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(target):
        target.copy_(wide)
    return None
