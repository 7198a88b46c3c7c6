"""Weights of every format become those of every other, exactly, and complete or not at all."""

from __future__ import annotations

import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from parallax import CheckpointError, compose, dp, zero
from parallax.checkpoint import Read, Reader, read_index
from parallax.checkpoint.convert import convert
from parallax.checkpoint.foreign import open_foreign
from parallax.checkpoint.layout import Spec
from parallax.checkpoint.source import Source
from parallax.core.slices import Box
from parallax.testing import World, pool, toys
from tests.checkpoint.forms import FORMS, load_dcp, read, same, save_fsdp, weights

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("to", ["transformers", "dcp", "parallax"])
def test_each_format_becomes_each_other(form: Any, to: Any, tmp_path: Path) -> None:
    told: list[int] = []
    with open_foreign(form(tmp_path / "source")) as source:
        out = convert(source, tmp_path / "out", to, progress=told.append)
        assert sum(told) == source.size
    assert same(read(out), weights())
    if to == "dcp":
        assert same(load_dcp(out, weights()), weights())
    else:
        assert same(load_file(out / "model.safetensors"), weights())
    if to == "parallax":
        with Reader(out) as reader:
            reader.check(*map(Read, reader.index.tensors))
            assert reader.index.kinds == ["params"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]  # nothing hidden left


# -- from and to ranks -----------------------------------------------------------------------------


def test_a_checkpoint_of_two_fsdp_ranks_is_read(tmp_path: Path) -> None:
    expected = pool(2).run(save_fsdp, str(tmp_path / "fsdp"))[0]
    assert same(read(tmp_path / "fsdp"), expected)
    with open_foreign(tmp_path / "fsdp") as source:
        assert source.whole.pieces["model.layers.0.weight"] == 2
        assert source.notes == [
            (
                "6 names begin with 'model.', which was taken off; --prefix '' leaves them as they "
                "are."
            ),
            "18 tensors were left out as not of the model.",
        ]
        for offset in range(7):  # across the border of the ranks' chunks
            box = Box((offset, 0), (7 - offset, 5))
            assert torch.equal(
                source.block("layers.0.weight", box), expected["layers.0.weight"][offset:]
            )
        out = convert(source, tmp_path / "out", "transformers")
    assert same(load_file(out / "model.safetensors"), expected)


def into_parallax(directory: str) -> dict[str, Any] | None:
    model = toys.Mlp()
    boosted = zero(3)(model, toys.momentum(model))
    boosted.load_(directory, kinds=("params",))
    whole = boosted.gather()
    return None if whole is None else dict(whole["params"])


def test_fsdp_goes_on_in_parallax(tmp_path: Path) -> None:
    expected = pool(2).run(save_fsdp, str(tmp_path / "fsdp"))[0]
    with open_foreign(tmp_path / "fsdp") as source:
        convert(source, tmp_path / "out", "parallax")
    found = pool(2).run(into_parallax, str(tmp_path / "out"))[0]
    assert same(found, expected)


def save_norm(directory: str) -> None:
    torch.manual_seed(5)
    compose(dp())(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), None).save(directory)


def into_norm(directory: str, kinds: tuple[Any, ...]) -> list[str]:
    boosted = compose(dp())(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), None)
    boosted.load_(directory, kinds=kinds)
    return sorted([*boosted.leaves("params"), *boosted.leaves("buffers")])


def test_a_checkpoint_of_parallax_becomes_others_and_comes_back(
    tmp_path: Path, world2: World
) -> None:
    world2.run(save_norm, str(tmp_path / "run"))
    with open_foreign(tmp_path / "run") as source:
        convert(source, tmp_path / "dcp", "dcp")
        convert(source, tmp_path / "again", "parallax")
    names = sorted(read(tmp_path / "run"))
    assert "1.running_mean" in names
    assert same(read(tmp_path / "dcp"), read(tmp_path / "run"))
    # From parallax it is known which are buffers; otherwise a pattern says it.
    assert read_index(tmp_path / "again").kinds == ["params", "buffers"]
    kinds = ("params", "buffers")
    assert world2.run(into_norm, str(tmp_path / "again"), kinds) == [names] * 2
    with open_foreign(tmp_path / "dcp") as source:
        convert(source, tmp_path / "back", "parallax", buffers="*.[rn]u[nm]*")
    assert world2.run(into_norm, str(tmp_path / "back"), kinds) == [names] * 2
    assert sorted(read_index(tmp_path / "back").tensors) == sorted(
        read_index(tmp_path / "again").tensors
    )


def test_a_damaged_checkpoint_of_parallax_is_not_converted(tmp_path: Path, world2: World) -> None:
    world2.run(save_norm, str(tmp_path / "run"))
    path = tmp_path / "run" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with open_foreign(tmp_path / "run") as source, pytest.raises(CheckpointError) as error:
        convert(source, tmp_path / "out", "dcp")
    assert str(error.value).endswith(
        f" in {path} is damaged: its bytes do not have the checksum that the index holds.\n\n"
        "Load another checkpoint."
    )
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


# -- what is written -------------------------------------------------------------------------------


def test_files_are_numbered_above_a_size_and_dtypes_become_others(tmp_path: Path) -> None:
    torch.save(weights() | {"eighth": torch.ones(2).to(torch.float8_e4m3fn)}, tmp_path / "a.pt")
    with open_foreign(tmp_path / "a.pt") as source:
        out = convert(source, tmp_path / "out", "transformers", dtype="fp16", shard_size=60)
    said = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(said["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    found = read(out)
    assert said["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    assert same(
        {name: found[name] for name in weights()},
        {n: t.half() if t.is_floating_point() else t for n, t in weights().items()},
    )
    assert found["eighth"].dtype == torch.float8_e4m3fn


def test_transformers_reads_what_is_written(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "hf")
    with open_foreign(tmp_path / "hf") as source:
        # All names begin with "model.", which is of the model itself.
        assert "model.embed_tokens.weight" in source.specs
        assert source.notes == []
        convert(source, tmp_path / "dcp", "dcp")
        convert(source, tmp_path / "half", "transformers", dtype="bf16", shard_size=500)
        convert(source, tmp_path / "own", "parallax")
    for name, dtype in (("half", torch.bfloat16), ("own", torch.float32)):
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / name)
        assert again.dtype == dtype
        for one, other in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one.to(dtype), other)
    assert same(read(tmp_path / "dcp"), read(tmp_path / "hf"))


def test_what_cannot_be_is_said_at_once(tmp_path: Path) -> None:
    torch.save(weights(), tmp_path / "a.pt")
    with open_foreign(tmp_path / "a.pt") as source, pytest.raises(CheckpointError) as error:
        convert(source, tmp_path / "out", "onnx", dtype="int3", buffers="run*", shard_size="big")  # type: ignore[arg-type]
    assert str(error.value) == (
        "4 faults:\n\n"
        "1. convert was given the format 'onnx'.\n\nGive one of transformers, dcp, parallax.\n\n"
        "2. convert was given the dtype 'int3'.\n\nGive one of fp64, fp32, fp16, bf16.\n\n"
        "3. convert was given the shard size 'big'.\n\nGive bytes, such as 1073741824 or '1GiB'."
        f"\n\n4. convert was told that 'run*' are buffers, and of {tmp_path / 'a.pt'} no name "
        "matches: layers.0.weight, layers.0.bias, head.weight, scale and 2 more.\n\n"
        "Give a pattern such as '*.running_*'."
    )
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_a_failing_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(weights(), tmp_path / "a.pt")

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with open_foreign(tmp_path / "a.pt") as source, pytest.raises(CheckpointError) as error:
        convert(source, tmp_path / "out", "parallax")
    assert str(error.value) == (
        f"{tmp_path / 'a.pt'} cannot be converted to {tmp_path / 'out'}: [Errno 28] No space left "
        "on device.\n\nCheck that the path is writable and has room. Nothing was left there."
    )
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


class Counted(Source):
    """Makes a tensor each time it is asked, and knows the most that were alive together."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "made up")
        self.specs = {f"w{i}": Spec("float32", (64, 64)) for i in range(20)}
        self.alive = self.most = 0

    def block(self, name: str, box: Box | None = None) -> torch.Tensor:
        tensor = torch.full((64, 64), float(name[1:]))
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(tensor.untyped_storage(), self.gone)
        return tensor

    def gone(self) -> None:
        self.alive -= 1

    def close(self) -> None:
        pass


@pytest.mark.parametrize("to", ["transformers", "dcp", "parallax"])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_few_tensors_are_in_memory(to: Any, dtype: str | None, tmp_path: Path) -> None:
    source = Counted(tmp_path / "none")
    convert(source, tmp_path / "out", to, dtype=dtype)
    assert source.most <= 2
    found = read(tmp_path / "out")
    assert {name: t[0, 0].item() for name, t in found.items()} == {
        f"w{i}": float(i) for i in range(20)
    }
