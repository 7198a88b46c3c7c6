"""Rules that would train wrongly in silence are caught in the first step, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallax import ParallaxError, Transform, bf16, compose, mixed_precision, tp, zero
from parallax.testing import World, toys

pytestmark = pytest.mark.ranks


class Gate(nn.Module):
    """An MLP whose hidden activation passes a norm over each head: a cut activation under tp."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.norm(self.up(x).unflatten(-1, (-1, 4)))
        return self.down(heads.flatten(-2))


RULES = {"up": "colwise", "norm": "replicated_with_grad_allreduce", "down": "rowwise"}


def caught(work: Callable[[], Any]) -> tuple[str, str]:
    try:
        work()
    except ParallaxError as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


def first_step(model_fn: Any, transform: Transform, inputs: Any) -> tuple[str, str]:
    torch.manual_seed(0)
    model = model_fn()
    boosted = transform(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def loss_fn(m: Any, x: Tensor) -> Tensor:
        return m(x).square().mean()

    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(inputs(dist.get_rank())))
    return caught(lambda: boosted.train_step(loss_fn, boosted.shard(batch)))


def same(rank: int) -> int:
    return 0


def without(*names: str, **other: str) -> dict[str, str]:
    return {n: s for n, s in {**RULES, **other}.items() if n not in names}


def outcome(
    ranks: World, rules: dict[str, str], *more: Transform, inputs: Any = same, degree: int = 2
) -> tuple[str, str]:
    rows = ranks.run(first_step, Gate, compose(tp(degree, rules=rules), *more), inputs)
    assert len(set(rows)) == 1, rows
    return rows[0]


FINE = ("", "nothing was raised")


@pytest.mark.parametrize("more", [(), (bf16,), (mixed_precision("bf16", keep="norms"),)], ids=repr)
def test_right_rules_pass(more: tuple[Transform, ...], world2: World, world4: World) -> None:
    assert outcome(world2, RULES, *more) == FINE
    assert outcome(world4, RULES, zero(2), *more) == FINE


@pytest.mark.parametrize("more", [(), (bf16,)], ids=repr)
def test_a_missing_rowwise_is_named(more: tuple[Transform, ...], world2: World) -> None:
    """The head keeps its own rows of an activation that is cut: same shape, other numbers."""
    rules = {"up": "colwise", "norm": "replicated_with_grad_allreduce"}

    rows = world2.run(first_step, Halved, compose(tp(2, rules=rules), *more), same)
    assert len(set(rows)) == 1
    kind, text = rows[0]
    assert kind == "RuleError"
    head, _, rest = text.partition(" by ")
    number, _, tail = rest.partition(" of its size")
    assert head == ("the output of Halved (tensor 0) differs between the ranks of a tensor group")
    assert 0.01 < float(number) < 10
    assert tail == (
        ": the rules leave an activation cut.\n\nEnd every column-cut path with a rowwise module, "
        "or gather it: colwise_gather_output."
    )


class Halved(Gate):
    """Its output is a maximum over heads, so that a missing rowwise changes no shape."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x).unflatten(-1, (-1, 4))).square().amax(dim=-2)


@pytest.mark.parametrize("more", [(), (bf16,), (zero(2),), (zero(3), bf16)], ids=repr)
def test_a_missing_sum_of_a_replicated_gradient_is_named(
    more: tuple[Transform, ...], world2: World, world4: World
) -> None:
    ranks = world4 if more and more[0] is not bf16 else world2
    kind, text = outcome(ranks, without("norm"), *more)
    assert kind == "RuleError"
    head, _, rest = text.partition(" differs between them by ")
    number, _, tail = rest.partition(" of its size")
    assert head in [
        f"the gradient of norm.{leaf}, which every rank of a tensor group holds whole,"
        for leaf in ("weight", "bias")
    ]
    assert 0.01 < float(number) < 10
    assert tail == (
        ": a sum over the tp axis is missing.\n\nnorm sees a cut activation: give it the style "
        "replicated_with_grad_allreduce, or move the cut behind it."
    )


@pytest.mark.parametrize("more", [(), (zero(2),)], ids=repr)
def test_different_inputs_in_a_group_are_named(
    more: tuple[Transform, ...], world2: World, world4: World
) -> None:
    ranks = world4 if more else world2
    kind, text = outcome(ranks, RULES, *more, inputs=lambda rank: rank % 2)
    assert kind == "DataError"
    assert text == (
        "the ranks of one tensor group were given different inputs (tensor 0 of the model's "
        "arguments differs).\n\nGive ranks that differ only on the tp axis the same batch: use "
        "boosted.loader, or boosted.shard on a global batch, or seed your own sampler by the data "
        "rank."
    )


def test_a_fault_in_one_group_is_raised_in_all(world4: World) -> None:
    """Otherwise the other group would wait in its next collective."""
    kind, _ = outcome(world4, RULES, zero(2), inputs=lambda rank: int(rank == 3))
    assert kind == "DataError"


def test_different_inputs_on_the_data_axis_are_fine(world4: World) -> None:
    assert outcome(world4, RULES, zero(2), inputs=lambda rank: rank // 2) == FINE


def swapped() -> tuple[str, str]:
    torch.manual_seed(0)
    model = Gate()
    boosted = tp(2, rules=RULES)(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.arange(16.0).view(4, 4)
    mine = batch.flip(0) if dist.get_rank() else batch
    return caught(lambda: boosted.train_step(lambda m, x: m(x).square().mean(), mine))


def test_the_same_rows_in_another_order_are_seen(world2: World) -> None:
    for kind, _ in world2.run(swapped):
        assert kind == "DataError"


def dictionary() -> tuple[str, str]:
    torch.manual_seed(0)

    class Named(Gate):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(batch["b"])

    model = Named()
    boosted = tp(2, rules=RULES)(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = {"a": torch.zeros(4), "b": torch.full((4, 4), float(dist.get_rank()))}
    return caught(lambda: boosted.train_step(lambda m, x: m(x).square().mean(), batch))


def test_inputs_inside_a_dictionary_are_compared(world2: World) -> None:
    for kind, text in world2.run(dictionary):
        assert kind == "DataError"
        assert "(tensor 1 of the model's arguments differs)" in text


def no_rows() -> tuple[str, str]:
    torch.manual_seed(0)
    model = Gate()
    boosted = compose(tp(2, rules=RULES), zero(2))(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    batch = torch.ones(1, 4)
    return caught(
        lambda: boosted.train_step(lambda m, x: m(x).square().mean(), boosted.shard(batch))
    )


def test_a_rank_without_rows_passes_the_audit(world4: World) -> None:
    assert world4.run(no_rows) == [FINE] * 4


def later() -> tuple[tuple[str, str], int]:
    """The look is at the first step only: it must cost nothing afterwards."""
    torch.manual_seed(0)
    model = Gate()
    boosted = tp(2, rules=RULES)(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = len(model._forward_pre_hooks) + len(model._forward_hooks)
    boosted.train_step(lambda m, x: m(x).square().mean(), torch.ones(4, 4))
    after = len(model._forward_pre_hooks) + len(model._forward_hooks)
    return FINE, before - after


def test_the_audit_leaves_after_the_first_step(world2: World) -> None:
    assert world2.run(later) == [(FINE, 2)] * 2


# -- other styles ----------------------------------------------------------------------------------


class Sequence(nn.Module):
    """A block whose norm works on a cut sequence, between reduce-scatter and gather."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(toys.VOCABULARY, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, toys.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


STYLED: dict[str, dict[str, str]] = {
    "embedding_colwise": {"embed": "embedding_colwise"},
    "rowwise_split_input": {"head": "rowwise_split_input"},
    "colwise_gather_output": {"up": "colwise_gather_output", "head": "colwise_gather_output"},
    "replicate": {"norm": "replicate", "up": "colwise", "down": "rowwise"},
}


def styled(rules: dict[str, str]) -> float:
    torch.manual_seed(0)
    model = Sequence().double()
    torch.manual_seed(0)
    reference = Sequence().double()
    boosted = tp(2, rules=rules)(model, torch.optim.SGD(model.parameters(), lr=0.5))
    other = torch.optim.SGD(reference.parameters(), lr=0.5)
    worst = 0.0
    for step in range(3):
        batch = toys.tokens(4, step)
        total, count = toys.next_token(reference, batch)
        (total / count).backward()
        loss = boosted.train_step(toys.next_token, boosted.shard(batch))
        worst = max(worst, abs(float(loss) - float((total / count).detach())))
        other.step()
        other.zero_grad()
    return worst


@pytest.mark.parametrize("name", list(STYLED))
def test_styles_train_like_one_process(name: str, world2: World) -> None:
    # float64, sums in another order: a few roundings of 1e-16 of losses near 3.
    assert max(world2.run(styled, STYLED[name])) < 1e-12
