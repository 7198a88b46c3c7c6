"""A checkpoint saved under one composition goes on under any other."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from parallax import Transform, bf16, clip, compose, dp, fp32, parse, zero
from parallax.checkpoint import Index, Reader, read_index
from parallax.checkpoint.load import load_
from parallax.core.slices import box, local
from parallax.testing import World, pool, toys

pytestmark = pytest.mark.ranks

COMPOSITIONS = {
    1: ["compose()", "zero(3), fp32", "dp(), tp(1)"],
    2: ["dp()", "zero(1)", "zero(3)", "tp(2)", "tp(2, loss_parallel=True), fp32", "zero(2), fp32"],
    4: ["dp(2), zero(3)", "tp(2), zero(2)", "tp(2), dp()", "tp(4)", "zero(3)", "zero(1)"],
}
PLACES = [(n, text) for n, texts in COMPOSITIONS.items() for text in texts]


def build(text: str, seed: int) -> Any:
    torch.manual_seed(seed)
    model = toys.Gpt(tied=True, scalar=True, frozen=True, unused=True, empty=True).double()
    return parse(text.replace("fp32", "mixed_precision('fp64')"))(model, toys.adamw(model))


def train(boosted: Any, *steps: int) -> list[float]:
    return [
        float(boosted.train_step(toys.next_token, boosted.shard(toys.tokens(4, step))))
        for step in steps
    ]


def save_half_way(text: str, directory: str) -> None:
    boosted = build(text, 0)
    train(boosted, 0, 1)
    boosted.save(directory)


def go_on(text: str, directory: str | None) -> tuple[list[float], Any]:
    """Losses of the two steps after loading, and the whole state after them."""
    boosted = build(text, 1 if directory else 0)
    if directory:
        boosted.load_(directory)
    else:
        train(boosted, 0, 1)
    losses = train(boosted, 2, 3)
    whole = boosted.gather()
    return losses, whole


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[list[float], Any]:
    return pool(1).run(go_on, "compose()", None)[0]


def assert_same(found: tuple[list[float], Any], expected: tuple[list[float], Any]) -> None:
    # float64; four steps whose sums are in another order, of AdamW with eps 1e-3 and numbers below
    # 10: a few hundred roundings of 1e-16. A lost moment or a weight rounded to float32 moves the
    # loss by 1e-8 and more.
    assert found[0] == pytest.approx(expected[0], abs=1e-11)
    mine, theirs = found[1], expected[1]
    assert int(mine["step"]) == int(theirs["step"]) == 4
    for kind in ("params", "buffers"):
        assert set(mine[kind]) == set(theirs[kind])
        for name, value in theirs[kind].items():
            torch.testing.assert_close(mine[kind][name], value, rtol=0, atol=1e-11)
    assert {n: set(m) for n, m in mine["moments"].items()} == {
        n: set(m) for n, m in theirs["moments"].items()
    }
    for name, entries in theirs["moments"].items():
        for entry, value in entries.items():
            torch.testing.assert_close(mine["moments"][name][entry], value, rtol=0, atol=1e-11)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(source=st.sampled_from(PLACES), target=st.sampled_from(PLACES))
def test_any_to_any(source: Any, target: Any, uninterrupted: Any, tmp_path: Path) -> None:
    directory = tmp_path / f"{PLACES.index(source)}"
    if not directory.exists():
        pool(source[0]).run(save_half_way, source[1], str(directory))
    assert_same(pool(target[0]).run(go_on, target[1], str(directory))[0], uninterrupted)


def test_every_composition_saves_and_loads(uninterrupted: Any, tmp_path: Path) -> None:
    """A ring through all of them, so that none is left to chance."""
    for i, (n, text) in enumerate(PLACES):
        pool(n).run(save_half_way, text, str(tmp_path / f"{i}"))
    for i, (n, text) in enumerate(PLACES):
        found = pool(n).run(go_on, text, str(tmp_path / f"{(i + 5) % len(PLACES)}"))
        assert_same(found[0], uninterrupted)


def test_forgotten_moments_would_be_seen(uninterrupted: Any, tmp_path: Path) -> None:
    def forgetful(directory: str) -> Any:
        boosted = build("zero(2)", 1)
        load_(boosted, directory, kinds=("params", "buffers", "step"))
        return train(boosted, 2, 3), boosted.gather()

    pool(2).run(save_half_way, "zero(3)", str(tmp_path / "c"))
    with pytest.raises(AssertionError):
        assert_same(pool(2).run(forgetful, str(tmp_path / "c"))[0], uninterrupted)


# -- what is in the files --------------------------------------------------------------------------


def test_files_are_safetensors_and_json_and_nothing_else(tmp_path: Path) -> None:
    directory = tmp_path / "c"
    pool(4).run(save_half_way, "tp(2), zero(2)", str(directory))
    names = sorted(p.name for p in directory.iterdir())
    assert names == ["index.json", "model.safetensors", "state.safetensors"]
    assert list(tmp_path.iterdir()) == [directory]  # nothing unfinished is left beside it
    for path in directory.iterdir():
        assert pickled(path) is False, path
    index = json.loads((directory / "index.json").read_text())
    assert index["format"] == "parallax"
    assert index["composition"] == "compose(tp(2), zero(2))"
    assert index["step"] == 2


def pickled(path: Path) -> bool:
    """Whether a file holds a pickle: as its own header, or inside an archive."""
    data = path.read_bytes()
    if path.suffix == ".json":
        json.loads(data)
        return False
    (length,) = struct.unpack("<Q", data[:8])
    json.loads(data[8 : 8 + length])
    return data[:2] in (b"\x80\x02", b"\x80\x04", b"PK") or b"data.pkl" in data


def test_a_pickle_would_be_seen(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "rank-00000.safetensors")
    with pytest.raises(ValueError, match=r"codec|Expecting|double|column|value"):
        pickled(tmp_path / "rank-00000.safetensors")


@pytest.mark.parametrize(("n", "text"), [(2, "dp()"), (4, "tp(2), zero(2)"), (4, "dp(2), zero(3)")])
def test_every_element_is_written_once(n: int, text: str, tmp_path: Path) -> None:
    directory = tmp_path / "c"
    pool(n).run(save_half_way, text, str(directory))
    index = read_index(directory)
    assert unevenly_written(index) == []
    names = dict(
        toys.Gpt(tied=True, scalar=True, frozen=True, unused=True, empty=True).named_parameters()
    )
    written = {k.removeprefix("params/"): e for k, e in index.tensors.items() if "params/" in k}
    assert {name: e.shape for name, e in written.items()} == {n: p.shape for n, p in names.items()}
    if n > 1:
        index.tensors["params/blocks.0.up.weight"].pieces.pop()
        again = index.tensors["params/positions"].pieces
        again.append(again[0])
        assert unevenly_written(index) == ["params/blocks.0.up.weight", "params/positions"]


def unevenly_written(index: Index) -> list[str]:
    """Tensors of which an element lies in no piece, or in several."""
    found = []
    for key, entry in index.tensors.items():
        times = torch.zeros(entry.shape, dtype=torch.int64)
        for piece in entry.pieces:
            times[piece.box.window] += 1
        if not bool((times == 1).all()):
            found.append(key)
    return sorted(found)


def test_settings_of_groups_come_back() -> None:
    def run(directory: str) -> list[Any]:
        boosted = build("zero(2)", 0)
        boosted.optimizer.param_groups[0]["lr"] = 0.123
        train(boosted, 0)
        boosted.save(directory)
        again = build("zero(2)", 1)
        again.load_(directory)
        return [(g["lr"], g["weight_decay"], g["betas"]) for g in again.optimizer.param_groups]

    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        rows = pool(2).run(run, f"{directory}/c")
    assert rows == [[(0.123, 0.1, (0.9, 0.999)), (5e-3, 0.0, (0.9, 0.999))]] * 2


def schedule_after_loading(directory: str) -> list[float]:
    """A schedule keeps its own state; the group's rate is that of the checkpoint."""

    def start(seed: int) -> tuple[Any, Any]:
        boosted = build("zero(2)", seed)
        return boosted, torch.optim.lr_scheduler.StepLR(boosted.optimizer, 1, gamma=0.5)

    boosted, schedule = start(0)
    train(boosted, 0)
    schedule.step()
    boosted.save(directory)
    again, other = start(1)
    again.load_(directory)
    other.load_state_dict(schedule.state_dict())
    for b, s in ((boosted, schedule), (again, other)):
        train(b, 1)
        s.step()
    return [b.optimizer.param_groups[0]["lr"] for b in (boosted, again)]


def test_schedules_go_on_from_the_checkpoints_rate(world2: World, tmp_path: Path) -> None:
    for one, other in world2.run(schedule_after_loading, str(tmp_path / "c")):
        assert one == other == 1e-2 / 4


def masters(directory: str) -> tuple[bool, bool]:
    """bf16's masters are not rounded on the way through a file."""
    torch.manual_seed(0)
    model = toys.Mlp()
    boosted = compose(zero(3), bf16, clip(1.0))(model, toys.momentum(model))
    boosted.train_step(toys.square, boosted.shard(toys.points(4)))
    boosted.save(directory)
    other = toys.Mlp()
    again = compose(zero(1), fp32)(other, toys.momentum(other))
    again.load_(directory)
    whole, back = boosted.gather(), again.gather()
    if whole is None:
        return True, True
    same = all(torch.equal(back["params"][n], p) for n, p in whole["params"].items())
    rounded = all(torch.equal(p, p.bfloat16().float()) for p in whole["params"].values())
    return same, not rounded


def test_masters_are_kept_in_full(world2: World, tmp_path: Path) -> None:
    assert world2.run(masters, str(tmp_path / "c")) == [(True, True)] * 2


OPTIMIZERS: dict[str, Any] = {
    "sgd without momentum": lambda p: torch.optim.SGD(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "a rate in a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def any_optimizer(directory: str) -> dict[str, bool]:
    found = {}
    for name, make in OPTIMIZERS.items():

        def start(seed: int, make: Any = make) -> Any:
            torch.manual_seed(seed)
            model = toys.Mlp()
            return zero(3)(model, make(model.parameters()))

        one, other = start(0), start(1)
        for step in range(3):
            one.train_step(toys.square, one.shard(toys.points(4, step)))
        one.save(f"{directory}/{name}")
        other.load_(f"{directory}/{name}")
        for b in (one, other):
            b.train_step(toys.square, b.shard(toys.points(4, 3)))
        found[name] = all(
            torch.equal(local(p), local(other.params[n])) for n, p in one.params.items()
        )
    return found


def test_the_state_of_every_kind_of_optimizer_comes_back(world2: World, tmp_path: Path) -> None:
    assert world2.run(any_optimizer, str(tmp_path)) == [dict.fromkeys(OPTIMIZERS, True)] * 2


def reading(directory: str) -> tuple[int, int]:
    """Elements of parameters that a rank copies out of files, and elements that it holds."""
    boosted = build("zero(3)", 1)
    asked = []
    real = Reader.copy_

    def copy_(self: Any, target: torch.Tensor, key: str, wanted: Any = None) -> None:
        real(self, target, key, wanted)
        if key.startswith("params/"):
            asked.append(target.numel())

    Reader.copy_ = copy_
    try:
        boosted.load_(directory)
    finally:
        Reader.copy_ = real
    return sum(asked), sum(local(p).numel() for p in boosted.params.values())


def test_each_rank_reads_its_own_part_only(tmp_path: Path) -> None:
    pool(4).run(save_half_way, "tp(2), zero(2)", str(tmp_path / "c"))
    for asked, held in pool(2).run(reading, str(tmp_path / "c")):
        assert asked == held


def transient(directory: str) -> tuple[bool, float]:
    boosted = build("dp()", 0)
    boosted.save(directory)
    again = build("dp()", 1)
    again.model.depth.fill_(7.0)
    again.load_(directory)
    keys = read_index(Path(directory)).tensors if dist.get_rank() == 0 else {}
    return any("depth" in key for key in keys), float(again.model.depth)


def test_buffers_that_are_not_saved_stay_as_they_are(world2: World, tmp_path: Path) -> None:
    assert world2.run(transient, str(tmp_path / "c")) == [(False, 7.0)] * 2


def model_only(directory: str) -> bool:
    torch.manual_seed(0)
    model: nn.Module = toys.Mlp()
    zero(2)(model).save(directory)
    torch.manual_seed(1)
    other: Transform = dp()
    again = other(toys.Mlp())
    again.load_(directory)
    torch.manual_seed(0)
    expected = dict(toys.Mlp().named_parameters())
    return all(torch.equal(local(p), expected[n][box(p).window]) for n, p in again.params.items())


def test_a_model_without_optimizer(world2: World, tmp_path: Path) -> None:
    assert world2.run(model_only, str(tmp_path / "c")) == [True, True]


def test_tensor_parallel_saves_what_dp_loads(tmp_path: Path) -> None:
    """The whole tensors, not only the training that follows."""

    def saved(text: str, directory: str) -> Any:
        boosted = build(text, 0)
        boosted.save(directory)
        return boosted.gather()

    def loaded(text: str, directory: str) -> Any:
        boosted = build(text, 1)
        boosted.load_(directory)
        return boosted.gather()

    one = pool(4).run(saved, "tp(4)", str(tmp_path / "c"))[0]
    other = pool(2).run(loaded, "dp()", str(tmp_path / "c"))[0]
    assert all(torch.equal(other["params"][n], p) for n, p in one["params"].items())


def other_kernels(directory: str) -> Any:
    model = toys.Mlp()
    first = zero(2)(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    first.train_step(toys.square, first.shard(toys.points(4)))
    first.save(directory)
    model = toys.Mlp()
    second = zero(2)(model, torch.optim.AdamW(model.parameters(), lr=0.5, fused=True))
    second.load_(directory)
    second.train_step(toys.square, second.shard(toys.points(4)))
    group = second.optimizer.param_groups[0]
    return group["lr"], group["fused"]


@pytest.mark.ranks
def test_by_which_kernels_it_steps_is_each_runs_own(world2: World, tmp_path: Path) -> None:
    assert world2.run(other_kernels, str(tmp_path / "saved")) == [(0.1, True)] * 2
