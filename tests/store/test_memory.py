"""What each stage keeps on a rank, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallax import Transform, bf16, compose, dp, mixed_precision, tp, zero
from parallax.core.slices import local
from parallax.testing import World, toys

pytestmark = pytest.mark.ranks
ONE = toys.Gpt()
WHOLE = sum(p.numel() for p in ONE.parameters())
# Parameters that no number of ranks divides are padded up, at most to one row more.
ROWS = sum(p.numel() // len(p) for p in ONE.parameters())


def held(transform: Transform) -> dict[str, int]:
    """Elements on this rank: at rest, between forward and backward, after backward."""
    torch.manual_seed(0)
    model = toys.Gpt()
    boosted = transform(model, torch.optim.Adam(model.parameters()))
    found = {"parameters": sum(local(p).numel() for p in boosted.params.values())}
    loss = toys.mean_next_token(boosted.model, boosted.shard(toys.tokens(4)))
    found["after forward"] = gathered(model)
    boosted.backward(loss)
    found["after backward"] = gathered(model)
    found["gradients"] = sum(local(g).numel() for g in boosted.grads.values())
    boosted.update()
    found["after update"] = gathered(model)
    found["moments"] = sum(local(m["exp_avg"]).numel() for m in boosted.moments.values())
    return found


def gathered(model: nn.Module) -> int:
    """Elements of parameters that are gathered just now, outside the root."""
    inside = [m._get_fsdp_state() for m in model.modules() if hasattr(m, "unshard")][1:]
    rows = [p for s in inside for p in s._fsdp_param_group.fsdp_params]
    return sum(p._unsharded_param.numel() for p in rows if p.sharded_state.name == "UNSHARDED")


BLOCKS = sum(p.numel() for p in ONE.blocks.parameters())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_stage_keeps_what_it_promises(stage: Any, world2: World) -> None:
    rows = world2.run(held, zero(stage))
    for what in ("parameters", "gradients", "moments"):
        assert sum(row[what] for row in rows) == WHOLE
        assert max(row[what] for row in rows) <= WHOLE // 2 + ROWS
    for row in rows:
        assert row["after forward"] == (0 if stage == 3 else BLOCKS)
        assert row["after backward"] == row["after update"] == 0 or (
            stage == 1 and row["after update"] == 0
        )


def test_replication_keeps_everything_everywhere(world2: World) -> None:
    for row in world2.run(held, dp()):
        assert row["parameters"] == row["gradients"] == row["moments"] == WHOLE


def test_hybrid_sharding_cuts_by_its_half(world4: World) -> None:
    rows = world4.run(held, compose(dp(2), zero(3)))
    for what in ("parameters", "gradients", "moments"):
        assert sum(row[what] for row in rows) == 2 * WHOLE
        assert max(row[what] for row in rows) <= WHOLE // 2 + ROWS
    assert [r["parameters"] for r in rows[:2]] == [r["parameters"] for r in rows[2:]]
    assert max(r["parameters"] for r in world4.run(held, zero(3))) <= WHOLE // 4 + ROWS


def test_tensor_and_data_cuts_multiply(world4: World) -> None:
    rows = world4.run(held, compose(tp(2), zero(3)))
    cut = sum(
        p.numel()
        for n, p in ONE.named_parameters()
        if "norm" not in n and n != "positions" and not n.endswith(("out.bias", "down.bias"))
    )
    assert sum(row["parameters"] for row in rows) == cut + 2 * (WHOLE - cut)


def window(transform: Transform) -> list[int]:
    """Elements of blocks gathered after each backward of an accumulation."""
    torch.manual_seed(0)
    model = toys.Gpt()
    boosted = transform(model, torch.optim.Adam(model.parameters()))
    found = []
    for i in range(2):
        with boosted.no_sync():
            boosted.backward(toys.mean_next_token(model, boosted.shard(toys.tokens(4, i))))
        found.append(gathered(model))
    boosted.backward(toys.mean_next_token(model, boosted.shard(toys.tokens(4, 2))))
    boosted.update()
    return [*found, gathered(model)]


@pytest.mark.parametrize(("stage", "kept"), [(1, BLOCKS), (2, 0), (3, 0)])
def test_stage_one_stays_gathered_within_a_window(stage: Any, kept: int, world2: World) -> None:
    assert world2.run(window, zero(stage)) == [[kept, kept, 0]] * 2


# -- precision -------------------------------------------------------------------------------------


class Probe(nn.Module):
    """Writes down the dtypes that its parts compute in."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2)
        )
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("table", torch.full((4,), 1.001))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.to(dtype)
        self.seen: dict[str, str] = {}

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.seen["input"] = str(x.dtype)[6:]
        self.seen["table"] = str(self.table.dtype)[6:]
        self.count += 1
        for block in self.blocks:
            x = block(x)
            self.seen["block"] = str(x.dtype)[6:]
            self.seen["linear"] = str(block[0].weight.dtype)[6:]
            self.seen["inner norm"] = str(block[1].weight.dtype)[6:]
        self.seen["norm"] = str(self.norm.weight.dtype)[6:]
        return self.norm(x) * self.frozen, {"count": self.count, "x": x}


def dtypes(transform: Transform, stored: torch.dtype) -> dict[str, str]:
    torch.manual_seed(0)
    model = Probe(stored)
    boosted = transform(model, torch.optim.Adam(p for p in model.parameters() if p.requires_grad))

    def loss_fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        out, rest = m(x)
        model.seen["output"] = str(out.dtype)[6:]
        model.seen["nested output"] = str(rest["x"].dtype)[6:]
        model.seen["whole output"] = str(rest["count"].dtype)[6:]
        return out.square().mean()

    boosted.grad(loss_fn, boosted.shard(torch.ones(4, 4, dtype=stored)))
    found = dict(model.seen)
    found["gradient"] = str(boosted.grads["norm.weight"].dtype)[6:]
    boosted.update()
    found["master"] = str(boosted.params["norm.weight"].dtype)[6:]
    found["frozen"] = str(boosted.params["frozen"].dtype)[6:]
    found["moment"] = str(boosted.moments["norm.weight"]["exp_avg"].dtype)[6:]
    found["exact table"] = str(bool((model.table == torch.full((4,), 1.001, dtype=stored)).all()))
    return found


PLAIN = {
    "input": "float32",
    "table": "float32",
    "block": "float32",
    "linear": "float32",
    "inner norm": "float32",
    "norm": "float32",
    "output": "float32",
    "nested output": "float32",
    "whole output": "int64",
    "gradient": "float32",
    "master": "float32",
    "frozen": "float32",
    "moment": "float32",
    "exact table": "True",
}
LOW = dict.fromkeys(("input", "block", "linear", "inner norm", "norm"), "bfloat16")
KEPT = {**LOW, "inner norm": "float32", "norm": "float32"}


@pytest.mark.parametrize(
    ("transform", "stored", "expected"),
    [
        (zero(2), torch.float32, PLAIN),
        (compose(zero(2), bf16), torch.float32, {**PLAIN, **LOW}),
        (compose(zero(2), mixed_precision("bf16", keep="norms")), torch.float32, {**PLAIN, **KEPT}),
        (
            compose(dp(), mixed_precision("bf16", reduce="bf16", outputs="bf16")),
            torch.float32,
            {**PLAIN, **LOW, "output": "bfloat16", "nested output": "bfloat16"},
        ),
        (
            compose(zero(2), bf16),
            torch.bfloat16,
            {**PLAIN, **LOW, "table": "bfloat16", "frozen": "bfloat16"},
        ),
        (
            compose(zero(2), mixed_precision("fp32")),
            torch.bfloat16,
            {**PLAIN, "table": "bfloat16", "frozen": "bfloat16"},
        ),
    ],
    ids=lambda x: repr(x) if isinstance(x, Transform) else str(x)[:20],
)
def test_dtypes(
    transform: Transform, stored: torch.dtype, expected: dict[str, str], world2: World
) -> None:
    for found in world2.run(dtypes, transform, stored):
        assert found == expected


def small_steps(transform: Transform) -> float:
    """Steps that bf16 alone would round away: 2^-12 of the weight, sixteen times."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    boosted = transform(model, torch.optim.SGD(model.parameters(), lr=2**-12))
    for _ in range(16):
        boosted.train_step(lambda m, x: m(x).mean(), boosted.shard(torch.ones(2, 1)))
    return float(boosted.params["weight"].full_tensor())


def test_masters_keep_steps_that_bf16_would_lose(world2: World) -> None:
    assert world2.run(small_steps, compose(bf16, dp())) == [1 - 2**-8] * 2


def by_hand() -> float:
    """The planted fault: the same without masters."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-12)
    for _ in range(16):
        optimizer.zero_grad()
        model(torch.ones(1, 1, dtype=torch.bfloat16)).mean().backward()
        optimizer.step()
    return model.weight.item()


def test_without_masters_they_are_lost() -> None:
    assert by_hand() == 1.0


def keep_refused() -> str:
    try:
        compose(dp(), mixed_precision("bf16", keep=("norms", "Conv9d", "a.*")))(nn.Linear(2, 2))
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_keep_that_matches_nothing_is_named(world2: World) -> None:
    one, other = world2.run(keep_refused)
    assert one == other
    assert one == (
        "2 faults:\n\n1. keep='Conv9d' matches no module with parameters of Linear.\n\nName "
        "'norms', a class or a pattern of module names.\n\n2. keep='a.*' matches no module with "
        "parameters of Linear.\n\nName 'norms', a class or a pattern of module names."
    )


class Normalised(nn.Module):
    """A whole model whose class is called like a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def kept_twice(keep: Any) -> list[str]:
    model = Normalised()
    boosted = compose(dp(), mixed_precision("bf16", keep=keep))(model)
    found: list[str] = []
    for block in model.blocks:
        for m in block:
            m.register_forward_hook(lambda m, a, o: found.append(str(m.weight.dtype)[6:]))
    boosted.model(torch.ones(2, 4))
    return found


@pytest.mark.parametrize("keep", ["norms", ("norms", "LayerNorm"), ("norms", "blocks.*.1")])
def test_keep_may_say_one_thing_twice_and_not_the_whole_model(keep: Any, world2: World) -> None:
    assert world2.run(kept_twice, keep) == [["bfloat16", "float32"] * 2] * 2


def test_keep_may_name_a_module_and_one_inside(world2: World) -> None:
    keep = ("blocks.0", "blocks.0.1")
    assert world2.run(kept_twice, keep) == [["float32", "float32", "bfloat16", "bfloat16"]] * 2
