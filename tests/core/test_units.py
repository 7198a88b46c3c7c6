"""Which modules are gathered as one: found by themselves, by class, and by pattern."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallax import RuleError, zero
from parallax.core.units import units_of
from parallax.testing import World, toys


class Deep(nn.Module):
    """Blocks inside blocks, a dictionary of blocks, and parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(3))
        self.stages = nn.ModuleList(nn.Sequential(block(), block()) for _ in range(2))
        self.routes = nn.ModuleDict({"left": block(), "right": block()})
        self.single = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


@pytest.mark.parametrize(
    ("model", "wanted", "found"),
    [
        (toys.Gpt(), None, ["blocks.0", "blocks.1"]),
        (toys.Gpt(tied=True), ("Block",), ["blocks.0", "blocks.1"]),
        (toys.Gpt(), ("blocks.*.attn",), ["blocks.0.attn", "blocks.1.attn"]),
        (
            toys.Gpt(),
            ("Block", "blocks.*.attn"),
            ["blocks.0.attn", "blocks.1.attn", "blocks.0", "blocks.1"],
        ),
        (toys.Gpt(), ("head", "embed"), ["head", "embed"]),
        (toys.Gpt(tied=True), ("head",), []),  # shares its weight with the embedding
        (toys.Mlp(), None, []),
        (toys.Mlp(), ("Linear",), ["layers.0", "layers.1", "layers.2"]),
        (Deep(), None, ["stages.0", "stages.1", "routes.left", "routes.right"]),
        (nn.Linear(2, 2), None, []),
        (toys.Gpt(blocks=1), None, []),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else str(x),
)
def test_units_inner_before_outer(model: nn.Module, wanted: Any, found: list[str]) -> None:
    assert list(units_of(model, wanted)) == found


def test_a_wish_that_matches_nothing_is_named() -> None:
    with pytest.raises(RuleError) as caught:
        units_of(toys.Mlp(), ("blocks.*",))
    assert str(caught.value) == (
        "units='blocks.*' matches no module of Mlp.\n\n"
        "Name a class (Linear, Mlp, ModuleList) or a pattern such as layers.*."
    )


def test_a_class_is_the_same_wish_as_its_name() -> None:
    assert zero(2, units=toys.Block) == zero(2, units="Block") == zero(2, units=("Block",))
    assert repr(zero(2, units=(toys.Block, "head"))) == "zero(2, units=('Block', 'head'))"


def groups(units: Any) -> list[list[str]]:
    """The parameters that are gathered together, in the order of the model's modules."""
    model = toys.Gpt(tied=True, frozen=True, scalar=True)
    zero(3, units=units)(model).model(toys.tokens(2)["tokens"])  # names are known after a forward
    rows = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if hasattr(m, "unshard")]
    return [sorted(p._param_fqn for p in row.fsdp_params) for row in rows if row]


@pytest.mark.ranks
def test_units_are_gathered_as_one(world2: World) -> None:
    found, _ = world2.run(groups, None)
    names = {n for n, _ in toys.Gpt().named_parameters()}
    inside = [{n for n in names if n.startswith(f"blocks.{i}.")} for i in range(2)]
    assert [set(row) for row in found] == [
        names - inside[0] - inside[1] - {"head.weight"},
        *inside,
    ]


@pytest.mark.ranks
def test_units_inside_units_take_their_own_parameters(world2: World) -> None:
    found, _ = world2.run(groups, ("Block", "blocks.*.attn"))
    assert len(found) == 5
    assert sum(map(len, found)) == len(dict(toys.Gpt(tied=True).named_parameters()))
    assert [len(row) for row in found] == [4, 8, 7, 8, 7]
