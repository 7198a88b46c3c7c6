"""Which block of a tensor a rank holds, against what DTensor really put there."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from parallax import Transform, compose, dp, tp, zero
from parallax.core.axes import AXES
from parallax.core.slices import Box, box, boxes, held_once, like, local
from parallax.testing import World, toys

lengths = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=3)


@given(lengths, lengths)
def test_overlap_is_what_both_boxes_hold(
    a: list[tuple[int, int]], b: list[tuple[int, int]]
) -> None:
    n = min(len(a), len(b))
    left, right = (Box(*map(tuple, zip(*rows[:n], strict=True))) for rows in (a, b))
    whole = torch.zeros((10,) * n)
    whole[left.window] += 1
    whole[right.window] += 2
    meet = left.overlap(right)
    assert meet.empty == (not bool((whole == 3).any()))
    assert meet == right.overlap(left)
    if not meet.empty:
        assert bool((whole[meet.window] == 3).all())
        assert whole[meet.window].numel() == int((whole == 3).sum())
        assert torch.equal(whole[left.window][meet.within(left)], whole[meet.window])


SHAPES = [(8, 4), (7, 5), (3,), (1, 9), (2, 3, 5), (5, 0)]
LAYOUTS = [
    ((4,), [(Shard(0),), (Replicate(),), (Shard(-1),)]),
    (
        (2, 2),
        [
            (Shard(0), Shard(0)),
            (Shard(0), Shard(-1)),
            (Shard(-1), Shard(0)),
            (Replicate(), Shard(0)),
            (Shard(0), Replicate()),
            (Replicate(), Replicate()),
        ],
    ),
]


def faults(skew: int = 0) -> tuple[int, list[str]]:
    """How many tensors were looked at, and where box and content disagree on this rank."""
    found, count = [], 0
    for sizes, layouts in LAYOUTS:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])
        for shape, placements in itertools.product(SHAPES, layouts):
            whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
            tensor = distribute_tensor(whole, mesh, placements)
            count += 1
            if not agrees(tensor, whole, skew):
                found.append(f"{shape} {placements}")
    return count, found


def agrees(tensor: DTensor, whole: torch.Tensor, skew: int = 0) -> bool:
    """Whether box, boxes and like say what this rank holds."""
    mine, part = box(tensor), local(tensor)
    if skew:
        mine = Box((mine.offsets[0] + skew, *mine.offsets[1:]), mine.lengths)
    owners = boxes(tensor)
    covered = torch.zeros(whole.shape)
    for block in owners.values():
        covered[block.window] += 1
    again = like(part, tensor)
    return (
        torch.equal(whole[mine.window], part)
        and bool((covered == 1).all())
        and owners.get(dist.get_rank(), mine if not skew else None) == mine
        and again.placements == tensor.placements
        and torch.equal(again.full_tensor(), whole)
    )


@pytest.mark.ranks
def test_boxes_are_what_dtensor_holds_in_one_and_two_dims(world4: World) -> None:
    for count, found in world4.run(faults):
        assert count == len(SHAPES) * 9
        assert found == []


@pytest.mark.ranks
def test_a_box_off_by_one_would_be_seen(world4: World) -> None:
    for _, found in world4.run(faults, 1):
        assert len(found) > len(SHAPES)


def after_boost(transform: Transform, model_fn: Any) -> tuple[list[str], set[str], dict[str, int]]:
    """Where a boosted model's parts are not the block that box says; placements; how often held."""
    torch.manual_seed(0)
    reference = {n: p.detach().clone() for n, p in model_fn().named_parameters()}
    torch.manual_seed(0)
    boosted = transform(model_fn())
    coordinate = boosted.mesh.get_coordinate()
    wrong = [
        name
        for name, p in boosted.params.items()
        if not torch.equal(reference[name][box(p).window], local(p).detach())
    ]
    kinds = {
        type(pl).__name__ for p in boosted.params.values() for pl in getattr(p, "placements", ())
    }
    answered = {
        name: local(p).numel()
        for name, p in boosted.params.items()
        if held_once(p, coordinate, AXES)
    }
    return wrong, kinds, answered


def uneven() -> torch.nn.Module:
    return toys.Mlp(6, 10, 6)  # cut by 2, halves of 5 and 3 rows are cut again unevenly


UNEVEN = tp(2, rules={"layers.0": "colwise", "layers.1": "rowwise"})


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("transform", "model_fn"),
    [
        (zero(3), toys.Mlp),
        (compose(dp(2), zero(2)), toys.Mlp),
        (dp(), toys.Mlp),
        (tp(4), toys.Gpt),
        (compose(tp(2), zero(3)), toys.Gpt),
        (compose(tp(2), dp()), toys.Gpt),
        (compose(UNEVEN, zero(3)), uneven),
    ],
    ids=lambda x: repr(x) if isinstance(x, Transform) else x.__name__,
)
def test_boxes_are_what_a_boosted_model_holds(
    transform: Transform, model_fn: Any, world4: World
) -> None:
    rows = world4.run(after_boost, transform, model_fn)
    sizes = {name: p.numel() for name, p in model_fn().named_parameters()}
    assert [wrong for wrong, _, _ in rows] == [[]] * 4
    answered = {name: sum(row[2].get(name, 0) for row in rows) for name in sizes}
    assert answered == sizes
    if transform.plan(4).size("tp") == transform.plan(4).size("data_shard") == 2:
        assert "_StridedShard" in rows[0][1]
