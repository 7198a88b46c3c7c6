"""The boosted pair as a tree: snapshots, writing them back, arithmetic on two, and gathering."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallax import (
    Boosted,
    CheckpointError,
    StepError,
    Transform,
    bf16,
    clip,
    compose,
    dp,
    tp,
    zero,
)
from parallax.core.slices import box, local
from parallax.testing import World, pool, toys

pytestmark = pytest.mark.ranks
TREE: dict[str, Any] = {"namespace": "parallax"}
FULL = compose(zero(3), clip(1.0))


def gpt(transform: Transform, seed: int = 0) -> Boosted:
    torch.manual_seed(seed)
    model = toys.Gpt(tied=True, scalar=True, unused=True)
    return transform(model, toys.adamw(model))


def train(boosted: Boosted, *steps: int) -> list[float]:
    return [
        float(boosted.train_step(toys.next_token, boosted.shard(toys.tokens(4, step))))
        for step in steps
    ]


def copied(boosted: Boosted) -> Boosted:
    return optree.tree_map(torch.clone, boosted, **TREE)


def go_back(transform: Transform) -> tuple[list[float], list[float], int, list[bool]]:
    boosted = gpt(transform)
    train(boosted, 0, 1)
    snapshot = copied(boosted)
    first = train(boosted, 2, 3)
    boosted.load_(snapshot)
    step = boosted.step
    same = [
        torch.equal(local(a).detach(), local(b).detach())
        for a, b in zip(
            optree.tree_leaves(boosted, **TREE), optree.tree_leaves(snapshot, **TREE), strict=True
        )
    ]
    return first, train(boosted, 2, 3), step, same


@pytest.mark.parametrize("transform", [dp(), FULL, tp(2)], ids=repr)
def test_a_snapshot_written_back_goes_on_bitwise_alike(transform: Transform, world2: World) -> None:
    for first, again, step, same in world2.run(go_back, transform):
        assert first == again
        assert step == 2
        assert same
        assert all(same)


def from_the_start() -> tuple[list[float], list[float]]:
    boosted = gpt(FULL)
    snapshot = copied(boosted)
    assert snapshot.moments == {}
    first = train(boosted, 0, 1)
    boosted.load_(snapshot)
    return first, train(boosted, 0, 1)


def test_a_snapshot_of_before_the_first_step_forgets_the_moments(world2: World) -> None:
    for first, again in world2.run(from_the_start):
        assert first == again


def paths() -> tuple[list[str], str, int]:
    boosted = gpt(FULL)
    train(boosted, 0)
    names = ["/".join(map(str, p)) for p in optree.tree_paths(boosted, **TREE)]
    return names, repr(boosted), len(boosted.params)


def test_paths_of_leaves_are_the_keys_of_a_checkpoint(world2: World) -> None:
    names, text, count = world2.run(paths)[0]
    assert {name.split("/")[0] for name in names} == {"params", "buffers", "moments", "step"}
    assert "params/blocks.1.attn.key.weight" in names
    assert "moments/blocks.1.attn.key.weight/exp_avg_sq" in names
    assert "buffers/seen" in names
    assert len([n for n in names if n.startswith("params/")]) == count
    assert not any(
        "depth" in n or "head.weight" in n or "spare" in n.split("moments/")[-1:] for n in names
    )
    assert text == "<boosted Gpt at step 1: compose(clip(1.0), zero(3))>"


def two_states() -> tuple[float, float, str, str]:
    boosted, other = gpt(FULL), gpt(FULL, seed=1)
    early = copied(boosted)
    train(boosted, 0)
    train(other, 0)
    params = {"params": early.params}
    moved = optree.tree_map(lambda a, b: (a - b).abs().max(), params, {"params": boosted.params})
    far = max(float(local(x)) for x in optree.tree_leaves(moved))
    mean = optree.tree_map(
        lambda a, b: (a + b) / 2 if a.is_floating_point() else a, boosted, other, **TREE
    )
    name = "blocks.0.up.weight"
    half = (local(boosted.params[name]) + local(other.params[name])) / 2
    close = float((local(mean.params[name]) - half).abs().max())
    boosted.load_(mean)
    assert torch.equal(local(boosted.params[name]), local(mean.params[name]))
    try:
        optree.tree_map(lambda a, b: a, boosted, gpt(dp()), **TREE)
    except ValueError as error:
        refusal = type(error).__name__
    else:
        refusal = "nothing was raised"
    return far, close, repr(mean), refusal


def test_arithmetic_on_two_states(world2: World) -> None:
    for far, close, text, refusal in world2.run(two_states):
        assert 0 < far < 0.1
        assert close == 0
        assert text == "<snapshot Gpt at step 1: compose(clip(1.0), zero(3))>"
        assert refusal == "ValueError"  # optree's own: their handles differ by plan


def said(work: Callable[[], Any]) -> str:
    try:
        work()
    except (StepError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


VERBS: dict[str, Callable[[Boosted], Any]] = {
    "grad": lambda b: b.grad(toys.next_token, toys.tokens(2)),
    "update": lambda b: b.update(),
    "grads": lambda b: b.grads,
    "eval_step": lambda b: b.eval_step(toys.next_token, toys.tokens(2)),
    "backward": lambda b: b.backward(torch.zeros((), requires_grad=True)),
    "no_sync": lambda b: b.no_sync().__enter__(),
    "load_": lambda b: b.load_(b),
    "save": lambda b: b.save("nowhere"),
}


def frozen() -> dict[str, str]:
    snapshot = copied(gpt(dp()))
    return {name: said(lambda act=act: act(snapshot)) for name, act in VERBS.items()}


def test_a_snapshot_trains_nothing() -> None:
    (found,) = pool(1).run(frozen)
    assert found == {
        verb: f"StepError: {verb} was called on a snapshot, which holds tensors and trains nothing."
        "\n\nCall it on the boosted pair; boosted.load_(snapshot) writes the snapshot back."
        for verb in VERBS
    }


def foreign() -> str:
    return said(lambda: gpt(dp()).load_(copied(gpt(zero(2)))))


def test_a_snapshot_of_another_composition_is_refused() -> None:
    (text,) = pool(1).run(foreign)
    assert text == (
        f"CheckpointError: a snapshot of\n{_plan(zero(2))}\nwas given to a pair "
        f"of\n{_plan(dp())}\n\nSave to a directory and load that: files fit any composition."
    )


def _plan(t: Transform) -> str:
    return str(t.plan(1)).replace("store [STORE]", "store [STORE] -> optimizer [BIND]")


def stale_gradients() -> float:
    """A gradient of the old weights must not reach the first update after loading."""
    boosted = gpt(zero(2))
    snapshot = copied(boosted)
    boosted.grad(toys.next_token, boosted.shard(toys.tokens(4)))
    boosted.load_(snapshot)
    return float(sum(p.grad is not None for p in boosted.params.values()))


def test_loading_forgets_gradients(world2: World) -> None:
    assert world2.run(stale_gradients) == [0.0, 0.0]


# -- gather ----------------------------------------------------------------------------------------


class Meter(TorchDispatchMode):
    """The largest tensor made while it is on."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in optree.tree_leaves(out):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, local(x).numel())
        return out


@contextmanager
def metered() -> Iterator[Meter]:
    with torch.no_grad(), Meter() as meter:
        yield meter


def gather_like_everyone(boosted: Boosted) -> Any:
    """The planted fault: every rank puts every tensor together."""
    whole = {
        n: p.full_tensor().cpu() for n, p in boosted.params.items() if hasattr(p, "full_tensor")
    }
    return {"params": whole} if dist.get_rank() == 0 else None


def gathering(transform: Transform, planted: bool) -> tuple[bool, int, int, int]:
    boosted = gpt(transform)
    train(boosted, 0)
    with metered() as meter:
        whole = gather_like_everyone(boosted) if planted else boosted.gather()
    biggest = max(p.numel() for p in boosted.params.values())
    part = max(local(p).numel() for p in boosted.params.values())
    return whole is None, meter.largest, biggest, part


@pytest.mark.parametrize("transform", [zero(3), compose(tp(2), zero(3))], ids=repr)
def test_gathering_makes_whole_tensors_on_rank_0_only(transform: Transform, world4: World) -> None:
    rows = world4.run(gathering, transform, False)
    assert [nothing for nothing, *_ in rows] == [False, True, True, True]
    for _, largest, biggest, part in rows[1:]:
        assert largest <= part < biggest
    assert rows[0][1] == rows[0][2]


def test_a_gather_on_every_rank_would_be_seen(world4: World) -> None:
    for _, largest, biggest, _ in world4.run(gathering, zero(3), True)[1:]:
        assert largest >= biggest


def gathered(transform: Transform) -> tuple[Any, Any, dict[str, Tensor]]:
    boosted = gpt(transform)
    start = boosted.gather()
    train(boosted, 0)
    mine = {
        f"{n}|{','.join(map(str, box(p).offsets))}": local(p).detach().clone()
        for n, p in boosted.params.items()
    }
    return start, boosted.gather(), mine


@pytest.mark.parametrize("transform", [dp(), zero(3), compose(tp(2), zero(3), bf16)], ids=repr)
def test_gather_gives_the_whole_state(transform: Transform, world4: World) -> None:
    rows = world4.run(gathered, transform)
    start, end, _ = rows[0]
    torch.manual_seed(0)
    model = toys.Gpt(tied=True, scalar=True, unused=True)
    expected = dict(model.named_parameters())
    assert list(start) == ["params", "buffers", "moments", "rooms", "step"]
    assert list(start["params"]) == list(expected)
    assert all(torch.equal(start["params"][n], p) for n, p in expected.items())
    assert (start["moments"], int(start["step"]), int(end["step"])) == ({}, 0, 1)
    assert {k: int(v) for k, v in end["buffers"].items()} == {"seen": 1}
    for _, _, mine in rows:
        for key, part in mine.items():
            name, _, offsets = key.partition("|")
            starts = [int(o) for o in offsets.split(",") if o]
            index = tuple(slice(o, o + n) for o, n in zip(starts, part.shape, strict=True))
            assert torch.equal(end["params"][name][index], part)
    shapes = {n: tuple(m["exp_avg"].shape) for n, m in end["moments"].items()}
    assert shapes == {n: tuple(p.shape) for n, p in expected.items() if not n.startswith("spare")}
