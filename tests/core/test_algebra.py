"""The laws of the algebra, over every transform there is."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import parallax
from parallax import (
    Claim,
    ConflictError,
    Fact,
    Transform,
    accumulate,
    bf16,
    clip,
    compile,  # noqa: A004
    compose,
    compress,
    dp,
    ema,
    fp8,
    fp16,
    fp32,
    mixed_precision,
    override,
    parse,
    remat,
    tp,
    zero,
)
from parallax.core.axes import Axes, Fill
from parallax.core.fact import join
from parallax.parse import VOCABULARY

NAMES = {name: getattr(parallax, name) for name in parallax.__all__}
degrees = st.none() | st.sampled_from([1, 2, 4])
dtypes = st.sampled_from(["bf16", "fp32", "fp64"])
patterns = st.sampled_from(["blocks.*", "Block", "**.attn", 'a"b', "it's"])
styles = st.sampled_from(["colwise", "rowwise", "embedding_rowwise"])

MAKERS: dict[str, st.SearchStrategy[Transform]] = {
    "dp": st.builds(dp, degrees),
    "zero": st.builds(
        zero,
        st.sampled_from([1, 2, 3]),
        degree=degrees,
        units=st.none() | patterns | st.tuples(patterns, patterns),
    ),
    "mixed_precision": st.builds(
        mixed_precision,
        dtypes,
        reduce=st.none() | dtypes,
        outputs=st.none() | dtypes,
        keep=st.none() | patterns | st.just("norms"),
    )
    | st.builds(
        mixed_precision,
        st.just("fp16"),
        scale=st.sampled_from([None, 64, 2.0**16]),
        backoff=st.sampled_from([None, 0.25]),
        growth_interval=st.none() | st.integers(1, 9),
    ),
    "tp": st.builds(
        tp,
        st.sampled_from([1, 2, 4]),
        rules=st.none() | st.dictionaries(patterns, styles, max_size=3),
        loss_parallel=st.none() | st.booleans(),
    ),
    "clip": st.builds(
        clip,
        st.floats(1e-6, 1e6) | st.integers(1, 5) | st.sampled_from([1.0, 0.5]),
        norm_type=st.sampled_from([None, 2, "inf", float("inf")]),
        value=st.none() | st.floats(1e-6, 1e6),
        nonfinite=st.sampled_from([None, "raise", "skip", "zero"]),
    ),
    "accumulate": st.builds(
        accumulate,
        st.integers(1, 64),
        reduce=st.sampled_from([None, "step", "microbatch"]),
        batchnorm=st.sampled_from([None, "microbatch"]),
    ),
    "ema": st.builds(ema, st.floats(0, 0.9999), warmup=st.none() | st.booleans()),
    "remat": st.builds(remat, st.none() | st.floats(0.01, 1), units=st.none() | patterns)
    | st.builds(remat, every=st.integers(1, 5), keep=st.sampled_from([None, "matmuls"]))
    | st.builds(
        remat, budget=st.sampled_from(["20GiB", 1 << 30]), offload=st.none() | st.booleans()
    ),
    "compile": st.builds(
        compile,
        backend=st.sampled_from([None, "eager", "aot_eager"]),
        dynamic=st.none() | st.booleans(),
        fullgraph=st.none() | st.booleans(),
        units=st.none() | patterns,
    ),
    "fp8": st.builds(
        fp8,
        st.sampled_from([None, "tensorwise", "rowwise", "off"]),
        keep=st.none() | patterns,
        min_size=st.none() | st.integers(1, 4096),
        gather=st.none() | st.booleans(),
        emulate=st.none() | st.booleans(),
    ),
    "compress": st.builds(compress, st.sampled_from(["fp8", "bf16", "full"])),
    "bf16": st.just(bf16),
    "fp16": st.just(fp16),
    "fp32": st.just(fp32),
}
MAKERS["shard_zero"], MAKERS["tensor_parallel"] = MAKERS["zero"], MAKERS["tp"]

atoms = st.one_of(*MAKERS.values())
# Few values a field, so that agreement, conflict and silence all occur often.
few = st.sampled_from(
    [
        dp(),
        dp(2),
        zero(2),
        zero(3),
        zero(3, units="blocks.*"),
        bf16,
        fp32,
        clip(1.0),
        clip(2),
        tp(2),
        tp(2, loss_parallel=True),
        mixed_precision("bf16", keep="norms"),
        compose(),
    ]
)
transforms = st.recursive(
    atoms | few, lambda inner: st.builds(override, inner, inner) | few, max_leaves=3
)


def outcome(make: Callable[[], Transform]) -> Transform | str:
    """A transform, or the text of the conflict."""
    try:
        return make()
    except ConflictError as error:
        return str(error)


def agreed(make: Callable[[], Transform]) -> Transform | None:
    """A transform, or None for a conflict: partial conflicts are found earlier in a nested call."""
    found = outcome(make)
    return found if isinstance(found, Transform) else None


def test_every_transform_of_the_vocabulary_is_drawn() -> None:
    assert set(MAKERS) == set(VOCABULARY) - {"compose", "override", "part"}


@given(st.lists(transforms, max_size=4), st.randoms())
def test_compose_is_free_of_order(parts: list[Transform], random: Any) -> None:
    mixed = list(parts)
    random.shuffle(mixed)
    assert outcome(lambda: compose(*parts)) == outcome(lambda: compose(*mixed))


@given(few, few, few)
def test_compose_is_associative(a: Transform, b: Transform, c: Transform) -> None:
    left = agreed(lambda: compose(compose(a, b), c))
    right = agreed(lambda: compose(a, compose(b, c)))
    assert left == right == agreed(lambda: compose(a, b, c))


@given(transforms)
def test_compose_is_idempotent_and_has_an_identity(t: Transform) -> None:
    assert compose(t, t) == t == compose(t) == compose(t, compose()) == compose(compose(), t)


@given(few, few)
def test_the_bar_composes(a: Transform, b: Transform) -> None:
    assert outcome(lambda: a | b) == outcome(lambda: compose(a, b))


@given(few, few)
def test_composing_says_what_both_say(a: Transform, b: Transform) -> None:
    both = agreed(lambda: a | b)
    said = [
        {(type(c.fact), f, v) for c in t.claims for f, v in c.fact.said().items()} for t in (a, b)
    ]
    fields = [{(kind, field): value for kind, field, value in row} for row in said]
    disagree = any(fields[1].get(key, value) != value for key, value in fields[0].items())
    assert (both is None) == disagree
    if both is not None:
        facts = join(both.claims)
        assert {(k, f, v) for k in facts for f, v in facts[k].said().items()} == said[0] | said[1]
        assert both.rewrites == a.rewrites | b.rewrites


@settings(max_examples=300)
@given(transforms)
def test_repr_evaluates_to_the_transform(t: Transform) -> None:
    assert eval(repr(t), dict(NAMES)) == t
    assert parse(str(t)) == t


@given(transforms)
def test_transforms_are_values(t: Transform) -> None:
    again = eval(repr(t), dict(NAMES))
    assert hash(again) == hash(t)
    assert pickle.loads(pickle.dumps(t)) == t
    assert repr(pickle.loads(pickle.dumps(t))) == repr(t)
    assert {t: 1}[again] == 1


@given(few, few)
def test_equal_spelling_and_equal_transforms_are_the_same_thing(a: Transform, b: Transform) -> None:
    assert (a == b) == (repr(a) == repr(b))


def test_no_bound_is_a_spelling_of_its_own() -> None:
    with pytest.raises(ValueError, match=r"^clip was given max_norm=inf") as caught:
        clip(float("inf"))
    assert str(caught.value) == (
        "clip was given max_norm=inf. Give a positive number; to leave gradients as they are, "
        "leave clip out."
    )


# -- override --------------------------------------------------------------------------------------


@given(transforms)
def test_override_has_identities_and_is_idempotent(t: Transform) -> None:
    assert override(t, compose()) == t == override(compose(), t)
    assert override(t, t) == t


@given(few, few)
def test_what_overrides_holds_and_the_rest_is_kept(base: Transform, new: Transform) -> None:
    facts, over, under = (join(t.claims) for t in (override(base, new), new, base))
    for kind, fact in facts.items():
        said = {**under.get(kind, kind()).said(), **over.get(kind, kind()).said()}
        assert fact.said() == said
    assert override(base, new).rewrites == base.rewrites | new.rewrites


@given(few, few, few)
def test_overriding_is_overriding_in_turn(a: Transform, b: Transform, c: Transform) -> None:
    both = agreed(lambda: compose(b, c))
    if both is not None:
        one, other = override(a, both), override(override(a, b), c)
        assert join(one.claims) == join(other.claims)


@given(few, few)
def test_override_is_compose_where_nothing_disagrees(a: Transform, b: Transform) -> None:
    both = agreed(lambda: compose(a, b))
    # A fill in b rules a number in a, where compose would let the number win: see below.
    fills = join(b.claims).get(Fill, Fill()).said()
    numbers = set(join(a.claims).get(Axes, Axes()).said()) - set(
        join(b.claims).get(Axes, Axes()).said()
    )
    if both is not None and not numbers & set(fills):
        assert join(override(a, b).claims) == join(both.claims)


def test_an_override_takes_what_is_left_when_told_so() -> None:
    """A fill and a number are two facts about one axis: the later one must rule it."""
    assert override(dp(2), dp()).plan(4).size("data_replicate") == 4
    assert override(zero(2, degree=2), zero(3, degree=4)).plan(4).size("data_shard") == 4


# -- conflicts -------------------------------------------------------------------------------------


def test_all_conflicts_are_collected_before_raising() -> None:
    with pytest.raises(ConflictError) as caught:
        compose(zero(2), zero(3), bf16, fp32, clip(1.0), clip(2.0), tp(2))
    assert str(caught.value).partition("\n\n")[0] == (
        "the transforms disagree. Clipping.max_norm: clip(1.0) says 1.0 and clip(2.0) says 2.0. "
        "Precision.compute: bf16 says 'bf16' and fp32 says 'fp32'. "
        "Sharding.stage: zero(2) says 2 and zero(3) says 3."
    )


@pytest.mark.parametrize(
    "parts",
    [(dp(2), zero(2), zero(3)), (zero(2), zero(3), bf16, fp32), (clip(1.0), clip(2.0), bf16, fp32)],
    ids=repr,
)
def test_the_remedy_of_a_conflict_works(parts: tuple[Transform, ...]) -> None:
    """Its overrides must each name two transforms that do disagree."""
    with pytest.raises(ConflictError) as caught:
        compose(*parts)
    remedies = re.findall(r"override\(([^,\n]+), ([^,\n]+)\)(?=[.,;]|$)", str(caught.value))
    assert remedies
    for base, new in remedies:
        two = [eval(text, dict(NAMES)) for text in (base, new)]
        assert agreed(lambda two=two: compose(*two)) is None, f"{base} and {new} do not disagree"
        assert override(*two) == two[1]


def test_something_else_than_a_transform_is_refused() -> None:
    with pytest.raises(TypeError) as caught:
        compose(zero, bf16)  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"compose was given {zero!r}, which is not a transform. Write zero(...)."
    )
    with pytest.raises(TypeError) as caught:
        compose(2)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "compose was given 2, which is not a transform. Write a transform such as zero(2)."
    )


# -- the tests above can fail ----------------------------------------------------------------------


def test_a_join_that_lets_the_last_one_win_would_be_seen(monkeypatch: Any) -> None:
    from parallax.core import transform

    def last_wins(claims: Any) -> dict[type[Fact], Fact]:
        return {type(c.fact): c.fact for c in claims}

    monkeypatch.setattr(transform, "join", last_wins)
    with pytest.raises(AssertionError):
        test_composing_says_what_both_say()


def test_a_spelling_that_leaves_something_out_would_be_seen(monkeypatch: Any) -> None:
    terse = {c._replace(by="zero(2)") for c in zero(2, units="blocks.*").claims}
    broken = Transform(frozenset(map(Claim._make, terse)))
    assert eval(repr(broken), dict(NAMES)) != broken
