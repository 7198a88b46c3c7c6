"""The reference: one process, plain torch, the whole batch, float64; and how far it may be off.

How far two correct runs may differ is measured rather than guessed. A run in arithmetic of unit
roundoff u is, backward-error-wise, an exact run with slightly other weights: each inner product of
length n is exact for weights changed by a relative amount of at most lambda * sqrt(n) * u, with
probability at least 1 - 2 exp(-lambda^2 / 2) (Higham and Mary, "A new approach to probabilistic
rounding error analysis", SIAM J. Sci. Comput. 41(5), 2019). So the reference is run again a few
times with its weights changed by random amounts of that size in every forward, and its gradients by
as much of the largest gradient (where a gradient is zero by cancellation, rounding leaves that
much). How far losses, gradients and weights then move is what rounding may do to this model, with
this depth, this optimizer and these steps (Parker, "Monte Carlo arithmetic", 1997).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parallax.core.names import Names
from parallax.core.plan import Plan
from parallax.core.step import read_loss
from parallax.step.facts import Averaging, Clipping
from parallax.store.facts import Compression, Precision
from parallax.surgery.facts import Float8
from parallax.testing.record import Named, Record, flat_moments
from parallax.testing.setting import Setting, quiet

UNIT_ROUNDOFF = {
    "fp64": 2.0**-53,
    "fp32": 2.0**-24,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
    "fp8": 2.0**-4,
}
LAMBDA = 4.0  # an inner product stays within its bound with probability 1 - 2 exp(-8) = 0.9993


class Narrowest(TorchFunctionMode):
    """Finds the narrowest floating-point dtype that differentiable values pass through.

    Many models cast inside: transformers computes norms and losses in float32 whatever the model's
    dtype. Such a model has float32's accuracy in a float64 check, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unit = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point() and out.requires_grad:
            self.unit = max(self.unit, torch.finfo(out.dtype).eps / 2)
        return out


def roundoff(setting: Setting, plan: Plan, model: nn.Module) -> float:
    """Relative change of a weight that stands for the rounding of one layer.

    Small compute dtypes round each product's operands and result; sums are kept in float32, so
    their length counts with float32's roundoff.

    Args:
        setting: What is trained.
        plan: For the compute dtype of a native check.
        model: The model in float64; run forward once.
    """
    batch = setting.batch(0, wide=True)
    with quiet(), Narrowest() as inside:
        setting.loss_fn(model, batch)
    length = max(
        [max(p.shape, default=1) for p in model.parameters()]
        + [leaf.numel() for leaf in optree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    )
    wide = UNIT_ROUNDOFF["fp64" if setting.dtype == "fp64" else "fp32"]
    unit = math.sqrt(length) * min(max(wide, inside.unit), UNIT_ROUNDOFF["fp32"])
    unit += inside.unit if inside.unit > UNIT_ROUNDOFF["fp32"] else 0.0
    compute = plan[Precision].compute
    if setting.dtype == "native" and compute in ("bf16", "fp16"):
        unit += UNIT_ROUNDOFF[compute]
    sent = plan[Compression].gradients
    if setting.dtype == "native" and sent in ("bf16", "fp8"):
        unit += UNIT_ROUNDOFF[sent]
    rounded = 0.0
    if setting.dtype == "native" and plan[Float8].recipe not in (None, "off"):
        # Operands are rounded to e4m3 and, backwards, e5m2: what is drawn is that rounding itself,
        # not a bound on what it adds up to.
        rounded = 2 * UNIT_ROUNDOFF["fp8"]
    return LAMBDA * unit + rounded


def run(
    setting: Setting,
    plan: Plan,
    steps: int,
    *,
    noise: float = 0.0,
    draw: int = 0,
    skipped: Collection[int] = (),
) -> Record:
    """Train in this process and write down what happened.

    Args:
        setting: What to train.
        plan: Read for what changes the meaning of a step, such as clipping; its layout is ignored.
        steps: Number of steps.
        noise: Relative size of random changes to weights and gradients; 0 for the reference.
        draw: Which random changes.
        skipped: Steps whose update is left out.
    """
    model = setting.model().to(torch.float64)
    optimizer = setting.optimizer_fn(model) if setting.optimizer_fn else None
    names = Names.of(model)
    params = names.parameters_of(model)
    generator = torch.Generator().manual_seed(1000 + draw)
    record = Record(start=_copy(params))
    averages = _Averages(plan, params)
    with quiet():
        for step in range(steps):
            batch = setting.batch(step, wide=True)
            with _shaken(params, noise, generator):
                value, count, is_sum = read_loss(setting.loss_fn(model, batch), batch)
                loss = value / count if is_sum else value
                loss.backward()
            record.losses.append(float(loss.detach()))
            _shake_gradients(params, noise, generator)
            if step in skipped:
                record.grads.append({})
                model.zero_grad()
                continue
            record.grads.append(
                {n: p.grad.clone() for n, p in params.items() if p.grad is not None}
            )
            norm = _norm(record.grads[-1], plan)
            record.norms.append(float(norm))
            _clip(model, plan, norm)
            if optimizer is not None:
                optimizer.step()
                averages.after(params)
            model.zero_grad()
        model.eval()
        with torch.no_grad(), _shaken(params, noise, generator):
            batch = setting.batch(0, wide=True)
            value, count, is_sum = read_loss(setting.loss_fn(model, batch), batch)
            record.evaluation = float(value / count if is_sum else value)
    record.params = _copy(params)
    record.averages = averages.values
    record.buffers = _copy(names.buffers_of(model))
    if optimizer is not None:
        state = optimizer.state
        record.moments = flat_moments({n: state[p] for n, p in params.items() if p in state})
    return record


def _norm(grads: Named, plan: Plan) -> Tensor:
    order = math.inf if plan[Clipping].norm_type == "inf" else 2.0
    full = [g for g in grads.values() if g.numel()]  # a maximum over nothing is an error
    return torch.nn.utils.get_total_norm(full, order)


def _clip(model: nn.Module, plan: Plan, norm: Tensor) -> None:
    said = plan[Clipping]
    if said.max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), said.max_norm, norm)
    if said.value is not None:
        torch.nn.utils.clip_grad_value_(model.parameters(), said.value)


class _Averages:
    """An exponential moving average, by its definition."""

    def __init__(self, plan: Plan, params: dict[str, nn.Parameter]) -> None:
        self._said = plan[Averaging]
        self._updates = 0
        trained = {n: p for n, p in params.items() if p.requires_grad}
        self.values = _copy(trained) if self._said.decay is not None else {}

    def after(self, params: dict[str, nn.Parameter]) -> None:
        self._updates += 1
        for name, average in self.values.items():
            decay = self._said.decay or 0.0
            if self._said.warmup:
                decay = min(decay, (1 + self._updates) / (10 + self._updates))
            self.values[name] = decay * average + (1 - decay) * params[name].detach()


def _copy(tensors: dict[str, Any]) -> Named:
    return {name: t.detach().clone() for name, t in tensors.items()}


@contextmanager
def _shaken(
    params: dict[str, nn.Parameter], noise: float, generator: torch.Generator
) -> Iterator[None]:
    if not noise:
        yield
        return
    kept = _copy(params)
    with torch.no_grad():
        for p in params.values():
            p.mul_(1 + noise * _signs(p, generator))
    yield
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(kept[name])


def _shake_gradients(
    params: dict[str, nn.Parameter], noise: float, generator: torch.Generator
) -> None:
    grads = [p.grad for p in params.values() if p.grad is not None]
    if not noise or not grads:
        return
    largest = max((float(g.abs().max()) for g in grads if g.numel()), default=0.0)
    for g in grads:
        g.add_(noise * largest * _signs(g, generator))


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(like.shape, generator=generator, dtype=torch.float64) * 2 - 1
