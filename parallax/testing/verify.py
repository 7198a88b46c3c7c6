"""verify: does a composition train like one process, on this model?"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.core.axes import Axes, Fill
from parallax.core.fact import join
from parallax.core.plan import Plan
from parallax.core.transform import Transform, compose, override
from parallax.errors import ParallaxError
from parallax.store import compress, mixed_precision
from parallax.store.facts import Compression, Precision
from parallax.surgery import fp8
from parallax.surgery.facts import Float8
from parallax.testing import reference
from parallax.testing.locate import locate
from parallax.testing.record import Named, Record, Trial
from parallax.testing.report import Report, Row
from parallax.testing.setting import Check, Setting
from parallax.testing.trial import try_out
from parallax.testing.world import RankError, World, pool

DRAWS = 3  # noisy references
SAFETY = 4.0  # a few draws see most, not all, of what rounding can do


def verify(
    transform: Transform,
    model_fn: Callable[[], nn.Module],
    optimizer_fn: Callable[[nn.Module], Optimizer] | None,
    loss_fn: Callable[[Any, Any], Any],
    batches: Sequence[Any],
    *,
    world: int | World | None = None,
    steps: int = 3,
    dtype: Check = "fp64",
    seed: int = 0,
    blame: bool = True,
) -> Report:
    """Train a model under a composition and in one process, and compare everything.

    Compared are the loss, every gradient and the global norm of each step, every parameter, buffer
    and optimizer moment after the last, the evaluation loss, the same once more after saving and
    loading half-way, and how the ranks draw random numbers. Bounds come from the model itself: see
    `parallax.testing.reference`. Dropout is switched off in both runs; any other randomness in the
    forward makes two runs differ and has to be switched off in `model_fn`.

    Args:
        transform: The composition to verify.
        model_fn: Makes the model; the same weights for the same torch seed.
        optimizer_fn: Makes the optimizer from the model, or None to compare gradients only.
        loss_fn: `loss_fn(model, batch)`: the mean loss, or the pair `(sum, count)`.
        batches: Global batches, one a step, used in turn.
        world: Number of ranks, or a live `World`; None takes the smallest that the composition
            fits with two ranks on every axis that takes what is left.
        steps: Number of steps.
        dtype: `"fp64"` checks the logic of the composition to float64 rounding, replacing its
            compute dtype; `"fp32"` likewise; `"native"` checks the composition as it is.
        seed: Seed of the model.
        blame: When it fails, find the smallest set of transforms that fails, and the first module.

    Returns:
        The report; print it, or ask `report.ok`.

    Raises:
        ParallaxError: The composition cannot be laid out in that world.

    Cost:
        On the ranks 1.5 x steps training steps; here 4 x steps in float64.

    Example:
        >>> from parallax import zero
        >>> report = verify(  # doctest: +SKIP
        ...     zero(2), lambda: nn.Linear(4, 4), lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        ...     lambda m, b: m(b).square().mean(), [torch.randn(8, 4)])
        >>> report.ok  # doctest: +SKIP
        True
    """
    start = time.perf_counter()
    setting = Setting(model_fn, optimizer_fn, loss_fn, batches, dtype, seed)
    size = world.size if isinstance(world, World) else world or smallest_world(transform)
    plan = transform.plan(size)
    report = Report(repr(transform), size, steps, dtype)
    live = {world.size: world} if isinstance(world, World) else {}

    def ranks_of(number: int) -> World:
        return live.get(number) or pool(number)

    bounds = None
    try:
        trial = _run(ranks_of(size), setting, transform, steps)
    except RankError as error:
        report.error = _last_line(error)
    else:
        bounds = _Bounds(setting, plan, trial)
        report.rows = list(bounds.compare(trial, plan))
    if not report.ok and blame:
        report.blame = _smallest(transform, setting, size, steps, report.error, ranks_of)
        guilty = compose(*(transform.atoms[name] for name in report.blame))
        if bounds is not None:
            report.where = _where(
                guilty if report.blame else transform, setting, size, bounds, ranks_of
            )
    report.seconds = time.perf_counter() - start
    return report


def smallest_world(transform: Transform) -> int:
    """The fewest ranks on which a composition shows what it does: 2 on every open axis."""
    facts = join(transform.claims)
    taken = 1
    for size in facts.get(Axes, Axes()).said().values():
        taken *= size
    asked = facts.get(Axes, Axes()).said()
    opened = [name for name in facts.get(Fill, Fill()).said() if name not in asked]
    return taken * (2 if opened else 1)


def in_dtype(transform: Transform, dtype: Check) -> Transform:
    """The composition as it is checked in a dtype: with that compute dtype in place of its own."""
    facts = join(transform.claims)
    if dtype == "native":
        return transform
    if Compression in facts:
        transform = override(transform, compress("full"))
    if Float8 in facts:
        transform = override(transform, fp8("off"))
    if Precision in facts:
        transform = override(transform, mixed_precision(dtype, reduce=dtype, outputs=dtype))
    return transform


def _run(ranks: World, setting: Setting, transform: Transform, steps: int) -> Trial:
    with tempfile.TemporaryDirectory(prefix="parallax-verify-") as directory:
        half_way = directory if setting.optimizer_fn is not None and steps > 1 else None
        actual = in_dtype(transform, setting.dtype)
        rows = ranks.run(try_out, setting, actual, steps, half_way)
    record, resumed, _, _ = rows[0]
    return Trial(record, resumed or Record(), [row[2] for row in rows], [row[3] for row in rows])


class _Bounds:
    """The reference and, for every number of it, how far rounding may move it."""

    def __init__(self, setting: Setting, plan: Plan, trial: Trial) -> None:
        steps = len(trial.record.losses)
        skipped = [i for i, taken in enumerate(trial.record.took_place) if not taken]
        self.noise = reference.roundoff(setting, plan, setting.model().to(torch.float64))
        self.exact = reference.run(setting, plan, steps, skipped=skipped)
        self.draws = [
            reference.run(setting, plan, steps, noise=self.noise, draw=i, skipped=skipped)
            for i in range(DRAWS)
        ]
        # float16 may overflow where float64 does not, and its loss scale then skips the update.
        allowed = setting.dtype == "native" and plan[Precision].compute == "fp16"
        self.idle = None if allowed or not skipped else skipped[0]

    def compare(self, trial: Trial, plan: Plan) -> Iterator[Row]:
        """A row for each quantity."""
        here, exact = trial.record, self.exact
        yield self._named(
            "initial parameters", here.start, exact.start, [r.start for r in self.draws]
        )
        yield self._numbers("loss", here.losses, lambda r: r.losses)
        yield self._steps("gradient", here.grads)
        if here.norms:
            yield self._numbers("gradient norm", here.norms, lambda r: r.norms)
        if self.idle is not None:
            yield Row("updates made", f"step {self.idle} was skipped", float("inf"), 0.0)
        yield from self._end("", here)
        if trial.resumed.losses:
            tail = len(trial.resumed.losses)
            yield self._numbers("resumed loss", trial.resumed.losses, lambda r: r.losses[-tail:])
            yield from self._end("resumed ", trial.resumed)
        yield _equal_losses(trial)
        yield _random_streams(trial)

    def _end(self, prefix: str, here: Record) -> Iterator[Row]:
        for what in ("params", "buffers", "moments", "averages"):
            mine, exact = getattr(here, what), getattr(self.exact, what)
            if mine or exact:
                label = {"params": "parameters", "moments": "optimizer state"}.get(what, what)
                yield self._named(
                    prefix + label, mine, exact, [getattr(r, what) for r in self.draws]
                )
        yield self._numbers(f"{prefix}evaluation loss", [here.evaluation], lambda r: [r.evaluation])

    def _steps(self, label: str, grads: list[Named]) -> Row:
        def spread(rows: list[Named]) -> Named:
            return {f"{n}, step {i}": g for i, row in enumerate(rows) for n, g in row.items()}

        return self._named(
            label, spread(grads), spread(self.exact.grads), [spread(r.grads) for r in self.draws]
        )

    def _named(self, label: str, mine: Named, exact: Named, draws: list[Named]) -> Row:
        missing = sorted(set(exact) ^ set(mine))
        if missing:
            side = "only in one process" if missing[0] in exact else "only on the ranks"
            return Row(label, f"{missing[0]} is there {side}", float("inf"), 0.0)
        rows = [
            Row(label, name, *self._apart(mine[name], value, [d[name] for d in draws]))
            for name, value in exact.items()
        ]
        return max(rows, key=_badness, default=Row(label, "none", 0.0, 0.0))

    def _numbers(self, label: str, mine: list[float], of: Callable[[Record], list[float]]) -> Row:
        rows = [
            Row(label, f"step {i}", *self._apart(_wide(a), _wide(b), [_wide(d) for d in ds]))
            for i, (a, b, *ds) in enumerate(
                zip(mine, of(self.exact), *(of(r) for r in self.draws), strict=True)
            )
        ]
        return max(rows, key=_badness)

    def _apart(self, mine: Tensor, exact: Tensor, draws: list[Tensor]) -> tuple[float, float]:
        if mine.shape != exact.shape:
            return float("inf"), 0.0
        if mine.numel() == 0:
            return 0.0, 0.0
        exact = exact.double()
        error = float((mine.double() - exact).abs().max())
        moved = max(float((d.double() - exact).abs().max()) for d in draws)
        return error, SAFETY * moved + self.noise * float(exact.abs().max())


def _wide(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


def _badness(row: Row) -> float:
    if row.error != row.error:
        return float("inf")
    return row.error / row.bound if row.bound else (float("inf") if row.error else 0.0)


def _equal_losses(trial: Trial) -> Row:
    apart = [(max(step) - min(step), i) for i, step in enumerate(zip(*trial.losses, strict=True))]
    worst, step = max(apart, default=(0.0, 0))
    return Row("loss equal on all ranks", f"step {step}", worst, 0.0)


def _random_streams(trial: Trial) -> Row:
    """Ranks of one data rank must draw the same numbers, and those of two different ones."""
    for (i, (data_a, a)), (j, (data_b, b)) in itertools.combinations(
        enumerate(trial.randomness), 2
    ):
        if (data_a == data_b) != (a == b):
            how = "different" if data_a == data_b else "the same"
            return Row("random streams", f"ranks {i} and {j} draw {how} numbers", float("inf"), 0.0)
    return Row("random streams", "all ranks", 0.0, 0.0)


def _smallest(
    transform: Transform,
    setting: Setting,
    size: int,
    steps: int,
    error: str,
    ranks_of: Callable[[int], World],
) -> list[str]:
    """The smallest set of transforms that fails, fewest first."""
    atoms = transform.atoms
    for count in range(1, len(atoms)):
        for names in itertools.combinations(atoms, count):
            part = compose(*(atoms[name] for name in names))
            if not _passes(part, setting, size, steps, error, ranks_of):
                return list(names)
    return list(atoms)


def _passes(
    part: Transform,
    setting: Setting,
    size: int,
    steps: int,
    refusal: str,
    ranks_of: Callable[[int], World],
) -> bool:
    fewer = smallest_world(part)
    for ranks in (size, fewer):
        try:
            plan = part.plan(ranks)
        except ParallaxError:
            continue
        try:
            trial = _run(ranks_of(ranks), setting, part, steps)
        except RankError as error:
            # A part that is refused by itself, and says so, breaks nothing; unless the whole was
            # refused for the same reason.
            return isinstance(error.__cause__, ParallaxError) and _last_line(error) != refusal
        return all(row.ok for row in _Bounds(setting, plan, trial).compare(trial, plan))
    return True


def _where(
    transform: Transform,
    setting: Setting,
    size: int,
    bounds: _Bounds,
    ranks_of: Callable[[int], World],
) -> str:
    ranks = size if _fits(transform, size) else smallest_world(transform)
    return locate(in_dtype(transform, setting.dtype), setting, ranks_of(ranks), bounds.noise)


def _fits(transform: Transform, size: int) -> bool:
    try:
        transform.plan(size)
    except ParallaxError:
        return False
    return True


def _last_line(error: RankError) -> str:
    return str(error.__cause__) if error.__cause__ is not None else str(error)
