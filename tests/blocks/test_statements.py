"""What may be said about blocks, what may not, and which units it means."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallax import ConflictError, Transform, compile, compose, override, remat  # noqa: A004
from parallax.blocks.which import fit, need, spread
from parallax.core.amount import bytes_of, shown

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "two answers": (
        lambda: remat(0.5, every=2),
        (
            "remat was given fraction and every, which each say which units are recomputed. Give "
            "one of them."
        ),
    ),
    "no fraction": (
        lambda: remat(0),
        (
            "remat was given fraction=0. Give a number above 0 and up to 1; to recompute nothing, "
            "leave remat out."
        ),
    ),
    "a percentage": (
        lambda: remat(50),
        (
            "remat was given fraction=50. Give a number above 0 and up to 1; to recompute nothing, "
            "leave remat out."
        ),
    ),
    "a stride of nothing": (
        lambda: remat(every=0),
        (
            "remat was given every=0. Give a whole number, 1 or more: every=2 recomputes the first "
            "unit, the third and so on."
        ),
    ),
    "no bytes": (
        lambda: remat(budget="20 gigs"),
        (
            "remat was given budget='20 gigs'. Give a positive number of bytes, or text such as "
            "'20GiB' or '512MiB'."
        ),
    ),
    "an unknown policy": (
        lambda: remat(keep="attention"),  # type: ignore[arg-type]
        "remat was given keep='attention'. Choose one of 'matmuls'.",
    ),
    "no switch": (
        lambda: remat(offload="cpu"),  # type: ignore[arg-type]
        "remat was given offload='cpu'. Choose one of True, False.",
    ),
    "kept results cannot be moved": (
        lambda: remat(keep="matmuls", offload=True),
        (
            "remat was given keep and offload: torch holds the results that keep names where they "
            "cannot be moved from. Leave one of them out."
        ),
    ),
    "a budget counts whole units": (
        lambda: remat(keep="matmuls", budget="1GiB"),
        (
            "remat was given keep and budget: a budget counts units that keep everything or their "
            "inputs alone. Leave one of them out, or give keep with a fraction."
        ),
    ),
    "an unknown mode": (
        lambda: compile(mode="fast"),
        (
            "compile was given mode='fast'. Choose one of 'default', 'reduce-overhead', "
            "'max-autotune', 'max-autotune-no-cudagraphs'."
        ),
    ),
    "another's mode": (
        lambda: compile(mode="max-autotune", backend="eager"),
        (
            "compile was given mode='max-autotune' and backend='eager'. A mode is inductor's: "
            "leave one of them out."
        ),
    ),
    "no graph switch": (
        lambda: compile(fullgraph=1),  # type: ignore[arg-type]
        "compile was given fullgraph=1. Choose one of True, False.",
    ),
    "no size switch": (
        lambda: compile(dynamic="auto"),  # type: ignore[arg-type]
        "compile was given dynamic='auto'. Choose one of True, False.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_meant_is_refused(name: str) -> None:
    make, text = REFUSED[name]
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the whole text is compared below)
        make()
    assert str(caught.value) == text


def test_an_unknown_backend_is_refused_with_those_there_are() -> None:
    import torch

    with pytest.raises(ValueError, match=r"^compile was given backend='inducter'") as caught:
        compile(backend="inducter")
    usual = [n for n in torch.compiler.list_backends() if n != "inductor"]
    assert str(caught.value) == (
        "compile was given backend='inducter', which torch does not know. Choose one of inductor, "
        f"aot_eager, eager, {', '.join(usual)}, or register it by torch._dynamo.register_backend."
    )
    assert repr(compile(backend=usual[0])) == f"compile(backend={usual[0]!r})"


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (
            remat(0.5),
            remat(every=2),
            (
                "the transforms disagree. Recomputation.which: remat(0.5) says ('fraction', 0.5) "
                "and remat(every=2) says ('every', 2).\n\nKeep one of remat(0.5), remat(every=2); "
                "to overrule on purpose: override(remat(0.5), remat(every=2))."
            ),
        ),
        (
            remat(),
            remat(budget=7),
            (
                "the transforms disagree. Recomputation.which: remat() says ('fraction', 1.0) and "
                "remat(budget=7) says ('budget', 7).\n\nKeep one of remat(), remat(budget=7); to "
                "overrule on purpose: override(remat(), remat(budget=7))."
            ),
        ),
    ],
)
def test_two_answers_of_two_transforms_are_a_conflict(
    one: Transform, other: Transform, text: str
) -> None:
    with pytest.raises(ConflictError) as caught:
        compose(one, other)
    assert str(caught.value) == text
    assert override(one, other) == other


def test_what_is_left_unsaid_can_be_said_by_another() -> None:
    both = compose(remat(0.5), remat(keep="matmuls"), compile(), compile(dynamic=True))
    assert repr(both) == (
        "compose(compile(), compile(dynamic=True), remat(0.5), remat(keep='matmuls'))"
    )


@given(st.integers(1, 40), st.integers(1, 100))
def test_a_fraction_is_spread_evenly(count: int, percent: int) -> None:
    chosen = spread(count, percent / 100)
    assert len(chosen) == -(-count * percent // 100)
    gaps = {b - a for a, b in itertools.pairwise(chosen)}
    assert len(gaps) <= 2
    assert not gaps or max(gaps) - min(gaps) <= 1


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=12),
    st.integers(1, 500),
)
def test_a_budget_is_kept_and_used(sizes: list[tuple[int, int]], budget: int) -> None:
    inputs = [given for _, given in sizes]
    held = [given + more for more, given in sizes]
    everything = set(range(len(sizes)))
    chosen = fit(held, inputs, budget)
    if chosen is None:
        assert need(held, inputs, everything) > budget
        return
    assert need(held, inputs, chosen) <= budget
    assert all(need(held, inputs, chosen - {i}) > budget for i in chosen)


def test_recomputing_more_never_needs_more() -> None:
    assert [need([9] * 4, [2] * 4, set(range(n))) for n in range(5)] == [36, 29, 22, 15, 15]


@pytest.mark.parametrize(
    ("text", "count"),
    [("20GiB", 20 << 30), ("512MiB", 512 << 20), ("1GB", 10**9), ("100 B", 100), (7, 7)]
    + [(bad, None) for bad in ("", "GiB", "-1GiB", "0B", 0, -1, True, 1.5, "1e3B", None)],
)
def test_bytes_are_read(text: Any, count: int | None) -> None:
    assert bytes_of(text) == count
    assert count is None or shown(count)
