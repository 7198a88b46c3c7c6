"""Layers in float8 round as torchao does, under the same names, and cross the ranks in bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax import (
    RuleError,
    Transform,
    accumulate,
    bf16,
    clip,
    compile,  # noqa: A004
    compose,
    dp,
    fp8,
    fp16,
    remat,
    tp,
    zero,
)
from parallax.store.gather import from_rows, to_rows
from parallax.testing import World, pool, world

pytest.importorskip("torchao")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def losses(transform: Transform, steps: int = 30) -> tuple[list[float], Any, Any]:
    torch.manual_seed(0)
    model = Net()
    boosted = transform(model, torch.optim.AdamW(model.parameters(), lr=5e-3))
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        x = torch.randn(32, 32, generator=generator)
        batch = boosted.shard({"x": x, "y": x[:, :5].argmax(1)})
        found.append(float(boosted.train_step(loss_fn, batch)))
    notes = boosted.rooms["fp8"].notes if "fp8" in boosted.rooms else None
    return found, notes, boosted.rooms["store"].notes["gathered"]


def by_hand(recipe: str, steps: int = 30) -> list[float]:
    """torchao by itself, in bfloat16 with float32 masters, in one process."""
    import dataclasses

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    masters = Net()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=5e-3)
    model = Net().to(torch.bfloat16)
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe), emulate=True, round_scales_to_power_of_2=True
    )
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda m, name: name != "head"
    )
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        with torch.no_grad():
            for p, q in zip(masters.parameters(), model.parameters(), strict=True):
                q.copy_(p)
        x = torch.randn(32, 32, generator=generator)
        out = model(x.to(torch.bfloat16)).float()
        value = nn.functional.cross_entropy(out, x[:, :5].argmax(1))
        value.backward()
        for p, q in zip(masters.parameters(), model.parameters(), strict=True):
            p.grad = None if q.grad is None else q.grad.float()
        optimizer.step()
        model.zero_grad()
        found.append(float(value.detach()))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_it_is_torchao_bit_for_bit_on_one_rank(recipe: Any) -> None:
    ((found, notes, _),) = pool(1).run(losses, compose(bf16, fp8(recipe, emulate=True)))
    assert found == by_hand(recipe)
    assert len(notes["converted"]) == 6
    assert notes["left"] == {"head": "has sizes (32, 5), which do not divide by 16"}


def off_by(transform: Transform) -> tuple[float, Any, list[float]]:
    """Relative error of one step's whole gradient, beside float32 without float8; then losses."""
    torch.manual_seed(0)
    model = Net()
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    batch = {"x": x, "y": x[:, :5].argmax(1)}
    loss_fn(model, batch).backward()
    exact = {n: p.grad for n, p in model.named_parameters()}
    torch.manual_seed(0)
    model = Net()
    boosted = transform(model, torch.optim.AdamW(model.parameters(), lr=5e-3))
    boosted.grad(loss_fn, boosted.shard(batch))
    full = {
        n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in boosted.grads.items()
    }
    boosted.zero_grad()
    error = sum(float((full[n] - g).square().sum()) for n, g in exact.items())
    size = sum(float(g.square().sum()) for g in exact.values())
    found = [float(boosted.train_step(loss_fn, boosted.shard(batch))) for _ in range(3)]
    return (error / size) ** 0.5, boosted.rooms["store"].notes["gathered"], found


NO_WORSE = 1.25
"""Each rank scales by its own rows, so roundings differ from one process's; they add up to the same
error, the root mean square of thousands of roundings, which varies by a few percent."""


@pytest.mark.ranks
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(
    ("layout", "gathered"),
    [
        (zero(2), 6),
        (zero(3), 6),
        (dp(), 0),
        (tp(2), 0),
        (compose(zero(2), accumulate(2), clip(1.0), remat()), 6),
        (compose(zero(3), compile(backend="aot_eager"), remat(0.5)), 6),
    ],
    ids=repr,
)
def test_layouts_train_alike(layout: Transform, gathered: int, recipe: Any, world2: World) -> None:
    ((one, _, _),) = pool(1).run(off_by, compose(bf16, fp8(recipe, emulate=True)))
    rows = world2.run(off_by, compose(layout, bf16, fp8(recipe, emulate=True, gather=True)))
    assert rows[0][0] < NO_WORSE * one
    assert rows[0][0] > one / 4  # and float8 it is
    assert list(rows[0][1].values()) == ["float8"] * gathered
    assert rows[0][2] == rows[1][2]
    assert rows[0][2][2] < rows[0][2][0]


def coarse() -> float:
    """The planted fault: weights that cross the ranks with one bit less."""
    from parallax.store import lower

    def fewer(part: Tensor) -> tuple[Tensor, Tensor]:
        small, scales = to_rows(part)
        return small & 0xFE, scales

    real, lower.to_rows = lower.to_rows, fewer
    try:
        return off_by(compose(zero(2), bf16, fp8(emulate=True, gather=True)))[0]
    finally:
        lower.to_rows = real


@pytest.mark.ranks
def test_a_coarser_gather_would_be_seen(world2: World) -> None:
    ((one, _, _),) = pool(1).run(off_by, compose(bf16, fp8(emulate=True)))
    assert world2.run(coarse)[0] > NO_WORSE * one


def test_rows_come_back_within_a_sixteenth() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 128, generator=generator)
    weight *= torch.exp2(torch.arange(64.0) - 40)[:, None]
    small, scales = to_rows(weight)
    back = from_rows(small, scales, torch.float32)
    largest = weight.abs().amax(1, keepdim=True)
    # Relative to the element, or to what its row's scale, at most twice the largest, can resolve.
    assert ((back - weight).abs() <= torch.maximum(weight.abs() / 16, largest * 2.0**-18)).all()
    assert torch.equal(torch.exp2(torch.log2(scales).round()), scales)
    weight[3, 5], weight[4, 6] = float("inf"), float("nan")
    poisoned = from_rows(*to_rows(weight), torch.float32)
    assert not poisoned[3, 5].isfinite()
    assert not poisoned[4, 6].isfinite()
    assert poisoned[5].isfinite().all()
    again = to_rows(back)
    assert torch.equal(from_rows(*again, torch.float32), back)  # rounding twice is rounding once
    assert torch.equal(from_rows(small, scales, torch.bfloat16).float(), back)


def gathered_bytes(transform: Transform) -> int:
    import torch.distributed as dist

    torch.manual_seed(0)
    model = Net()
    boosted = transform(model, torch.optim.SGD(model.parameters(), lr=0.1))
    newer = hasattr(dist, "all_gather_single")  # what torch 2.13 calls it
    name = "all_gather_single" if newer else "all_gather_into_tensor"
    real, count = getattr(dist, name), [0]

    def counting(out: Tensor, *args: Any, **options: Any) -> Any:
        count[0] += out.numel() * out.element_size()
        return real(out, *args, **options)

    setattr(dist, name, counting)
    try:
        boosted.eval_step(loss_fn, {"x": torch.ones(2, 32), "y": torch.zeros(2).long()})
    finally:
        setattr(dist, name, real)
    return count[0]


@pytest.mark.ranks
def test_weights_cross_the_ranks_in_float8(world2: World) -> None:
    wide = world2.run(gathered_bytes, compose(zero(3), bf16, fp8(emulate=True)))[0]
    small = world2.run(gathered_bytes, compose(zero(3), bf16, fp8(emulate=True, gather=True)))[0]
    weights = 3 * 2 * 32 * 64
    rows = 3 * (32 + 64)
    assert wide - small == 2 * weights - (weights + 4 * rows)


def uneven() -> Any:
    model = nn.Sequential(nn.Linear(16, 48), nn.Linear(48, 16))
    boosted = compose(zero(2), bf16, fp8(emulate=True, gather=True))(model)
    boosted.grad(lambda m, x: m(x).square().mean(), torch.ones(4, 16))
    return boosted.rooms["store"].notes["gathered"], boosted.grads["1.weight"].full_tensor().norm()


@pytest.mark.ranks
def test_what_does_not_shard_evenly_is_said() -> None:
    with world(3) as ranks:
        found = ranks.run(uneven)
    assert found[0][0] == {"0": "float8", "1": "16 rows do not divide by 3 ranks"}
    assert found[0][1] == found[1][1] == found[2][1] > 0


def tied() -> Any:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x))

    model = Tied()
    boosted = compose(zero(2), bf16, fp8(emulate=True, gather=True))(model)
    boosted.grad(lambda m, x: m(x).square().mean(), torch.arange(8).view(2, 4))
    same = boosted.model.head.weight is boosted.model.embed.weight
    return boosted.rooms["fp8"].notes["converted"], boosted.rooms["store"].notes["gathered"], same


@pytest.mark.ranks
def test_a_tied_weight_is_gathered_as_ever(world2: World) -> None:
    assert world2.run(tied)[0] == (["head"], {}, True)


def test_hooks_on_a_layer_stay() -> None:
    model, seen = Net(), []
    model.blocks[0].up.register_forward_hook(lambda module, args, out: seen.append(module))
    model.eval()
    boosted = compose(bf16, fp8(emulate=True))(model)
    boosted.model(torch.randn(2, 32))
    assert [type(m).__name__ for m in seen] == ["Float8Linear"]
    assert not boosted.model.blocks[0].up.training


def test_layers_are_chosen_by_name_and_size() -> None:
    boosted = compose(bf16, fp8(emulate=True, keep="blocks.0.*"))(Net())
    notes = boosted.rooms["fp8"].notes
    assert notes["converted"] == [f"blocks.{i}.{n}" for i in (1, 2) for n in ("up", "down")]
    assert notes["left"]["blocks.0.up"] == "is kept"
    off = compose(bf16, fp8("off"))(Net())
    assert off.rooms["fp8"].notes == {"converted": [], "left": {}}


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (
            compose(bf16, fp8()),
            (
                "fp8() needs hardware that multiplies in float8 (NVIDIA from compute capability "
                "8.9), "
                "and this rank runs on a CPU.\n\nLeave it out, or try its rounding with "
                "emulate=True."
            ),
        ),
        (
            compose(fp16, fp8(emulate=True)),
            (
                "fp8(emulate=True) multiplies in float8 with bfloat16 elsewhere, and the "
                "composition "
                "computes in fp16.\n\nCompose it with bf16."
            ),
        ),
        (
            compose(zero(2), fp8(emulate=True)),
            (
                "fp8(emulate=True) multiplies in float8 with bfloat16 elsewhere, and the "
                "composition "
                "computes in the dtype of the model.\n\nCompose it with bf16."
            ),
        ),
        (
            compose(bf16, fp8(emulate=True, keep="hed")),
            "keep='hed' matches no module of Net.\n\nName a layer or a pattern of names.",
        ),
        (
            compose(bf16, fp8(emulate=True, min_size=4096)),
            (
                "fp8(min_size=4096, emulate=True) finds no layer to convert in Net: an nn.Linear "
                "inside "
                "it whose two sizes divide by 16 and are 4096 or more.\n\nLeave it out, or "
                "choose sizes "
                "that divide."
            ),
        ),
    ],
    ids=repr,
)
def test_what_cannot_be_is_refused(transform: Transform, message: str) -> None:
    model = Net()
    with pytest.raises(RuleError) as caught:
        transform(model)
    assert str(caught.value) == message
    assert type(model.blocks[0].up) is nn.Linear  # nothing was changed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"recipe": "blockwise"},
            "fp8 was given recipe='blockwise'. Choose one of 'tensorwise', 'rowwise', 'off'.",
        ),
        ({"min_size": 0}, "fp8 was given min_size=0. Give a whole number, 1 or more."),
        ({"gather": 1}, "fp8 was given gather=1. Choose one of True, False."),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="fp8 was given") as caught:
        fp8(**options)
    assert str(caught.value) == message
