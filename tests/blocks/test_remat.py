"""Recomputed blocks: bitwise the same numbers, less memory, and no trace of the second forward."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from parallax import (
    ParallaxError,
    StepError,
    Transform,
    bf16,
    compose,
    dp,
    parse,
    remat,
    tp,
    zero,
)
from parallax.testing import World, pool, toys

pytestmark = pytest.mark.ranks

VARIANTS = ["remat()", "remat(0.5)", "remat(every=2)", "remat(keep='matmuls')"]
VARIANTS += ["remat(offload=True)", "remat(budget='64KiB')", "remat(budget='64KiB', offload=True)"]


def gpt(dropout: float = 0.2, blocks: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return toys.Gpt(tied=True, frozen=True, dropout=dropout, blocks=blocks)


def trained(transform: Transform, steps: int = 3) -> tuple[list[Any], Any]:
    """Every loss and gradient, and everything after the last step, of a model with dropout."""
    model = gpt()
    boosted = transform(model, toys.adamw(model))
    rows: list[Any] = []
    for step in range(steps):
        loss = boosted.grad(toys.next_token, boosted.shard(toys.tokens(6, step)))
        rows.append((loss, {n: _whole(g) for n, g in boosted.grads.items()}))
        boosted.update()
        boosted.zero_grad()
    rows.append(torch.rand(3))  # the random stream stands where it would have stood
    return rows, boosted.gather()


def _whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def same(one: Any, other: Any) -> bool:
    """Whether two trees are bitwise equal."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def differing(bases: list[Transform], variants: list[str]) -> list[str]:
    found = []
    for base in bases:
        plain = trained(base)
        found += [f"{base} {v}" for v in variants if not same(trained(base | parse(v)), plain)]
    return found


def test_numbers_are_bitwise_the_same_in_one_process() -> None:
    assert pool(1).run(differing, [compose(), zero(3), bf16], VARIANTS) == [[]]


def test_numbers_are_bitwise_the_same_on_two_ranks(world2: World) -> None:
    bases = [zero(1), zero(3) | parse("mixed_precision('bf16')"), tp(2)]
    assert world2.run(differing, bases, VARIANTS) == [[], []]


def test_nested_shards_and_cut_losses_are_recomputed_too(world2: World) -> None:
    nested = zero(3) | parse("mixed_precision('bf16', keep='norms')")
    bases = [nested, zero(3, units="Linear"), tp(2, loss_parallel=True)]
    some = ["remat()", "remat(offload=True)", "remat(budget='64KiB')"]
    assert world2.run(differing, bases, some) == [[], []]


def with_other_masks() -> bool:
    from parallax.blocks import lower

    real = lower.checkpoint
    lower.checkpoint = lambda *a, **k: real(*a, preserve_rng_state=False, **k)
    try:
        return bool(differing([zero(1)], ["remat()"]))
    finally:
        lower.checkpoint = real


def test_other_dropout_masks_would_be_seen() -> None:
    assert pool(1).run(with_other_masks) == [True]


# -- memory ----------------------------------------------------------------------------------------


class Alive(TorchDispatchMode):
    """Notes every storage that an operation makes; some are still there later."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if type(x) is Tensor:
                storage = x.untyped_storage()
                self.made[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def count(self) -> int:
        return sum(size for ref, size in self.made.items() if not ref.expired())


def kept(texts: list[str], broken: bool = False) -> list[int]:
    """Bytes alive between forward and backward."""
    from parallax.blocks.lower import Unit

    real = Unit._recomputed
    if broken:
        Unit._recomputed = lambda self, args, kwargs: self.forward(*args, **kwargs)
    found = []
    try:
        for text in texts:
            model = gpt(blocks=8)
            boosted = parse(text)(model, toys.adamw(model))
            batch = toys.tokens(16)
            boosted.train_step(toys.next_token, batch)
            with Alive() as alive:
                loss = toys.next_token(model, batch)[0]
            found.append(alive.count())
            loss.backward()
    finally:
        Unit._recomputed = real
    return found


def test_less_is_kept_between_forward_and_backward() -> None:
    texts = ["", "remat(0.5)", "remat(keep='matmuls')", "remat()"]
    ((plain, half, matmuls, every),) = pool(1).run(kept, texts)
    # A unit keeps its input: 16 rows of 5 tokens of 16 float32 numbers. Outside units stay the
    # embedding's and head's few.
    unit = 16 * toys.CONTEXT * toys.WIDTH * 4
    assert every < 8 * unit + plain / 8
    assert every < matmuls < plain
    assert half == pytest.approx((plain + every) / 2, rel=0.15)
    assert every < 0.25 * plain


def test_a_unit_that_is_not_recomputed_would_be_seen() -> None:
    ((plain, every),) = pool(1).run(kept, ["", "remat()"], broken=True)
    assert every >= plain


# -- buffers, modes, hooks, arguments --------------------------------------------------------------


class Layer(nn.Module):
    """Has a BatchNorm, a buffer that its forward uses and changes, and a cache it may fill."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("drift", torch.ones(4))

    def forward(self, *, x: Tensor, past_key_values: Any = None, use_cache: bool = True) -> Tensor:
        if past_key_values is not None and use_cache:
            past_key_values.append(x)
        self.drift = self.drift * 1.5 + 0.1
        return x + torch.tanh(self.norm(self.inner(x))) * self.drift


class Cache(list[Any]):
    def get_seq_length(self) -> int:
        return len(self)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.cache = Cache()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x=x, past_key_values=self.cache)
        return x


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def statistics(transform: Transform, forget: bool = False) -> tuple[Any, Any]:
    from parallax.blocks.lower import Before

    real = Before.replay
    if forget:
        Before.replay = lambda self: nullcontext()
    try:
        torch.manual_seed(0)
        model = Net()
        boosted = transform(model, toys.momentum(model))
        losses = []
        for step in range(3):
            rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            losses.append(boosted.train_step(square, boosted.shard(rows)))
            model.cache.clear()
        return losses, boosted.gather()
    finally:
        Before.replay = real


@pytest.mark.parametrize("text", ["remat()", "remat(0.5)", "remat(budget='1KiB')"])
def test_buffers_change_once(text: str, world2: World) -> None:
    for size in (pool(1), world2):
        plain = size.run(statistics, dp())
        assert same(size.run(statistics, dp() | parse(text)), plain)


def test_buffers_that_change_twice_would_be_seen(world2: World) -> None:
    plain = world2.run(statistics, dp())
    assert not same(world2.run(statistics, dp() | remat(), forget=True), plain)


def ways_to_run() -> dict[str, Any]:
    """How often things run in a forward and backward, in several modes."""
    model = Net()
    names = list(model.state_dict())
    dp()(nn.Linear(1, 1))  # starts the world
    boosted = remat()(model, toys.momentum(model))
    outer: list[int] = []
    inner: list[int] = []
    model.layers[0].register_forward_hook(lambda *a: outer.append(1))
    model.layers[0].inner.register_forward_hook(lambda *a: inner.append(1))
    found: dict[str, Any] = {"names": list(boosted.model.state_dict()) == names}

    def counted(name: str) -> None:
        found[name] = (len(outer), len(inner), len(model.cache))
        outer.clear(), inner.clear(), model.cache.clear()

    x = torch.randn(8, 4)
    model(x).sum().backward()
    counted("training")
    with torch.no_grad():
        model(x)
    counted("without gradients")
    model.eval()
    model(x).sum().backward()
    counted("evaluation")
    model.train()
    model.cache.append(x)
    try:
        model(x)
    except StepError as error:
        found["filled cache"] = str(error)
    return found


def test_what_runs_twice_and_what_does_not() -> None:
    (found,) = pool(1).run(ways_to_run)
    assert found == {
        "names": True,
        "training": (1, 2, 0),
        "without gradients": (1, 1, 3),
        "evaluation": (1, 1, 3),
        "filled cache": (
            "layers.0 was given a key/value cache that holds 1 positions while training, and a "
            "recomputed unit would fill it again.\n\nTrain without past_key_values, or leave remat "
            "out."
        ),
    }


def evaluated_with_gradients() -> list[int]:
    """A frozen-statistics fine-tuning runs in evaluation mode, and is to save memory too."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    boosted = remat()(model, toys.momentum(model))
    counts = []
    runs: list[int] = []
    model[0][0].register_forward_hook(lambda *a: runs.append(1))
    for mode in (True, False):
        model.train(mode)
        boosted.model(torch.randn(2, 4)).sum().backward()
        counts.append(len(runs))
        runs.clear()
    return counts


def test_evaluation_mode_with_gradients_recomputes_too() -> None:
    assert pool(1).run(evaluated_with_gradients) == [[2, 2]]


def accumulated(transform: Transform) -> Any:
    model = gpt()
    boosted = transform(model, toys.adamw(model))
    first, second = (boosted.shard(toys.tokens(4, seed)) for seed in range(2))
    with boosted.no_sync():
        loss, count = toys.next_token(model, first)
        boosted.backward(loss, count=count)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, count = toys.next_token(model, second)
    boosted.backward(loss, count=count)
    boosted.optimizer.step()
    return boosted.gather()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hand_written_loops_with_no_sync_and_autocast(stage: Any, world2: World) -> None:
    plain = world2.run(accumulated, zero(stage))
    assert same(world2.run(accumulated, zero(stage) | remat()), plain)


# -- refusals at the call --------------------------------------------------------------------------


def refused(make: Any, text: str) -> str:
    model = make()
    before = {n: p.clone() for n, p in model.state_dict().items()}
    try:
        parse(text)(model, toys.momentum(model))
    except ParallaxError as error:
        untouched = same(dict(model.state_dict()), before)
        return f"{type(error).__name__}: {error}" if untouched else "changed"
    return "accepted"


def own() -> nn.Module:
    model = gpt()
    model.blocks[1].gradient_checkpointing = True
    return model


REFUSED = {
    "no blocks": (
        toys.Mlp,
        "zero(2), remat()",
        (
            "RuleError: remat found no repeated blocks in Mlp, and recomputing a whole model at "
            "once saves no memory.\n\nName its parts: remat(units='Class') or "
            "remat(units='pattern.*')."
        ),
    ),
    "twice": (
        own,
        "zero(2), remat()",
        (
            "RuleError: blocks.1 of Gpt has gradient checkpointing of its own switched on, and "
            "remat would compute it twice again.\n\nCall model.gradient_checkpointing_disable(), "
            "or leave remat out."
        ),
    ),
    "in one another": (
        gpt,
        "zero(2), remat(units=('Block', 'Attention'))",
        (
            "RuleError: remat was given units of Gpt that lie in one another: blocks.0.attn in "
            "blocks.0.\n\nName the outer ones, or the inner ones."
        ),
    ),
    "tied": (
        gpt,
        "zero(2), remat(units='head')",
        (
            "RuleError: units='head' matches no module inside Gpt that holds its parameters "
            "alone.\n\nName modules within the model that share no parameter with the rest of it."
        ),
    ),
    "joined": (
        gpt,
        "zero(2), remat(keep='matmuls'), remat(budget='1GiB')",
        (
            "RuleError: the composition states keep and budget: a budget counts units that keep "
            "everything or their inputs alone. Leave one of them out, or give keep with a fraction."
        ),
    ),
    "sharded inside": (
        gpt,
        "zero(2), mixed_precision('bf16', keep='norms'), remat(keep='matmuls')",
        (
            "RuleError: remat(keep='matmuls') keeps results inside units, where blocks.0.norm1 and "
            "7 more would be gathered by themselves.\n\nLeave keep out of remat, or shard and keep "
            "in float32 nothing smaller than its units."
        ),
    ),
    "other units": (
        gpt,
        "zero(2), remat(units='Attention'), compile(backend='eager')",
        (
            "RuleError: compile and remat have different units: blocks.0 is one of compile's and "
            "none of remat's.\n\nGive both the same units=, or none."
        ),
    ),
}


def test_what_does_not_fit_the_model_is_refused_on_every_rank(world2: World) -> None:
    for name, (make, text, message) in REFUSED.items():
        found = world2.run(refused, make, text)
        assert found == [message, message], name
