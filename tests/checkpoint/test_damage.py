"""Checkpoints that are missing, damaged or of something else are named, and change nothing."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from xxhash import xxh3_64_intdigest

from parallax import CheckpointError, clip, compose, dp, zero
from parallax.checkpoint import read_index
from parallax.core.slices import local
from parallax.testing import World, pool, toys

pytestmark = pytest.mark.ranks


def build(seed: int = 0, sizes: tuple[int, ...] = (5, 7, 3, 1), transform: Any = None) -> Any:
    torch.manual_seed(seed)
    model = toys.Mlp(*sizes)
    return (transform or zero(3))(model, toys.momentum(model))


def saved(directory: str, seed: int = 0) -> None:
    boosted = build(seed)
    boosted.train_step(toys.square, boosted.shard(toys.points(4)))
    boosted.save(directory)


def refused(directory: str, sizes: tuple[int, ...] = (5, 7, 3, 1)) -> tuple[str, bool]:
    """The refusal, and whether everything is as it was before."""
    boosted = build(1, sizes)
    boosted.train_step(toys.square, boosted.shard(toys.points(4, width=sizes[0])))
    before = {n: local(p).detach().clone() for n, p in boosted.params.items()}
    momentum = {n: local(m["momentum_buffer"]).clone() for n, m in boosted.moments.items()}
    try:
        boosted.load_(directory)
    except CheckpointError as error:
        text = str(error)
    else:
        text = "nothing was raised"
    same = (
        all(torch.equal(local(p), before[n]) for n, p in boosted.params.items())
        and all(
            torch.equal(local(m["momentum_buffer"]), momentum[n])
            for n, m in boosted.moments.items()
        )
        and boosted.step == 1
    )
    return text, same


def outcome(ranks: World, directory: Path, **options: Any) -> str:
    rows = ranks.run(refused, str(directory), **options)
    assert len(set(rows)) == 1, rows
    text, same = rows[0]
    assert same or text == "nothing was raised"
    return text


@pytest.fixture
def checkpoint(tmp_path: Path, world2: World) -> Path:
    directory = tmp_path / "run"
    world2.run(saved, str(directory))
    return directory


def test_a_sound_one_is_taken(checkpoint: Path, world2: World) -> None:
    assert outcome(world2, checkpoint) == "nothing was raised"


def test_a_missing_directory_is_named_with_its_neighbours(checkpoint: Path, world2: World) -> None:
    missing = checkpoint.parent / "rum"
    assert outcome(world2, missing) == (
        f"no checkpoint at {missing}: there is no such directory; beside it: run.\n\n"
        "Give the directory that boosted.save wrote."
    )
    nowhere = checkpoint.parent / "a" / "b"
    assert outcome(world2, nowhere) == (
        f"no checkpoint at {nowhere}: there is no such directory; beside it: no checkpoint.\n\n"
        "Give the directory that boosted.save wrote."
    )


def test_a_directory_of_something_else_is_named(tmp_path: Path, world2: World) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert outcome(world2, tmp_path) == (
        f"no checkpoint at {tmp_path}: the directory holds no index.json but pytorch_model.bin.\n\n"
        "Give the directory that boosted.save wrote."
    )


def test_a_file_in_place_of_a_directory_is_named(tmp_path: Path, world2: World) -> None:
    (tmp_path / "file").write_text("x")
    text = outcome(world2, tmp_path / "file")
    assert text.startswith((f"no checkpoint at {tmp_path / 'file'}", "the index "))


def test_an_index_cut_short_is_named(checkpoint: Path, world2: World) -> None:
    index = checkpoint / "index.json"
    index.write_text(index.read_text()[:100])
    text = outcome(world2, checkpoint)
    assert text.startswith(f"the index {index} cannot be read: ")
    assert text.endswith(".\n\nThe file is damaged; load another checkpoint.")


def sealed(raw: dict[str, Any]) -> bytes:
    """An index as one would write it who knows the format."""
    body = {k: v for k, v in raw.items() if k != "xxh3"}
    text = json.dumps(body, indent=1).encode().removesuffix(b"\n}")
    return text + b',\n "xxh3": %d\n}\n' % xxh3_64_intdigest(text)


def tampered(checkpoint: Path, change: Any) -> None:
    index = checkpoint / "index.json"
    raw = json.loads(index.read_text())
    change(raw)
    index.write_bytes(sealed(raw))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"version": 9}, "format 'parallax', version 9"),
        ({"format": "other"}, "format 'other', version 2"),
    ],
)
def test_an_index_of_another_kind_is_named(
    checkpoint: Path, world2: World, change: dict[str, Any], what: str
) -> None:
    tampered(checkpoint, lambda raw: raw.update(change))
    assert outcome(world2, checkpoint) == (
        f"the index {checkpoint / 'index.json'} is not one of a parallax checkpoint of this "
        f"version: it says {what}, and format 'parallax', version 2 is read.\n\nGive a directory "
        "that boosted.save wrote; load_pretrained and `parallax convert` read others."
    )


def _point_outside(raw: dict[str, Any]) -> None:
    raw["tensors"]["params/layers.0.weight"]["file"] = "../model.safetensors"


def _negative(raw: dict[str, Any]) -> None:
    raw["tensors"]["params/layers.0.weight"]["shape"] = [-7, -5]


def _leave(raw: dict[str, Any]) -> None:
    raw["tensors"]["params/layers.0.weight"]["pieces"][0]["offsets"] = [7, 0]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            lambda raw: raw.update(tensors=3),
            "AttributeError: 'int' object has no attribute 'items'",
        ),
        (_point_outside, "ValueError: the file name '../model.safetensors' leaves the directory"),
        (_negative, "ValueError: [-7, -5] holds a negative size"),
        (
            _leave,
            "ValueError: the piece Box(offsets=(7, 0), lengths=(4, 5)) leaves the shape (7, 5)",
        ),
    ],
)
def test_an_index_made_to_mislead_is_refused(
    checkpoint: Path, world2: World, change: Any, what: str
) -> None:
    tampered(checkpoint, change)
    assert outcome(world2, checkpoint) == (
        f"the index {checkpoint / 'index.json'} cannot be read: {what}.\n\n"
        "The file is damaged; load another checkpoint."
    )


@pytest.mark.parametrize("text", ["[1, 2]", "[" * 100_000, "1", '{"format": "parallax"}'])
def test_json_of_something_else_is_named(checkpoint: Path, world2: World, text: str) -> None:
    (checkpoint / "index.json").write_text(text)
    assert outcome(world2, checkpoint).startswith(f"the index {checkpoint / 'index.json'} ")


def test_a_changed_setting_in_the_index_is_found(checkpoint: Path, world2: World) -> None:
    """A learning rate with another digit has no tensor whose checksum could tell."""
    index = checkpoint / "index.json"
    text = index.read_text()
    assert '"lr": 0.1' in text
    index.write_text(text.replace('"lr": 0.1', '"lr": 0.9'))
    assert outcome(world2, checkpoint) == (
        f"the index {index} cannot be read: its bytes do not have the checksum at its end, so it "
        "was changed.\n\nThe file is damaged; load another checkpoint."
    )


FILES = ["model.safetensors", "state.safetensors"]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(checkpoint: Path, world2: World, name: str) -> None:
    (checkpoint / name).unlink()
    text = outcome(world2, checkpoint)
    assert f" cannot be read from {checkpoint / name}: " in text
    assert text.endswith("\n\nThe file is missing or damaged; load another checkpoint.")


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_short_is_named(checkpoint: Path, world2: World, name: str, keep: int) -> None:
    file = checkpoint / name
    file.write_bytes(file.read_bytes()[:keep])
    text = outcome(world2, checkpoint)
    assert f" cannot be read from {file}: " in text
    assert text.endswith("\n\nThe file is missing or damaged; load another checkpoint.")


def test_swapped_files_are_named(checkpoint: Path, world2: World) -> None:
    one, other = (checkpoint / name for name in FILES)
    shutil.move(one, checkpoint / "x")
    shutil.move(other, one)
    shutil.move(checkpoint / "x", other)
    text = outcome(world2, checkpoint)
    assert text.startswith("params/layers.0.weight cannot be read from ")


def test_files_of_another_checkpoint_are_named(checkpoint: Path, world2: World) -> None:
    """Same names, same shapes, other numbers: a copy that was interrupted."""
    other = checkpoint.parent / "other"
    world2.run(saved, str(other), 5)
    shutil.copy(other / "state.safetensors", checkpoint)
    assert outcome(world2, checkpoint) == (
        f"{checkpoint / 'state.safetensors'} belongs to another checkpoint than the index beside "
        "it.\n\nPut the files of one checkpoint together, or load another one."
    )


def test_every_flipped_bit_is_found(checkpoint: Path, world2: World) -> None:
    """One bit of each byte, in turn, of all files: the checks know all of them."""
    boosted = world2.run(flips, str(checkpoint))
    assert boosted == [[]] * 2


def flips(directory: str) -> list[str]:
    """Places where a flipped bit goes unseen."""
    unseen = []
    boosted = build(1)
    for path in sorted(Path(directory).iterdir()):
        data = path.read_bytes()
        for place in sorted({*range(0, len(data), 97), len(data) - 1}):
            dist.barrier()
            if dist.get_rank() == 0:
                damaged = bytearray(data)
                damaged[place] ^= 1 << (place % 7)
                path.write_bytes(bytes(damaged))
            dist.barrier()
            try:
                boosted.load_(directory)
            except CheckpointError:
                continue
            unseen.append(f"{path.name}:{place}")
        dist.barrier()
        if dist.get_rank() == 0:
            path.write_bytes(data)
        dist.barrier()
    boosted.load_(directory)
    return unseen


def test_a_flipped_bit_names_tensor_and_file(checkpoint: Path, world2: World) -> None:
    file = checkpoint / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 0x40
    file.write_bytes(bytes(data))
    assert outcome(world2, checkpoint) == (
        f"params/layers.2.bias in {file} is damaged: its bytes do not have the checksum that the "
        "index holds.\n\nLoad another checkpoint."
    )


def test_a_piece_that_the_index_forgot_is_named(checkpoint: Path, world2: World) -> None:
    tampered(checkpoint, lambda raw: raw["tensors"]["params/layers.0.weight"]["pieces"].pop())
    rows = world2.run(refused, str(checkpoint))
    assert len(set(rows)) == 1
    assert rows[0][0] == (
        f"params/layers.0.weight in {checkpoint} is incomplete: 0 of 15 elements that are asked "
        "for were written.\n\nThe checkpoint is damaged; load another one."
    )


def test_another_model_is_named_with_all_differences(checkpoint: Path, world2: World) -> None:
    assert outcome(world2, checkpoint, sizes=(5, 6, 1)) == (
        f"the checkpoint {checkpoint} does not fit Mlp:\n  layers.2.bias is in the checkpoint "
        "only\n  layers.2.weight is in the checkpoint only\n  layers.0.weight has shape (7, 5) "
        "in the checkpoint and (6, 5) in the model\n  layers.0.bias has shape (7,) in the "
        "checkpoint and (6,) in the model\n  layers.1.weight has shape (3, 7) in the checkpoint "
        "and (1, 6) in the model\n  layers.1.bias has shape (3,) in the checkpoint and (1,) in "
        "the model\n  the optimizer has 1 groups of [4] parameters, the checkpoint 1 of [6], or "
        "in another order\n\nBuild the model and the optimizer's groups as they were when it was "
        "saved, attach what was attached, or read less of it with kinds=."
    )


def another_optimizer(directory: str) -> str:
    torch.manual_seed(0)
    model = toys.Mlp()
    boosted = zero(2)(model, torch.optim.AdamW(model.parameters()))
    try:
        boosted.load_(directory)
    except CheckpointError as error:
        return str(error)
    boosted.train_step(toys.square, boosted.shard(toys.points(4)))
    return "nothing was raised"


def test_the_state_of_another_optimizer_is_named(checkpoint: Path, world2: World) -> None:
    """SGD's momentum means nothing to AdamW."""
    for text in world2.run(another_optimizer, str(checkpoint)):
        assert text.startswith(f"the checkpoint {checkpoint} does not fit Mlp:\n")
        assert "SGD" in text
        assert "AdamW" in text


# -- writing ---------------------------------------------------------------------------------------


def save_again(directory: str, break_rank: int | None) -> str:
    """Save other weights; on one rank writing fails as a full disk makes it fail."""
    pieces = importlib.import_module("parallax.checkpoint.pieces")
    boosted = build(3)
    real = pieces._write_all

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    if dist.get_rank() == break_rank:
        pieces._write_all = full
    try:
        boosted.save(directory)
    except CheckpointError as error:
        return str(error)
    finally:
        pieces._write_all = real
    return "nothing was raised"


def content(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(directory.iterdir())}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_leaves_the_old_one(
    checkpoint: Path, world2: World, rank: int
) -> None:
    before = content(checkpoint)
    texts = world2.run(save_again, str(checkpoint), rank)
    assert (
        texts
        == [
            (
                f"cannot write a checkpoint to {checkpoint}: rank {rank}: [Errno 28] No space "
                "left on device.\n\nCheck that the path exists for every rank, is writable and "
                "has room. Nothing that was there before has been changed."
            )
        ]
        * 2
    )
    assert content(checkpoint) == before
    assert list(checkpoint.parent.iterdir()) == [checkpoint]


def test_a_place_that_is_no_directory_is_named(checkpoint: Path, world2: World) -> None:
    blocked = checkpoint / "index.json" / "below"
    before = content(checkpoint)
    texts = world2.run(save_again, str(blocked), None)
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"cannot write a checkpoint to {blocked}: rank 0: [Errno ")
    assert content(checkpoint) == before


def test_saving_replaces_what_is_there(checkpoint: Path, world2: World) -> None:
    before = content(checkpoint)
    assert world2.run(save_again, str(checkpoint), None) == ["nothing was raised"] * 2
    assert content(checkpoint) != before
    assert read_index(checkpoint).step == 0
    assert list(checkpoint.parent.iterdir()) == [checkpoint]


def test_one_rank_replaces_what_two_wrote(checkpoint: Path) -> None:
    pool(1).run(saved, str(checkpoint))
    assert sorted(content(checkpoint)) == ["index.json", *FILES]
    assert outcome(pool(1), checkpoint) == "nothing was raised"


def test_a_save_that_was_killed_is_not_taken_for_a_checkpoint(
    tmp_path: Path, world2: World
) -> None:
    """What is unfinished has no index, so loading it is refused; the next save clears it away."""
    unfinished = tmp_path / ".run.deadbeef.partial"
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_bytes(b"")
    assert outcome(world2, unfinished).startswith(f"no checkpoint at {unfinished}: ")
    world2.run(saved, str(tmp_path / "run"))
    assert outcome(world2, tmp_path / "run") == "nothing was raised"
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


def rooms(directory: str) -> Any:
    boosted = build(0, transform=compose(dp(), clip(1.0)))
    boosted.train_step(toys.square, boosted.shard(toys.points(4)))
    boosted.save(directory)
    return sorted(read_index(Path(directory)).tensors)[:1]


def test_an_empty_room_writes_nothing(tmp_path: Path, world2: World) -> None:
    world2.run(rooms, str(tmp_path / "c"))
    keys = read_index(tmp_path / "c").tensors
    assert {key.split("/")[0] for key in keys} == {"params", "moments", "random"}
