"""Ranks that do different things in one step: exact where they may, refused where they may not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallax import ParallaxError, Transform, clip, compose, dp, zero
from parallax.core.slices import local
from parallax.testing import World

pytestmark = pytest.mark.ranks


class Branches(nn.Module):
    """Two layers of one size, of which a rank runs one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        if both:
            return self.a(x) + self.b(x)
        return self.a(x) if dist.get_rank() == 0 else self.b(x)


def branching(transform: Transform, both: bool) -> tuple[str, bool]:
    model = Branches()
    boosted = transform(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = {n: local(p).clone() for n, p in boosted.params.items()}
    text = ""
    try:
        boosted.train_step(lambda m, x: m(x, both).square().mean(), torch.randn(3, 4))
    except ParallaxError as error:
        text = f"{type(error).__name__}: {error}"
    return text, all(torch.equal(before[n], local(p)) for n, p in boosted.params.items())


@pytest.mark.parametrize("transform", [dp(), zero(1), zero(2), zero(3)], ids=repr)
def test_a_branch_of_some_ranks_only_is_refused(transform: Transform, world2: World) -> None:
    """The sizes agree, so that the sum of two different gradients raises no error by itself."""
    for text, untouched in world2.run(branching, transform, False):
        assert text == (
            "StepError: a.weight got a gradient on the ranks [0] only, so gradients of different "
            "parameters were added up. Nothing was updated.\n\nIn one step a parameter is used on "
            "all ranks or on none: run every branch on every rank, if need be on one row with "
            "weight zero."
        )
        assert untouched
    assert world2.run(branching, transform, True) == [("", False)] * 2


def weighted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Not a number on a row that weighs nothing."""
    loss = model(batch["x"]).square().mean(-1)
    return (loss * batch["w"]).sum() / batch["w"].sum()


def standing_in() -> tuple[bool, float]:
    """A rank without rows, whose stand-in row has a loss that is not a number."""
    model = nn.Linear(4, 4)
    boosted = zero(2)(model, torch.optim.SGD(model.parameters(), lr=0.1))
    first = {"x": torch.ones(4, 4), "w": torch.tensor([0.0, 1.0, 0.0, 1.0])}
    boosted.train_step(weighted, boosted.shard(first))
    loss = boosted.train_step(weighted, boosted.shard({"x": torch.ones(1, 4), "w": torch.ones(1)}))
    finite = all(bool(local(p).isfinite().all()) for p in boosted.params.values())
    return finite, float(loss)


def test_a_stand_in_row_poisons_nothing(world2: World) -> None:
    for finite, loss in world2.run(standing_in):
        assert finite
        assert loss == loss


def nothing_counted() -> bool:
    model = nn.Linear(4, 4)
    transform = compose(zero(2), clip(1.0))
    boosted = transform(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = {n: local(p).clone() for n, p in boosted.params.items()}
    boosted.train_step(lambda m, x: (m(x).sum(), torch.tensor(0)), torch.ones(2, 4))
    return all(torch.equal(before[n], local(p)) for n, p in boosted.params.items())


def test_a_step_in_which_nothing_counts_changes_nothing(world2: World) -> None:
    assert all(world2.run(nothing_counted))


def stateful() -> str:
    """An optimizer that was stepped on one rank only."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    if dist.get_rank() == 0:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    try:
        zero(2)(model, optimizer)
    except ParallaxError as error:
        return str(error).partition("\n")[0]
    return ""


def test_state_that_only_one_rank_has_is_refused(world2: World) -> None:
    assert world2.run(stateful) == ["the ranks train with different settings:"] * 2
