"""What each rank of a verified world does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallax.core.boosted import Boosted
from parallax.core.collect import collect
from parallax.core.mesh import rank_on
from parallax.core.transform import Transform
from parallax.testing.record import Record, flat_moments
from parallax.testing.setting import Setting, quiet


def try_out(
    setting: Setting, transform: Transform, steps: int, directory: str | None
) -> tuple[Record | None, Record | None, list[float], tuple[int, tuple[float, ...]]]:
    """Train under a composition, then again from a checkpoint saved half-way.

    Args:
        setting: What to train.
        transform: The composition.
        steps: Number of steps.
        directory: Where to save half-way; None leaves the second run out.

    Returns:
        The record and the resumed record (None on ranks other than 0), this rank's losses, and its
        data rank with the head of its random stream.
    """
    boosted = _boost(setting, transform, setting.seed)
    randomness = (rank_on(boosted.mesh), _stream(boosted))
    half = steps // 2
    record = Record(start=collect(boosted.params, boosted.mesh) or {})
    with quiet():
        for step in range(steps):
            if step == half and directory is not None:
                boosted.save(Path(directory) / "half-way")
            _step(setting, boosted, step, record)
        _finish(setting, boosted, record)
        losses = list(record.losses)
        resumed = None
        if directory is not None:
            # Other initial weights, so that what the checkpoint leaves out shows.
            again = _boost(setting, transform, setting.seed + 1)
            again.load_(Path(directory) / "half-way")
            resumed = Record()
            for step in range(half, steps):
                _step(setting, again, step, resumed)
            _finish(setting, again, resumed)
    first = dist.get_rank() == 0
    return (record if first else None), (resumed if first else None), losses, randomness


def _boost(setting: Setting, transform: Transform, seed: int) -> Boosted:
    model = setting.model(seed)
    optimizer = setting.optimizer_fn(model) if setting.optimizer_fn else None
    return transform(model, optimizer)


def _step(setting: Setting, boosted: Boosted, step: int, record: Record) -> None:
    loss = boosted.grad(setting.loss_fn, boosted.shard(setting.batch(step)))
    record.losses.append(float(loss))
    record.grads.append(collect(boosted.grads, boosted.mesh) or {})
    if boosted.optimizer is not None:
        boosted.update()
        record.took_place.append(boosted.took_place)
        if not boosted.took_place:
            record.grads[-1] = {}
        elif boosted.grad_norm is not None:
            record.norms.append(float(boosted.grad_norm))
    boosted.zero_grad()


def _finish(setting: Setting, boosted: Boosted, record: Record) -> None:
    loss = boosted.eval_step(setting.loss_fn, boosted.shard(setting.batch(0)))
    record.evaluation = float(loss)
    whole: dict[str, Any] | None = boosted.gather()
    if whole is not None:
        record.params, record.buffers = whole["params"], whole["buffers"]
        record.moments = flat_moments(whole["moments"])
        record.averages = whole["rooms"].get("ema", {}).get("averages", {})


def _stream(boosted: Boosted) -> tuple[float, ...]:
    device = boosted.mesh.device_type
    with torch.random.fork_rng():
        return tuple(torch.rand(4, device=device).tolist())
