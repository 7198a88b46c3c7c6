"""Saving and loading through a Booster: files that any composition reads, and nothing pickled."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedules

import parallax
from parallax import CheckpointError, Transform, bf16, compose, dp, tp, zero
from parallax.booster import Booster
from parallax.booster.onefile import files_at
from parallax.testing import World, toys

HALVES = compose(tp(2), zero(2, degree=2))
SAVERS = [(2, zero(2)), (2, dp()), (4, HALVES)]


def awkward(seed: int = 0) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model = toys.Gpt(tied=True, scalar=True, frozen=True, unused=True, empty=True)
    return model, toys.adamw(model)


class Run:
    """A Booster with its parts, as a script holds them."""

    def __init__(self, plugin: Transform, seed: int = 0) -> None:
        model, optimizer = awkward(seed)
        scheduler = schedules.StepLR(optimizer, 2, gamma=0.5)
        self.booster = Booster(plugin=plugin)
        self.model, self.optimizer, _, _, self.scheduler = self.booster.boost(
            model, optimizer, lr_scheduler=scheduler
        )
        self.boosted = self.booster.boosted(self.model)

    def train(self, *steps: int) -> list[float]:
        losses = []
        for step in steps:
            batch = self.boosted.shard(toys.tokens(4, step))
            losses.append(float(self.boosted.train_step(toys.mean_next_token, batch)))
            self.scheduler.step()
        return losses

    def save(self, where: Path, *, shard: bool) -> None:
        self.booster.save_model(self.model, place(where, "model", shard), shard=shard)
        self.booster.save_optimizer(self.optimizer, place(where, "optimizer", shard), shard=shard)
        self.booster.save_lr_scheduler(self.scheduler, where / "scheduler.json")

    def load(self, where: Path, *, shard: bool) -> None:
        self.booster.load_model(self.model, place(where, "model", shard))
        self.booster.load_optimizer(self.optimizer, place(where, "optimizer", shard))
        self.booster.load_lr_scheduler(self.scheduler, where / "scheduler.json")


def place(where: Path, name: str, shard: bool) -> Path:
    return where / (name if shard else f"{name}.safetensors")


def train_and_save(plugin: Transform, where: Path) -> Any:
    run = Run(plugin)
    run.train(0, 1, 2)
    run.save(where, shard=True)
    run.save(where, shard=False)
    run.save(where, shard=True)  # once more, over what is there
    saved = run.boosted.gather()
    return run.train(3, 4), saved


def load_and_train(plugin: Transform, where: Path, shard: bool) -> Any:
    run = Run(plugin, seed=9)
    run.train(7)  # there is state to be replaced
    run.load(where, shard=shard)
    loaded = run.boosted.gather()
    assert run.boosted.step == 3
    return run.train(3, 4), loaded


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "saver"), SAVERS, ids=repr)
def test_a_run_continues_under_any_composition(
    ranks: int, saver: Transform, tmp_path: Path
) -> None:
    """State is loaded to the bit; what follows differs by the order of sums alone."""
    losses, saved = parallax.testing.pool(ranks).run(train_and_save, saver, tmp_path)[0]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "model",
        "model.safetensors",
        "optimizer",
        "optimizer.safetensors",
        "scheduler.json",
    ]
    for n, loader in SAVERS:
        for shard in (True, False):
            again, loaded = parallax.testing.pool(n).run(load_and_train, loader, tmp_path, shard)[0]
            same(loaded, saved)
            # Two float32 losses, each off by less than a rounding for each of the 48 terms of the
            # longest product.
            assert again == pytest.approx(losses, rel=100 * 2.0**-24)


@pytest.mark.ranks
def test_one_file_is_what_plain_torch_reads(world2: World, tmp_path: Path) -> None:
    _, saved = world2.run(train_and_save, compose(zero(2), bf16), tmp_path)[0]
    model, _ = awkward(5)
    weights = load_file(tmp_path / "model.safetensors")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing == ["head.weight"]  # tied to embed.weight
    assert unexpected == []
    same(dict(model.named_parameters()), saved["params"])
    assert all(p.dtype == torch.float32 for p in model.parameters())


def load_into(path: Path, kwargs: dict[str, Any]) -> Any:
    run = Run(zero(2), seed=4)
    before = run.boosted.gather()
    try:
        run.booster.load_model(run.model, path, **kwargs)
    except CheckpointError as error:
        same(run.boosted.gather(), before)  # nothing was changed
        return str(error), None
    return "", run.boosted.gather()


def plain_weights() -> dict[str, Tensor]:
    model, _ = awkward(8)
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.ranks
def test_weights_from_elsewhere(world2: World, tmp_path: Path) -> None:
    """A plain state dict, as one file, in a directory, and in several files with an index."""
    weights = plain_weights()
    save_file(weights, tmp_path / "model.safetensors")
    spread = tmp_path / "spread"
    spread.mkdir()
    rows = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(weights)}
    for file in set(rows.values()):
        save_file({n: weights[n] for n, f in rows.items() if f == file}, spread / file)
    (spread / "model.safetensors.index.json").write_text(json.dumps({"weight_map": rows}))
    for path in (tmp_path / "model.safetensors", tmp_path, spread):
        text, loaded = world2.run(load_into, path, {})[0]
        assert text == ""
        same(
            {**loaded["params"], **loaded["buffers"]},
            {n: weights[n] for n in weights if n != "head.weight"},
        )


@pytest.mark.ranks
def test_only_what_both_have(world2: World, tmp_path: Path) -> None:
    weights = plain_weights()
    del weights["embed.weight"]  # its other name, head.weight, is there
    del weights["norm.bias"]
    weights["other"] = torch.zeros(2)
    path = tmp_path / "part.safetensors"
    save_file(weights, path)
    text, _ = world2.run(load_into, path, {})[0]
    assert text == (
        f"{path} does not fit Gpt:\n  norm.bias is in the model only\n  other is in the file "
        "only\n\nBuild the model as it was when it was saved, or use strict=False to load the "
        "names that both have."
    )
    text, loaded = world2.run(load_into, path, {"strict": False})[0]
    assert text == ""
    same(loaded["params"]["embed.weight"], weights["head.weight"])
    same(loaded["params"]["norm.bias"], torch.zeros(16))


def tampered(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**weights, "norm.bias": torch.zeros(3), "head.weight": weights["head.weight"] + 1}


class Runs:
    """What runs code when a file that holds it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


@pytest.mark.ranks
def test_files_that_do_not_fit(world2: World, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tampered(plain_weights()), path)
    empty, pickled, damaged = tmp_path / "empty", tmp_path / "model.bin", tmp_path / "d.safetensors"
    empty.mkdir()
    torch.save({"x": Runs()}, pickled)
    damaged.write_bytes(b"\0" * 20)
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    other = tmp_path / "x.safetensors"
    messages = [
        world2.run(load_into, p, {"strict": p != other})[0][0]
        for p in (path, empty, tmp_path / "none", pickled, other)
    ]
    remedy = "\n\nBuild the model as it was when it was saved"
    assert messages == [
        (
            f"{path} does not fit Gpt:\n"
            "  embed.weight and head.weight are one tensor in the model and differ in the file\n"
            "  norm.bias has shape (3,) in the file and (16,) in the model"
            f"{remedy}, or use strict=False to load the names that both have."
        ),
        (
            f"a checkpoint was asked for in {empty}, which holds none.\n\nGive a directory with an "
            "index.json of parallax, a .metadata of DCP, or a model's .safetensors or .bin files; "
            "or the path of one such file."
        ),
        (
            f"a checkpoint was asked for at {tmp_path / 'none'}, and there is no such file or "
            "directory.\n\nGive a path that exists."
        ),
        (
            f"{pickled} is refused: it asks for posix.mkdir, and only tensors and plain values are "
            "read from such files. None of it was run.\n\nIf it comes from a source you trust, "
            "load it there and save model.state_dict() again, best as safetensors."
        ),
        f"{other} does not fit Gpt:\n  no name in the file is one of the model's{remedy}.",
    ]
    text = world2.run(load_into, damaged, {})[0][0]
    assert text.startswith(f"the checkpoint {damaged} is missing files, or they are damaged:\n")
    assert not (tmp_path / "ran").exists()


def test_a_damaged_listing(tmp_path: Path) -> None:
    listing = tmp_path / "model.safetensors.index.json"
    listing.write_text("{}")
    with pytest.raises(CheckpointError) as caught:
        files_at(tmp_path)
    assert str(caught.value) == (
        f"the index {listing} cannot be read: KeyError: 'weight_map'.\n\n"
        "The file is damaged; load another checkpoint."
    )


def refusals(where: Path) -> list[str]:
    run = Run(zero(2))
    booster, model, optimizer = run.booster, run.model, run.optimizer
    single, folder = where / "m.safetensors", where / "own"
    booster.save_model(model, folder, shard=True)
    booster.save_model(model, single)
    calls: list[Callable[[], None]] = [
        lambda: booster.save_model(
            model,
            single,
            prefix="x/y",
            size_per_shard=0,
            use_safetensors=False,
            use_async=True,
        ),
        lambda: booster.save_model(model, where / "model.bin"),
        lambda: booster.save_optimizer(optimizer, where / "optimizer.pt"),
        lambda: booster.save_optimizer(optimizer, folder, shard=True),
        lambda: booster.save_model(model, where, shard=True),
        lambda: booster.save_model(model, single, shard=True),
        lambda: booster.load_optimizer(optimizer, folder, low_cpu_mem_mode=False, num_threads=4),
        lambda: booster.load_optimizer(optimizer, single),
        lambda: booster.load_lr_scheduler(run.scheduler, single),
    ]
    found = []
    for call in calls:
        with pytest.raises(CheckpointError) as caught:
            call()
        found.append(str(caught.value))
    return found


@pytest.mark.ranks
def test_what_is_refused(world2: World, tmp_path: Path) -> None:
    results = world2.run(refusals, tmp_path)
    assert results[0] == results[1]
    single, folder = tmp_path / "m.safetensors", tmp_path / "own"
    blocks = "each rank reads only the blocks it holds, from memory-mapped files"
    assert results[0][:8] == [
        (
            "5 faults:\n\n1. save_model was given prefix='x/y', and one file is named by the path "
            "and written at once.\n\nUse shard=True, or leave prefix out.\n\n"
            "2. save_model was given use_async=True, and one file is named by the path and written "
            "at once.\n\nUse shard=True, or leave use_async out.\n\n"
            "3. save_model was given size_per_shard=0, and it is the most in one file, in MiB.\n\n"
            "Give a whole number from 1 on.\n\n"
            "4. save_model was given prefix='x/y', and it is put into the names of files.\n\n"
            "Give letters, digits, - and _ only.\n\n"
            "5. save_model was given use_safetensors=False, and the only format is safetensors: "
            "pickled files run code when they are read.\n\nLeave use_safetensors out."
        ),
        (
            f"save_model was given {tmp_path / 'model.bin'}, and the only format is safetensors: "
            "pickled files run code when they are read.\n\nName it model.safetensors, or use a "
            "directory with shard=True."
        ),
        (
            f"save_optimizer was given {tmp_path / 'optimizer.pt'}, and the only format is "
            "safetensors: pickled files run code when they are read.\n\nName it "
            "optimizer.safetensors, or use a directory with shard=True."
        ),
        (
            f"saving to {folder} replaces the directory, and it holds buffers and params of "
            "another checkpoint.\n\nGive model and optimizer a directory each."
        ),
        (
            f"saving to {tmp_path} replaces the directory, and it holds other files: "
            "m.safetensors, own.\n\nGive a directory of its own, for instance one below."
        ),
        f"shard=True writes a directory, and {single} is a file.\n\nGive another path.",
        (
            f"2 faults:\n\n1. load_optimizer was given low_cpu_mem_mode=False, and {blocks}.\n\n"
            "Leave low_cpu_mem_mode out.\n\n"
            f"2. load_optimizer was given num_threads=4, and {blocks}.\n\nLeave num_threads out."
        ),
        f"{single} holds no optimizer's state.\n\nGive the path that save_optimizer wrote.",
    ]
    assert results[0][8].startswith(f"{single} cannot be read as a scheduler's state: ")
    assert results[0][8].endswith(".\n\nGive the path that save_lr_scheduler wrote.")


def other_groups(path: Path) -> str:
    run = Run(zero(2))
    run.booster.save_optimizer(run.optimizer, path)
    model, _ = awkward()
    booster = Booster(plugin=zero(2))
    model, optimizer, *_ = booster.boost(model, SGD(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointError) as caught:
        booster.load_optimizer(optimizer, path)
    return str(caught.value)


@pytest.mark.ranks
def test_an_optimizer_with_other_groups(world2: World, tmp_path: Path) -> None:
    path = tmp_path / "optimizer.safetensors"
    text = world2.run(other_groups, path)[0]
    assert text.startswith(f"{path} does not fit Gpt: the optimizer has 1 groups of [")
    assert text.endswith("Make the optimizer's groups as they were when it was saved.")


def unwritable(path: Path) -> str:
    run = Run(zero(2))
    with pytest.raises(CheckpointError) as caught:
        run.booster.save_model(run.model, path / "below" / "m.safetensors")
    return str(caught.value)


@pytest.mark.ranks
def test_every_rank_learns_that_rank_0_could_not_write(world2: World, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    first, second = world2.run(unwritable, file)
    assert first == second
    assert first.startswith(f"cannot write a checkpoint to {file / 'below' / '.m.safetensors'}")
    assert first.endswith(
        ".\n\nCheck that the path exists for every rank, is writable and has room. Nothing that "
        "was there before has been changed."
    )


def in_shards(where: Path) -> dict[str, Any]:
    run = Run(zero(3))
    booster, model = run.booster, run.model
    booster.save_model(model, where / "a", shard=True, size_per_shard=1, prefix="mine")
    booster.save_model(model, where / "b", shard=True, use_async=True, gather_dtensor=True)
    saving = booster.boosted(model).saving
    assert saving is not None
    booster.save_optimizer(run.optimizer, where / "o", shard=True, use_async=True)
    done = saving.done()  # a second save waits for the first
    other = Run(dp(), 1)
    for name in ("a", "b"):
        for strict in (True, False):
            other.booster.load_model(other.model, where / name, strict=strict)
    whole = booster.boosted(model).gather()
    theirs = other.booster.boosted(other.model).gather()
    same = whole is None or all(
        torch.equal(value, theirs["params"][n]) for n, value in whole["params"].items()
    )
    return {"done": done, "same": same, "files": sorted(p.name for p in (where / "a").iterdir())}


@pytest.mark.ranks
def test_directories_of_shards_with_a_prefix_and_beside_training(
    world2: World, tmp_path: Path
) -> None:
    for found in world2.run(in_shards, tmp_path):
        assert found == {
            "done": True,
            "same": True,
            "files": ["index.json", "model.mine.safetensors"],
        }


def optimizer() -> Optimizer:
    return SGD([nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)


MAKERS: list[Callable[[Optimizer], Any]] = [
    lambda o: schedules.MultiStepLR(o, [2, 4]),
    lambda o: schedules.OneCycleLR(o, 0.1, total_steps=10),
    schedules.ReduceLROnPlateau,
    lambda o: schedules.LambdaLR(o, lambda epoch: 0.9**epoch),
    lambda o: schedules.CyclicLR(o, 0.1, 0.2),
    lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    lambda o: schedules.SequentialLR(
        o, [schedules.ConstantLR(o), schedules.MultiStepLR(o, [1, 2])], [2]
    ),
]


def turned(scheduler: Any, times: int) -> list[list[float]]:
    rates = []
    for _ in range(times):
        scheduler.optimizer.step()
        plateau = isinstance(scheduler, schedules.ReduceLROnPlateau)
        scheduler.step(*([1.0] if plateau else []))
        rates.append([group["lr"] for group in scheduler.optimizer.param_groups])
    return rates


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR's own
@pytest.mark.parametrize("make", MAKERS)
def test_every_scheduler_of_torch_goes_on(make: Any, tmp_path: Path) -> None:
    booster, path = Booster(), tmp_path / "scheduler.json"
    first, second = make(optimizer()), make(optimizer())
    turned(first, 3)
    booster.save_lr_scheduler(first, path)
    booster.load_lr_scheduler(second, path)
    plain = dict(first.state_dict())
    assert second.state_dict() == plain
    for group, saved in zip(
        second.optimizer.param_groups, first.optimizer.param_groups, strict=True
    ):
        group.update({k: v for k, v in saved.items() if k != "params"})
    assert turned(second, 4) == turned(first, 4)
    json.loads(path.read_text())


class Holding:
    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_values_of_a_state_come_back_as_they_were(tmp_path: Path) -> None:
    booster, path = Booster(), tmp_path / "scheduler.json"
    state = {
        "a": (1, [2.5, None]),
        "b": {3: True, "tuple": float("inf")},
        "c": Counter({1: 2}),
        "d": torch.tensor(0.5, dtype=torch.float64),
    }
    booster.save_lr_scheduler(Holding(**state), path)
    loaded = Holding()
    booster.load_lr_scheduler(loaded, path)
    assert loaded.state == state
    assert type(loaded.state["c"]) is Counter
    assert loaded.state["d"].dtype == torch.float64


def test_what_a_scheduler_may_not_hold(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        Booster().save_lr_scheduler(Holding(rows=[1, print]), tmp_path / "s.json")
    assert str(caught.value) == (
        "the state holds Holding.rows[1], a builtin_function_or_method, which is no plain value."
        "\n\nLet its state_dict() hold numbers, text, tensors, and lists, tuples, sets and dicts "
        "of "
        "them only; give the rest again when the object is made."
    )
    assert list(tmp_path.iterdir()) == []


def test_a_scheduler_of_another_class(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    Booster().save_lr_scheduler(Holding(a=1), path)
    with pytest.raises(CheckpointError) as caught:
        Booster().load_lr_scheduler(schedules.StepLR(optimizer(), 1), path)
    assert str(caught.value) == (
        f"{path} holds the state of a Holding, and the scheduler is a StepLR.\n\n"
        "Make the scheduler as it was when it was saved."
    )
