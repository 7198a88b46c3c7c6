"""Inputs of recomputed units in host memory: what goes there comes back, and buffers are reused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax import StepError, Transform, remat, tp, zero
from parallax.blocks.offload import Shelf
from parallax.testing import World, pool, toys

pytestmark = pytest.mark.ranks


def moved(transform: Transform) -> list[tuple[int, int, int]]:
    torch.manual_seed(0)
    model = toys.Gpt(blocks=4)
    boosted = transform(model, toys.adamw(model))
    shelf = boosted.rooms["remat"].notes["shelf"]
    rows = []
    for step in range(3):
        boosted.train_step(toys.next_token, boosted.shard(toys.tokens(4, step)))
        rows.append((shelf.stored, shelf.fetched, shelf.buffers))
    boosted.eval_step(toys.next_token, boosted.shard(toys.tokens(4)))
    return [*rows, (shelf.stored, shelf.fetched, shelf.buffers)]


@pytest.mark.parametrize("base", [zero(3), tp(2)], ids=repr)
def test_inputs_are_stored_and_fetched_once_a_step(base: Transform, world2: World) -> None:
    expected = [(4, 4, 4), (8, 8, 4), (12, 12, 4), (12, 12, 4)]
    assert world2.run(moved, base | remat(offload=True)) == [expected] * 2


def test_half_the_units_move_half_as_much() -> None:
    assert pool(1).run(moved, remat(0.5, offload=True))[0][-1] == (6, 6, 2)


class Rude(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        x += 1  # the caller's
        return out


def in_place() -> str:
    torch.manual_seed(0)
    model = nn.Sequential(Rude(), Rude())
    boosted = remat(offload=True)(model)
    try:
        boosted.model(torch.randn(3, 4, requires_grad=True) * 1).sum().backward()
    except StepError as error:
        return str(error)
    return "accepted"


def test_a_unit_that_changes_its_input_is_refused() -> None:
    text = (
        "0 changes its input in place, and the input was on its way to host memory.\n\nChange a "
        "copy, or leave offload out of remat."
    )
    assert pool(1).run(in_place) == [text]


def once(shelf: Shelf, x: Tensor) -> tuple[Tensor, Any]:
    with shelf.of_unit("unit", [x]):
        y = x.square()  # saves x
    return y, x


def test_a_graph_may_be_walked_twice_or_never() -> None:
    shelf = Shelf(torch.device("cpu"))
    leaf = torch.arange(5.0, requires_grad=True)
    y, _ = once(shelf, leaf * 2)
    for _ in range(2):
        (grad,) = torch.autograd.grad(y.sum(), leaf, retain_graph=True)
        assert grad.tolist() == [8.0 * i for i in range(5)]
    del y
    z, _ = once(shelf, leaf * 3)  # in the same buffer
    del z
    assert (shelf.stored, shelf.fetched, shelf.buffers) == (2, 2, 1)


def test_strides_are_kept_and_what_cannot_be_copied_stays() -> None:
    shelf = Shelf(torch.device("cpu"))
    leaf = torch.randn(3, 4, requires_grad=True)
    for x, stored in ((leaf.t() * 1, 1), ((leaf * 1)[:, ::2], 1), (torch.randn(2), 1)):
        y, _ = once(shelf, x)
        if y.requires_grad:
            saved = y.grad_fn._saved_self
            assert torch.equal(saved, x)
            assert saved.stride() == x.stride()
        assert shelf.stored == stored


def cut_along_the_sequence() -> tuple[bool, bool, int]:
    from torch.distributed.tensor import Shard, distribute_tensor

    boosted = tp(2, rules={"0": "replicate"})(nn.Sequential(nn.Linear(2, 2)))
    whole = torch.arange(24.0).view(2, 4, 3)
    leaf = distribute_tensor(whole, boosted.mesh["tp"], [Shard(1)]).requires_grad_()
    shelf = Shelf(torch.device("cpu"))
    y, x = once(shelf, leaf * 2)
    saved = y.grad_fn._saved_self
    alike = saved.placements == x.placements and saved.shape == x.shape
    y.sum().backward()
    return alike, torch.equal(leaf.grad.full_tensor(), 8 * whole), shelf.stored


def test_a_rank_moves_its_own_part_of_a_cut_tensor(world2: World) -> None:
    assert world2.run(cut_along_the_sequence) == [(True, True, 1)] * 2
