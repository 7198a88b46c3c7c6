"""A budget of bytes: decided from what the first step measures, alike on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallax import StepError, Transform, remat, zero
from parallax.testing import World, toys

pytestmark = pytest.mark.ranks


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return toys.Gpt(blocks=4, dropout=0.1)


def decided(transform: Transform, uneven: bool = False) -> dict[str, Any]:
    model = gpt()
    boosted = transform(model, toys.adamw(model))
    notes = boosted.rooms["remat"].notes
    runs: list[str] = []
    for name, block in model.blocks.named_children():
        block.norm1.register_forward_hook(lambda *a, name=name: runs.append(name))
    counts, chosen = [], [list(notes["recomputed"])]
    for step in range(3):
        rows = toys.tokens(7 if uneven else 8, step)
        boosted.train_step(toys.next_token, boosted.shard(rows))
        counts.append([runs.count(name) for name in "0123"])
        chosen.append(list(notes["recomputed"]))
        runs.clear()
    figures = {key: notes[key] for key in ("held", "inputs", "least", "need")}
    return {"counts": counts, "chosen": chosen, **figures}


BYTES = 4 * toys.CONTEXT * toys.WIDTH * 4
"""One activation of a rank: 4 rows, float32."""


def test_as_many_units_are_spared_as_fit(world2: World) -> None:
    roomy = world2.run(decided, zero(2) | remat(budget="1GiB"))[0]
    names = [f"blocks.{i}" for i in range(4)]
    assert roomy["inputs"] == dict.fromkeys(names, BYTES)
    held = roomy["held"]["blocks.1"]
    assert set(roomy["held"].values()) == {held}
    assert 10 * BYTES < held < 25 * BYTES
    assert roomy["least"] == 3 * BYTES + held
    assert roomy["need"] == 4 * held
    # Every unit runs for itself, for the measurement, and again in the backward; later once.
    assert roomy["counts"] == [[3] * 4, [1] * 4, [1] * 4]
    assert roomy["chosen"] == [names, [], [], []]

    tight = world2.run(decided, zero(2) | remat(budget=2 * BYTES + 2 * held))
    assert tight[0] == tight[1]
    assert tight[0]["chosen"] == [names, *[["blocks.0", "blocks.1"]] * 3]
    assert tight[0]["counts"] == [[3] * 4, [2, 2, 1, 1], [2, 2, 1, 1]]
    assert tight[0]["need"] == 2 * BYTES + 2 * held


def test_ranks_with_unlike_parts_decide_alike(world2: World) -> None:
    rows = world2.run(decided, zero(3) | remat(budget="64KiB"), uneven=True)
    assert rows[0] == rows[1]
    assert rows[0]["inputs"] == {f"blocks.{i}": BYTES for i in range(4)}  # of the larger part


def too_small() -> tuple[str, bool]:
    model = gpt()
    boosted = (zero(2) | remat(budget="4KiB"))(model, toys.adamw(model))
    before = boosted.gather()
    text = ""
    try:
        boosted.train_step(toys.next_token, boosted.shard(toys.tokens(7 + dist.get_rank() * 0)))
    except StepError as error:
        text = str(error)
    after = boosted.gather()
    same = before is None or all(
        torch.equal(after["params"][n], p) for n, p in before["params"].items()
    )
    return text, same and boosted.step == 0


def test_a_budget_that_is_too_small_is_an_error_on_every_rank(world2: World) -> None:
    least = world2.run(decided, zero(2) | remat(budget="1GiB"))[0]["least"]
    text = (
        f"remat(budget='4KiB') allows 4.00 KiB of activations, and the units of this model need "
        f"{least / 1024:.2f} KiB ({least} bytes) on a rank when all are recomputed.\n\nRaise the "
        "budget, or make the batch of a rank smaller."
    )
    assert world2.run(too_small) == [(text, True)] * 2
