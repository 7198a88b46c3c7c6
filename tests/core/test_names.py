"""The name law: original full names, ties and buffers survive every rewrite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallax import Draft, Phase, Plan, RenameError, Rewrite, Room, compose, dp, tp, zero
from parallax.core.names import Names
from parallax.core.transform import Transform, state
from parallax.step.facts import Clipping
from parallax.testing import World, pool, toys

EVERYTHING = {"tied": True, "scalar": True, "frozen": True, "unused": True}


def test_names_are_read_in_order_of_registration() -> None:
    names = Names.of(toys.Gpt(**EVERYTHING))
    assert names.parameters[:3] == ("positions", "scale", "embed.weight")
    assert "head.weight" not in names.parameters
    assert names.ties == (("head.weight", "embed.weight"),)
    assert (names.buffers, names.transient) == (("seen",), ("depth",))


def test_ties_of_whole_modules_and_of_three_parameters() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    b.weight = a.weight
    names = Names.of(nn.Sequential(a, b, a))
    assert names.parameters == ("0.weight", "0.bias", "1.bias")
    assert names.ties == (
        ("1.weight", "0.weight"),
        ("2.weight", "0.weight"),
        ("2.bias", "0.bias"),
    )


def test_nested_buffers_that_are_not_saved() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Module())
    model[1].register_buffer("kept", torch.zeros(1))
    model[1].register_buffer("left", torch.zeros(1), persistent=False)
    model[1].register_buffer("absent", None)
    names = Names.of(model)
    assert names.buffers == ("0.running_mean", "0.running_var", "0.num_batches_tracked", "1.kept")
    assert names.transient == ("1.left",)


def rewritten(change: Any, phase: Phase = Phase.RECOMPUTE) -> Transform:
    """A transform whose rewrite does this to the model."""

    def build(draft: Draft, plan: Plan) -> tuple[Draft, Room]:
        change(draft.parts[0])
        return draft, Room()

    return state("planted()", Clipping(), rewrites=(Rewrite("planted", phase, build),))


def boosted_error(change: Any, phase: Phase) -> str:
    torch.manual_seed(0)
    try:
        rewritten(change, phase)(toys.Gpt(tied=True))
    except RenameError as error:
        return str(error)
    return "nothing was raised"


def wrap(model: nn.Module) -> None:
    model.blocks[0] = nn.Sequential(model.blocks[0])


def untie(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def add(model: nn.Module) -> None:
    model.blocks[0].low = nn.Linear(2, 2, bias=False)


def drop(model: nn.Module) -> None:
    del model.blocks[1]


LAW = (
    "Keep the module tree as it is (use module.compile() and the composable checkpoint, not "
    "wrappers); names may be added in SURGERY and dropped in SPLIT only."
)


@pytest.mark.ranks
def test_a_rewrite_that_renames_is_refused() -> None:
    (text,) = pool(1).run(boosted_error, wrap, Phase.RECOMPUTE)
    assert text == (
        "the rewrite planted must keep every parameter's original full name, and changed them: "
        "lost blocks.0.attn.key.weight, blocks.0.attn.out.bias, blocks.0.attn.out.weight, "
        "blocks.0.attn.query.bias and 11 more; "
        "new blocks.0.0.attn.key.weight, blocks.0.0.attn.out.bias, blocks.0.0.attn.out.weight, "
        f"blocks.0.0.attn.query.bias and 11 more.\n\n{LAW}"
    )


@pytest.mark.ranks
def test_a_rewrite_that_unties_is_refused() -> None:
    (text,) = pool(1).run(boosted_error, untie, Phase.TENSOR)
    assert text == (
        "the rewrite planted untied head.weight from embed.weight, which were one parameter.\n\n"
        "Assign the same new parameter under both names."
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("change", "allowed", "verb", "name"),
    [
        (add, Phase.SURGERY, "new", "blocks.0.low.weight"),
        (drop, Phase.SPLIT, "lost", "blocks.1.attn.key.weight"),
    ],
)
def test_names_are_added_and_dropped_in_their_phases_only(
    change: Any, allowed: Phase, verb: str, name: str
) -> None:
    (text,) = pool(1).run(boosted_error, change, allowed)
    assert text == "nothing was raised"
    (text,) = pool(1).run(boosted_error, change, Phase.COMPILE)
    assert text.startswith("the rewrite planted must keep every parameter's original full name")
    assert f"{verb} {name}" in text
    assert text.endswith(LAW)


def surviving(transform: Transform) -> tuple[tuple[str, ...], list[str], list[str], bool, str]:
    """Names before, after and in the tree; whether the tie holds; the optimizer's first."""
    torch.manual_seed(0)
    model = toys.Gpt(**EVERYTHING)
    before = Names.of(model)
    boosted = transform(model, toys.momentum(model))
    after = list(boosted.params)
    first = boosted.optimizer.param_groups[0]["params"][0]
    found = next(name for name, p in boosted.params.items() if p is first)
    tree = [name for name, _ in model.named_parameters()]
    return before.parameters, after, tree, model.head.weight is model.embed.weight, found


@pytest.mark.ranks
@pytest.mark.parametrize("transform", [dp(), zero(3), tp(2)], ids=repr)
def test_names_and_ties_survive(transform: Transform, world2: World) -> None:
    for before, after, tree, tied, first in world2.run(surviving, transform):
        assert tuple(after) == before == tuple(tree)
        assert tied
        assert first == before[0]


@pytest.mark.ranks
def test_names_and_ties_survive_together(world4: World) -> None:
    for before, after, _, tied, _ in world4.run(surviving, compose(tp(2), zero(3))):
        assert tuple(after) == before
        assert tied
