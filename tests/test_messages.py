"""Messages about statements, each in full: what was asked, what was found, what to do.

Those about a model, which need ranks, are in `test_messages_at_the_call`; those that belong to one
room only (styles, loaders, damaged checkpoints) in that room's tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import parallax
from parallax import (
    ConflictError,
    MeshError,
    ParallaxError,
    bf16,
    compose,
    dp,
    mixed_precision,
    parse,
    remat,
    schedules,
    tp,
    zero,
)
from parallax.parse import VOCABULARY

PURE: dict[str, tuple[type[Exception], Callable[[], Any], str]] = {
    "conflicting claims": (
        ConflictError,
        lambda: compose(zero(2), bf16, zero(3)),
        (
            "the transforms disagree. Sharding.stage: zero(2) says 2 and zero(3) says 3.\n\n"
            "Keep one of zero(2), zero(3); to overrule on purpose: override(zero(2), zero(3))."
        ),
    ),
    "conflicting degrees": (
        ConflictError,
        lambda: tp(2) | tp(4),
        (
            "the transforms disagree. Axes.tp: tp(2) says 2 and tp(4) says 4.\n\n"
            "Keep one of tp(2), tp(4); to overrule on purpose: override(tp(2), tp(4))."
        ),
    ),
    "leftover ranks": (
        MeshError,
        lambda: tp(2).plan(8),
        (
            "8 ranks are running, tp(2) takes a factor of 2, and no transform takes the factor of "
            "4 that is left.\n\nAdd zero(2) or dp() to train on different data there, or launch 2 "
            "ranks."
        ),
    ),
    "leftover ranks of nobody": (
        MeshError,
        lambda: bf16.plan(4),
        (
            "4 ranks are running, no transform asks for any, and no transform takes the factor of "
            "4 that is left.\n\nAdd zero(2) or dp() to train on different data there, or launch 1 "
            "rank."
        ),
    ),
    "a degree that does not divide": (
        MeshError,
        lambda: compose(tp(4), zero(2)).plan(6),
        (
            "6 ranks are running, tp(4) takes a factor of 4, and 4 does not divide 6.\n\n"
            "Launch a multiple of 4 ranks, or choose degrees whose product is one of 1, 2, 3, 6."
        ),
    ),
    "degrees that do not divide": (
        MeshError,
        lambda: compose(tp(2), dp(3), zero(2, degree=2)).plan(8),
        (
            "8 ranks are running, dp(3) takes a factor of 3, zero(2, degree=2) takes a factor of "
            "2, tp(2) takes a factor of 2, and 12 does not divide 8.\n\nLaunch a multiple of 12 "
            "ranks, or choose degrees whose product is one of 1, 2, 4, 8."
        ),
    ),
    "more than there are": (
        MeshError,
        lambda: tp(2).plan(1),
        (
            "1 rank is running, tp(2) takes a factor of 2, and 2 does not divide 1.\n\n"
            "Launch a multiple of 2 ranks, or choose degrees whose product is one of 1."
        ),
    ),
    "two that take what is left": (
        MeshError,
        lambda: compose(dp(), zero(3), tp(2)).plan(16),
        (
            "16 ranks are running, and dp() and zero(3) would each take the factor of 8 that is "
            "left.\n\nGive one of them a number: one of 1, 2, 4, 8, for instance dp(2) or zero(2, "
            "degree=2)."
        ),
    ),
    "unknown name": (
        ParallaxError,
        lambda: parse("tp(2), zeor(2)"),
        (
            "the composition 'tp(2), zeor(2)' names 'zeor', which parallax does not know.\n\n"
            f"Did you mean zero? Known: {', '.join(sorted(VOCABULARY))}."
        ),
    ),
    "unknown name like no other": (
        ParallaxError,
        lambda: parse("quux"),
        (
            "the composition 'quux' names 'quux', which parallax does not know.\n\n"
            f"Known: {', '.join(sorted(VOCABULARY))}."
        ),
    ),
    "without arguments": (
        ParallaxError,
        lambda: parse("zero, bf16"),
        (
            "the composition 'zero, bf16' names zero without arguments.\n\n"
            "Write zero(...), for instance zero(2)."
        ),
    ),
    "with arguments": (
        ParallaxError,
        lambda: parse("bf16()"),
        "the composition 'bf16()' calls bf16, which takes no arguments.\n\nWrite bf16.",
    ),
    "no list of calls": (
        ParallaxError,
        lambda: parse("tp(2"),
        (
            "the composition 'tp(2' cannot be read: '(' was never closed.\n\n"
            'Write transforms separated by commas: "tp(2), zero(2), bf16".'
        ),
    ),
    "code": (
        ParallaxError,
        lambda: parse("__import__('os').system('true')"),
        (
            "the composition \"__import__('os').system('true')\" holds "
            "\"__import__('os').system('true')\", which is no transform.\n\n"
            "Only calls of transforms with literal arguments are read."
        ),
    ),
    "an expression": (
        ParallaxError,
        lambda: parse("tp(1 + 1)"),
        (
            "the composition 'tp(1 + 1)' holds '1 + 1', which is no transform.\n\n"
            "Only calls of transforms with literal arguments are read."
        ),
    ),
    "starred": (
        ParallaxError,
        lambda: parse("tp(*[2])"),
        (
            "the composition 'tp(*[2])' holds 'tp(*[2])', which is no transform.\n\n"
            "Only calls of transforms with literal arguments are read."
        ),
    ),
    "starred list": (
        ParallaxError,
        lambda: parse("*[tp(2)]"),
        (
            "the composition '*[tp(2)]' holds '*[tp(2)]', which is no transform.\n\n"
            "Only calls of transforms with literal arguments are read."
        ),
    ),
    "named transform": (
        ParallaxError,
        lambda: parse("tp(2), second=zero(2)"),
        (
            "the composition 'tp(2), second=zero(2)' holds 'second=zero(2)', which is no "
            "transform.\n\nOnly calls of transforms with literal arguments are read."
        ),
    ),
    "a way out": (
        ParallaxError,
        lambda: parse("tp(2)), zero(2"),
        (
            "the composition 'tp(2)), zero(2' cannot be read: unmatched ')'.\n\n"
            'Write transforms separated by commas: "tp(2), zero(2), bf16".'
        ),
    ),
    "one positional too many": (
        ParallaxError,
        lambda: parse("clip(1.0, 2.0)"),
        (
            "the composition 'clip(1.0, 2.0)': clip() takes from 0 to 1 positional arguments but 2 "
            "were given."
        ),
    ),
    "a wrong value in text": (
        ParallaxError,
        lambda: parse("zero(4)"),
        "the composition 'zero(4)': zero was given stage=4. Choose one of 1, 2, 3.",
    ),
    "a stage there is not": (
        ValueError,
        lambda: zero(4),  # type: ignore[arg-type]
        "zero was given stage=4. Choose one of 1, 2, 3.",
    ),
    "a dtype there is not": (
        ValueError,
        lambda: mixed_precision("fp4"),  # type: ignore[arg-type]
        "mixed_precision was given compute='fp4'. Choose one of 'fp64', 'fp32', 'bf16', 'fp16'.",
    ),
    "modules by number": (
        ValueError,
        lambda: remat(units=3),  # type: ignore[arg-type]
        (
            "remat was given units=3. Give a name pattern such as 'blocks.*', the name of a "
            "class or "
            "a class, or several in a tuple."
        ),
    ),
    "modules kept by number": (
        ValueError,
        lambda: mixed_precision("bf16", keep=3),  # type: ignore[arg-type]
        (
            "mixed_precision was given keep=3. Give a name pattern such as 'blocks.*', the name "
            "of a "
            "class or a class, or several in a tuple."
        ),
    ),
    "a schedule of nothing": (
        ValueError,
        lambda: schedules.constant(None),  # type: ignore[arg-type]
        (
            "constant was given None as its optimizer. Give boosted.optimizer, or the optimizer "
            "that "
            "is boosted."
        ),
    ),
    "a reduction there is not": (
        ValueError,
        lambda: mixed_precision("bf16", reduce="int8"),  # type: ignore[arg-type]
        "mixed_precision was given reduce='int8'. Choose one of 'fp64', 'fp32', 'bf16', 'fp16'.",
    ),
}


@pytest.mark.parametrize("name", list(PURE))
def test_messages_of_statements(name: str) -> None:
    kind, make, text = PURE[name]
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the whole text is compared below)
        make()
    assert type(caught.value) is kind
    assert str(caught.value) == text


def test_messages_follow_the_house_style() -> None:
    """Neither 'invalid' nor 'will be ignored': what is wrong, and a remedy."""
    for _, _, text in PURE.values():
        assert "invalid" not in text.lower()
        assert "ignored" not in text
        assert text.endswith(".")


@pytest.mark.parametrize(
    "kind",
    [getattr(parallax, name) for name in parallax.__all__ if name.endswith("Error")],
    ids=lambda kind: kind.__name__,
)
def test_every_kind_is_a_parallax_error_and_a_value_error(kind: type[Exception]) -> None:
    assert issubclass(kind, ParallaxError)
    assert issubclass(kind, ValueError)


def test_a_changed_message_would_be_seen() -> None:
    kind, make, text = PURE["leftover ranks"]
    assert issubclass(kind, ParallaxError)
    with pytest.raises(MeshError) as error:
        make()
    assert str(error.value) != text.replace("tp(2)", "tp")


def test_the_table_names_remedies_that_work() -> None:
    assert compose(tp(2), zero(2)).plan(8).size("data_shard") == 4
    assert compose(dp(2), zero(3), tp(2)).plan(16).size("data_shard") == 4
    assert compose(bf16, dp()).plan(4).size() == 4
