"""Every transform and every pair of them trains as one process does, on models with awkward parts.

`verify` compares the loss, every gradient and the norm of each step, parameters, buffers and
optimizer state after the last, and all of it again after saving and loading half-way. Its bounds
are measured, as `parallax.testing.reference` says: how far rounding of each product moves this
model's own numbers.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import parallax
from parallax import Draft, MeshError, Plan, Rewrite, Room, Transform, compose, parse, state
from parallax.core.phase import Phase
from parallax.core.slices import local
from parallax.step.facts import Clipping
from parallax.testing import World, pool, toys
from parallax.testing.verify import smallest_world, verify

pytestmark = pytest.mark.ranks
awkward = functools.partial(toys.Gpt, tied=True, scalar=True, frozen=True, unused=True)
TEXT = [toys.tokens(8, step) for step in range(2)]

SINGLES = [
    "dp()",
    "zero(1)",
    "zero(2)",
    "zero(3)",
    "bf16",
    "fp32",
    "mixed_precision('bf16', reduce='bf16', outputs='bf16', keep='norms')",
    "tp(2)",
    "tp(2, loss_parallel=True)",
    "clip(0.5)",
]
# Each fills its own part of four ranks, so that the pairs share no axis.
PARTS = [
    "dp(2)",
    "zero(1)",
    "zero(2)",
    "zero(3)",
    "bf16",
    "mixed_precision('bf16', reduce='bf16', keep='norms')",
    "tp(2)",
    "tp(2, loss_parallel=True)",
    "clip(0.5)",
]


def ranks_of(transform: Transform) -> World:
    return pool(smallest_world(transform))


def pairs() -> list[str]:
    found = []
    for names in itertools.combinations(PARTS, 2):
        try:
            compose(*map(parse, names)).plan(smallest_world(compose(*map(parse, names))))
        except parallax.ConflictError:
            continue
        found.append(", ".join(names))
    return found


@pytest.mark.parametrize("dtype", ["fp64", "native"])
@pytest.mark.parametrize("text", SINGLES)
def test_each_transform(text: str, dtype: Any) -> None:
    transform = parse(text)
    report = verify(
        transform,
        awkward,
        toys.adamw,
        toys.next_token,
        TEXT,
        world=ranks_of(transform),
        dtype=dtype,
        blame=False,
    )
    assert report.ok, str(report)


@pytest.mark.parametrize("text", pairs())
def test_each_pair(text: str) -> None:
    transform = parse(text)
    report = verify(
        transform,
        awkward,
        toys.adamw,
        toys.next_token,
        TEXT,
        world=ranks_of(transform),
        steps=2,
        dtype="native" if "bf16" in text else "fp64",
        blame=False,
    )
    assert report.ok, str(report)


def test_the_pairs_are_all_that_do_not_conflict() -> None:
    assert len(pairs()) == 36 - 3  # of the stages of zero


@pytest.mark.parametrize(
    "text",
    [
        "tp(4)",
        "tp(4), clip(0.5)",
        "dp(2), zero(3), clip(0.5)",
        "dp(2), tp(2), clip(0.5)",
        "tp(2), zero(2), bf16, clip(0.5)",
        "tp(2, loss_parallel=True), zero(3), clip(0.5)",
    ],
)
def test_larger_compositions(text: str, world4: World) -> None:
    report = verify(
        parse(text),
        awkward,
        toys.momentum,
        toys.mean_next_token,
        TEXT,
        world=world4,
        dtype="native" if "bf16" in text else "fp64",
        blame=False,
    )
    assert report.ok, str(report)


MODELS: dict[str, tuple[Any, Any, Any]] = {
    "batchnorm": (toys.ConvNet, toys.classify, [toys.images(8, i) for i in range(2)]),
    "dictionary": (toys.Reader, toys.score, [toys.pages(6, i) for i in range(2)]),
    "uneven sizes": (toys.Mlp, toys.square, [toys.points(6, i) for i in range(2)]),
    "uneven rows": (toys.Mlp, toys.square, [toys.points(7, i) for i in range(2)]),
    "no elements": (functools.partial(toys.Gpt, empty=True), toys.next_token, TEXT),
    "one linear": (functools.partial(nn.Linear, 5, 3), toys.square, [toys.points(4)]),
}


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(
    "text",
    ["dp()", "zero(2), clip(0.5)", "zero(3), bf16", "dp(2), zero(3), clip(0.5)"],
)
def test_other_models(text: str, name: str) -> None:
    model_fn, loss_fn, batches = MODELS[name]
    transform = parse(text)
    report = verify(
        transform,
        model_fn,
        toys.momentum,
        loss_fn,
        batches,
        world=ranks_of(transform),
        steps=2,
        dtype="native" if "bf16" in text else "fp64",
        blame=False,
    )
    assert report.ok, str(report)


@pytest.mark.parametrize("text", ["tp(2)", "tp(2), clip(0.5)", "tp(2), zero(2)"])
def test_a_parameter_without_elements_beside_a_tensor_axis(text: str) -> None:
    model_fn, loss_fn, batches = MODELS["no elements"]
    ranks = ranks_of(parse(text))
    report = verify(
        parse(text), model_fn, toys.adamw, loss_fn, batches, world=ranks, steps=2, blame=False
    )
    assert report.ok, str(report)


# -- planted faults: verify says no, and why -------------------------------------------------------


def planted(change: Any) -> Transform:
    """A transform that does something to the gradients before each update."""

    def build(draft: Draft, plan: Plan) -> tuple[Draft, Room]:
        before = draft.settle

        def settle() -> None:
            before()
            for name, p in draft.names.parameters_of(*draft.parts).items():
                if p.grad is not None:
                    change(name, local(p.grad))

        return draft._replace(settle=settle), Room()

    return state("planted()", Clipping(), rewrites=(Rewrite("planted", Phase.STORE, build),))


def forgets_the_mean(name: str, grad: torch.Tensor) -> None:
    grad.mul_(2)


def one_element_off(name: str, grad: torch.Tensor) -> None:
    # A thousandth of one gradient of one parameter, far above float64 and below bf16's rounding.
    if name == "blocks.1.down.bias":
        grad.mul_(1.001)


@pytest.mark.parametrize("change", [forgets_the_mean, one_element_off])
def test_a_planted_fault_is_seen_and_named(change: Any) -> None:
    transform = compose(parse("zero(2)"), planted(change))
    report = verify(
        transform,
        awkward,
        toys.momentum,
        toys.next_token,
        TEXT,
        world=pool(2),
        steps=2,
        blame=False,
    )
    assert not report.ok
    wrong = {row.quantity for row in report.rows if not row.ok}
    assert {"gradient", "parameters", "resumed parameters"} <= wrong
    assert "initial parameters" not in wrong
    if change is one_element_off:
        (worst,) = [row.worst for row in report.rows if row.quantity == "gradient"]
        assert worst.startswith("blocks.1.down.bias, step ")


def test_ranks_that_nobody_takes_are_refused_before_anything_runs() -> None:
    with pytest.raises(MeshError):
        verify(parse("tp(2)"), awkward, None, toys.next_token, TEXT, world=pool(4))
