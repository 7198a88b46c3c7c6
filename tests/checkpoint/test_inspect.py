"""What is in a checkpoint is told; every damage is found and named; differences are measured."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from parallax import CheckpointError, dp
from parallax.checkpoint.inspect import Change, Inspected, Row, Total, compared, difference
from parallax.checkpoint.layout import Spec
from parallax.testing import World, toys

pytestmark = pytest.mark.ranks

SIZES = (5, 7, 3, 1)


def saved(directory: str, seed: int = 0, steps: int = 1, lr: float = 0.1, shard: int = 1 << 30):
    torch.manual_seed(seed)
    model = toys.Mlp(*SIZES)
    boosted = dp()(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))
    for step in range(steps):
        boosted.train_step(toys.square, boosted.shard(toys.points(4, step)))
    boosted.save(directory, shard_size=shard)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, world2: World) -> Path:
    """A checkpoint of several files of the model; to be copied, not changed."""
    directory = tmp_path_factory.mktemp("inspect") / "run"
    world2.run(saved, str(directory), shard=100)
    return directory


@pytest.fixture
def checkpoint(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "run"))


def faults(directory: Path, pattern: str | None = None) -> list[str]:
    with Inspected(directory, pattern) as found:
        return [str(fault) for fault in found.faults()]


def file_of(directory: Path, key: str) -> Path:
    with Inspected(directory) as found:
        return directory / found.rows[key].file


# -- what there is ---------------------------------------------------------------------------------


def test_the_tensors_and_what_the_run_says_are_told(sound: Path) -> None:
    told: list[int] = []
    with Inspected(sound) as found:
        assert found.format == "a parallax checkpoint"
        assert found.rows["params/layers.0.weight"] == Row(
            Spec("float32", (7, 5)), "model-00001-of-00004.safetensors", 1
        )
        assert found.index is not None
        assert (found.index.step, found.index.optimizer) == (1, "SGD")
        totals = found.totals()
        assert totals["params"] == totals["moments"] == Total(6, 4 * (35 + 7 + 21 + 3 + 3 + 1))
        assert found.faults(told.append) == []
        assert sum(told) == found.size == sum(total.size for total in totals.values())


def test_a_folder_of_checkpoints_stands_for_its_newest(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "step-1")
    with Inspected(tmp_path) as found:
        assert found.directory == tmp_path / "step-1"


def test_a_pattern_chooses_what_is_looked_at(sound: Path) -> None:
    with Inspected(sound, "params/*.bias") as found:
        assert list(found.rows) == [f"params/layers.{i}.bias" for i in range(3)]
    with pytest.raises(CheckpointError) as error:
        Inspected(sound, "parms/*")
    with Inspected(sound) as found:
        keys, count = list(found.rows), len(found.rows)
    assert str(error.value) == (
        f"tensors that match 'parms/*' were asked for from {sound}; its {count} keys are "
        f"{', '.join(keys[:4])} and {count - 4} more.\n\nGive a pattern such as '*weight'."
    )


def test_pieces_are_those_that_ranks_wrote(tmp_path: Path, world2: World) -> None:
    world2.run(cut, str(tmp_path / "cut"))
    with Inspected(tmp_path / "cut") as found:
        assert found.rows["params/layers.0.weight"].pieces == 2
        assert found.faults() == []


def cut(directory: str) -> None:
    from parallax import zero

    model = toys.Mlp(*SIZES)
    zero(3)(model, toys.momentum(model)).save(directory)


def test_plain_files_of_safetensors_are_told(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2, 3), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    with Inspected(tmp_path) as found:
        assert (found.format, found.index, found.faults()) == ("safetensors", None, [])
        assert found.rows["w"] == Row(Spec("float32", (2, 3)), "model.safetensors", 1)
        assert found.totals() == {"tensors": Total(2, 32)}


# -- planted damage --------------------------------------------------------------------------------


def test_a_flipped_bit_is_found_in_its_tensor(checkpoint: Path) -> None:
    key = "params/layers.1.weight"
    path = file_of(checkpoint, key)
    with Inspected(checkpoint) as found:
        last = [k for k, row in found.rows.items() if row.file == path.name][-1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)
    assert faults(checkpoint) == [
        (
            f"{last} in {path} is damaged: its bytes do not have the checksum that the index holds."
            "\n\nLoad another checkpoint."
        )
    ]
    assert faults(checkpoint, "moments/*") == []


def test_a_missing_file_is_named_with_its_tensors(checkpoint: Path) -> None:
    path = file_of(checkpoint, "params/layers.0.weight")
    path.unlink()
    assert faults(checkpoint) == [
        (
            f"{path} is missing, and params/layers.0.weight with it.\n\nPut the file back, or load "
            "another checkpoint."
        )
    ]


def test_a_file_cut_short_is_named_with_what_is_lost(checkpoint: Path) -> None:
    path = file_of(checkpoint, "params/layers.0.weight")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-8])
    assert faults(checkpoint) == [
        (
            f"{path} has {size - 8:,} bytes where its header speaks of {size:,}; "
            "params/layers.0.weight is cut off, and the other tensors in it cannot be read either."
            "\n\nLoad another checkpoint."
        )
    ]
    path.write_bytes(path.read_bytes()[:20])
    assert faults(checkpoint) == [
        (
            f"{path} cannot be read, and params/layers.0.weight with it: it has 20 bytes, less "
            "than its header.\n\nLoad another checkpoint."
        )
    ]


def test_swapped_files_are_named(checkpoint: Path) -> None:
    one, other = (file_of(checkpoint, f"params/layers.{i}.weight") for i in (0, 1))
    with Inspected(checkpoint) as found:
        held = {p: [k for k, r in found.rows.items() if r.file == p.name] for p in (one, other)}
    one.rename(checkpoint / "aside")
    other.rename(one)
    (checkpoint / "aside").rename(other)
    seek = {p: ", ".join(keys) for p, keys in held.items()}
    names = {p: text.replace("params/", "") for p, text in seek.items()}
    assert "params/layers.0.weight" in seek[one]
    assert "params/layers.1.weight" in seek[other]
    assert faults(checkpoint) == [
        f"{here} does not hold {seek[here]}, which the index seeks there; it holds {names[there]}."
        "\n\nThe files of the checkpoint were swapped: give them their names back, or load another "
        "checkpoint."
        for here, there in ((one, other), (other, one))
    ]


def test_a_file_of_another_checkpoint_is_named(checkpoint: Path, world2: World) -> None:
    other = checkpoint.parent / "other"
    world2.run(saved, str(other), seed=1, shard=100)
    path = file_of(checkpoint, "params/layers.0.weight")
    shutil.copy(other / path.name, path)
    assert faults(checkpoint) == [
        (
            f"{path} belongs to another checkpoint than the index beside it, which seeks "
            "params/layers.0.weight there.\n\nPut the files of one checkpoint together, or load "
            "another one."
        )
    ]


def test_changed_and_missing_texts_are_named(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors.index.json"
    path.write_text(path.read_text() + " ")
    assert faults(checkpoint) == [
        (
            f"{path} does not have the checksum that the index holds: it was changed after it was "
            "saved.\n\nUndo the change, or save again."
        )
    ]
    path.unlink()
    assert faults(checkpoint) == [
        (
            f"{path} cannot be read: No such file or directory.\n\nPut the file back, or load "
            "another checkpoint."
        )
    ]


def test_all_faults_are_found_at_once(checkpoint: Path) -> None:
    file_of(checkpoint, "params/layers.0.weight").unlink()
    (checkpoint / "model.safetensors.index.json").unlink()
    with Inspected(checkpoint) as found:
        states = {r.file for k, r in found.rows.items() if k.startswith("moments/")}
    for file in states:
        (checkpoint / file).unlink()
    assert len(faults(checkpoint)) == 2 + len(states)


def test_a_damaged_index_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "index.json"
    path.write_text(path.read_text().replace('"step": 1', '"step": 2'))
    with pytest.raises(CheckpointError) as error:
        Inspected(checkpoint)
    assert str(error.value) == (
        f"the index {path} cannot be read: its bytes do not have the checksum at its end, so it "
        "was changed.\n\nThe file is damaged; load another checkpoint."
    )


# -- differences -----------------------------------------------------------------------------------


def compare(one: Path, other: Path, pattern: str | None = None) -> Any:
    told: list[int] = []
    with Inspected(one, pattern) as a, Inspected(other, pattern) as b:
        found = difference(a, b, told.append)
        assert sum(told) == compared(a, b)
    return found


def test_a_copy_does_not_differ(sound: Path, checkpoint: Path) -> None:
    found = compare(sound, checkpoint)
    with Inspected(sound) as inspected:
        assert found.same == len(inspected.rows)
    assert not found


def test_settings_steps_and_values_that_differ_are_told(
    sound: Path, tmp_path: Path, world2: World
) -> None:
    world2.run(saved, str(tmp_path / "b"), steps=2, lr=0.5)
    found = compare(sound, tmp_path / "b")
    assert found.about == [Change("step", 1, 2), Change("group 0: lr", 0.1, 0.5)]
    assert {k for k in found.values if k.startswith("params/")} == {
        f"params/layers.{i}.{what}" for i in range(3) for what in ("weight", "bias")
    }
    assert (found.only_one, found.only_other, found.specs) == ([], [], [])


def plain(directory: Path, **tensors: torch.Tensor) -> Path:
    directory.mkdir()
    save_file({name: t.clone() for name, t in tensors.items()}, directory / "model.safetensors")
    return directory


def test_the_largest_difference_is_measured(tmp_path: Path) -> None:
    base = torch.arange(6.0).view(2, 3)
    moved = base.clone()
    moved[1, 2] += 0.25
    moved[0, 0] -= 0.125
    one = plain(
        tmp_path / "a",
        moved=base,
        same=base,
        nan=torch.tensor([math.nan, math.inf]),
        broken=torch.tensor([1.0]),
        large=torch.tensor([2**62]),
        dtype=base,
        shape=base,
        mine=base,
    )
    other = plain(
        tmp_path / "b",
        moved=moved,
        same=base,
        nan=torch.tensor([math.nan, math.inf]),
        broken=torch.tensor([math.nan]),
        large=torch.tensor([2**62 + 1]),
        dtype=base.bfloat16(),
        shape=base.view(3, 2).contiguous(),
        theirs=base,
    )
    found = compare(one, other)
    assert (found.only_one, found.only_other) == (["mine"], ["theirs"])
    assert found.specs == [
        Change("dtype", Spec("float32", (2, 3)), Spec("bfloat16", (2, 3))),
        Change("shape", Spec("float32", (2, 3)), Spec("float32", (3, 2))),
    ]
    assert found.values.pop("moved") == 0.25
    assert math.isnan(found.values.pop("broken"))
    assert list(found.values) == ["large"]  # though float64 rounds its difference to nothing
    assert found.same == 2
    assert not compare(one, other, "same")


def test_a_difference_in_a_late_chunk_is_found(tmp_path: Path) -> None:
    base = torch.zeros(3, 1 << 20)
    moved = base.clone()
    moved[2, -1] = 1
    found = compare(plain(tmp_path / "a", x=base), plain(tmp_path / "b", x=moved))
    assert found.values == {"x": 1.0}


def test_a_checkpoint_and_plain_files_are_compared_by_name(sound: Path, tmp_path: Path) -> None:
    with Inspected(sound) as found:
        tensors = {
            k.removeprefix("params/"): found.part(k, whole(found, k)).clone()
            for k in found.rows
            if k.startswith("params/")
        }
    other = plain(tmp_path / "plain", **tensors)
    found = compare(sound, other)
    assert not found
    assert found.same == 6
    tensors["layers.0.bias"] += 1
    assert set(compare(plain(tmp_path / "moved", **tensors), sound).values) == {"layers.0.bias"}


def whole(found: Inspected, key: str) -> Any:
    from parallax.checkpoint.read import whole_box

    return whole_box(found.rows[key].spec.shape)
