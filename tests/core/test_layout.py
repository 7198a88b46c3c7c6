"""How ranks are laid out over axes, for worlds of any size, with no process."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallax import Axes, Fill, MeshError, compose, dp, layout, tp, zero
from parallax.core.axes import AXES

sizes = st.none() | st.sampled_from([1, 2, 3, 4, 8])
axes = st.builds(Axes, pp=sizes, data_replicate=sizes, data_shard=sizes, sp=sizes, tp=sizes)
flags = st.none() | st.just(True)
fills = st.builds(Fill, data_replicate=flags, data_shard=flags)
worlds = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 64, 96, 1024]) | st.integers(1, 200)


@given(axes, fills, worlds)
def test_every_rank_has_one_place_or_the_layout_is_refused(
    axes: Axes, fill: Fill, world: int
) -> None:
    said = axes.said()
    taken = math.prod(said.values())
    left = world // taken
    open_axes = [name for name in fill.said() if name not in said]
    fits = world % taken == 0 and (left == 1 or len(open_axes) == 1)
    if not fits:
        with pytest.raises(MeshError):
            layout(axes, fill, world)
        return
    found = layout(axes, fill, world)
    assert list(found) == list(AXES) == ["pp", "data_replicate", "data_shard", "sp", "tp"]
    assert math.prod(found.values()) == world
    assert {name: found[name] for name in said} == said
    assert all(found[name] == 1 for name in AXES if name not in said and name not in open_axes)
    assert left == 1 or found[open_axes[0]] == left


@given(st.integers(1, 64), st.integers(1, 64))
def test_the_remedies_of_a_refusal_work(world: int, degree: int) -> None:
    try:
        plan = tp(degree).plan(world)
    except MeshError as error:
        text = str(error)
    else:
        assert plan.size("tp") == world == degree
        return
    if "does not divide" in text:
        assert world % degree
        assert tp(degree).plan(degree).world == degree
        assert f"Launch a multiple of {degree} ranks" in text
        products = [int(n) for n in text.rpartition("one of ")[2].rstrip(".").split(", ")]
        assert products
        assert all(compose(tp(n), dp()).plan(world).world == world for n in products)
    else:
        for remedy in (zero(2), dp()):
            assert compose(tp(degree), remedy).plan(world).size() == world // degree
        assert f"launch {degree} rank" in text


def test_a_thousand_ranks_need_no_process() -> None:
    plan = compose(tp(8), dp(4), zero(3)).plan(1024)
    assert dict(plan.sizes) == {
        "pp": 1,
        "data_replicate": 4,
        "data_shard": 32,
        "sp": 1,
        "tp": 8,
    }
    assert plan.size() == 128
    assert str(plan) == (
        "compose(dp(4), tp(8), zero(3)) on 1024 ranks\n"
        "  mesh      data_replicate 4 x data_shard 32 x tp 8\n"
        "  facts     Cutting(), Sharding(stage=3)\n"
        "  rewrites  tensor [TENSOR] -> store [STORE]"
    )


def test_hybrid_sharding_is_a_composition() -> None:
    plan = compose(dp(2), zero(3)).plan(8)
    assert (plan.size("data_replicate"), plan.size("data_shard")) == (2, 4)
    assert plan == compose(zero(3), dp(2)).plan(8)
    assert (plan.who("data_replicate"), plan.who("data_shard")) == ("dp(2)", "zero(3)")


def test_axes_of_size_one_stay_in_the_mesh() -> None:
    assert dict(compose(dp(), zero(2), tp(1)).plan(1).sizes) == dict.fromkeys(AXES, 1)


def test_a_number_rules_over_taking_what_is_left() -> None:
    assert compose(zero(2), zero(2, degree=2), dp()).plan(8).size("data_replicate") == 4


@pytest.mark.parametrize("given_degree", [0, -1, 1.5, True, "2"])
def test_a_degree_is_a_positive_whole_number(given_degree: object) -> None:
    for name, make in (("dp", dp), ("tp", tp)):
        with pytest.raises(ValueError, match=f"^{name} was given the degree") as caught:
            make(given_degree)
        assert str(caught.value) == (
            f"{name} was given the degree {given_degree!r}. A degree is a whole number of ranks, 1 "
            "or more, and a factor of the number of ranks that run."
        )


def test_tp_needs_a_number() -> None:
    with pytest.raises(ValueError, match=r"^tp needs") as caught:
        tp(None)  # type: ignore[arg-type]
    assert str(caught.value) == "tp needs a number of ranks: tp(2)."
