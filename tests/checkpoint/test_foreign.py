"""Every format is read by name; damage is named; what asks to run code is refused."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from parallax import CheckpointError
from parallax.checkpoint.foreign import open_foreign
from parallax.checkpoint.layout import Spec
from parallax.core.slices import Box
from parallax.testing import pool
from tests.checkpoint.forms import (
    FORMS,
    colossal_bin,
    colossal_safetensors,
    dcp_flat,
    read,
    refusal,
    same,
    save_fsdp,
    weights,
)

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("form", FORMS)
def test_each_format_is_read(form: Any, tmp_path: Path) -> None:
    path = form(tmp_path / "source")
    assert same(read(path), weights())
    with open_foreign(path) as source:
        assert source.specs["layers.0.weight"] == Spec("float32", (7, 5))
        box = Box((2, 1), (3, 4))
        assert torch.equal(
            source.block("layers.0.weight", box), weights()["layers.0.weight"][2:5, 1:]
        )


def test_what_is_mapped_is_not_copied(tmp_path: Path) -> None:
    tensor = torch.arange(1 << 20)
    torch.save({"w": tensor}, tmp_path / "a.bin")
    save_file({"w": tensor}, tmp_path / "a.safetensors")
    for name in ("a.bin", "a.safetensors"):
        with open_foreign(tmp_path / name) as source:
            assert source.block("w").data_ptr() == source.block("w").data_ptr()
            assert torch.equal(source.block("w", Box((9,), (2,))), torch.tensor([9, 10]))


# -- names -----------------------------------------------------------------------------------------


def notes(path: Path, prefix: str | None = None) -> tuple[list[str], list[str]]:
    with open_foreign(path, prefix=prefix) as source:
        return list(source.specs), source.notes


def test_the_prefix_is_found_given_or_left(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"module.model.w": torch.ones(2), "module.model.b": torch.ones(2)}, path)
    assert notes(path) == (
        ["model.w", "model.b"],
        [
            (
                "2 names begin with 'module.', which was taken off; --prefix '' leaves them as "
                "they are."
            ),
            (
                "all 2 names begin with 'model.'; if that is not of the model itself, --prefix "
                "module.model. takes it off."
            ),
        ],
    )
    assert notes(path, "module.model.") == (["w", "b"], [])
    assert notes(path, "") == (["module.model.w", "module.model.b"], [])
    assert notes(path, "module.model.w"[:-1]) == (["w", "b"], [])
    assert refusal(path, prefix="app.") == (
        f"names with the prefix 'app.' were asked for from {path}; its 2 names are module.model.w, "
        "module.model.b.\n\nGive a prefix that they begin with, or '' to leave them as they are."
    )
    assert refusal(path, prefix="module.model.w") == (
        f"the prefix 'module.model.w' is the whole name of a tensor in {path}, so that none would "
        "be left.\n\nGive a shorter one."
    )


def test_a_prefix_of_some_names_stays(tmp_path: Path) -> None:
    torch.save({"module.w": torch.ones(2), "b": torch.ones(2)}, tmp_path / "a.pt")
    assert notes(tmp_path / "a.pt") == (["module.w", "b"], [])


def test_two_models_are_not_guessed_between(tmp_path: Path) -> None:
    both = {"model": weights(), "state_dict": weights()}
    torch.save(both, tmp_path / "a.pt")
    assert refusal(tmp_path / "a.pt") == (
        f"the model's part of {tmp_path / 'a.pt'} was asked for; its tensors lie under model, "
        "state_dict, and 'model' and 'state_dict' may be it.\n\nSay which with --prefix, such as "
        "--prefix model."
    )
    assert same(read(tmp_path / "a.pt", "state_dict."), weights())


def test_an_unknown_nest_is_not_guessed(tmp_path: Path) -> None:
    torch.save({"net": weights(), "ema": weights(1)}, tmp_path / "a.pt")
    assert refusal(tmp_path / "a.pt") == (
        f"the model's part of {tmp_path / 'a.pt'} was asked for; its tensors lie under ema, net, "
        "and none of the known names may be it.\n\nSay which with --prefix, such as --prefix ema."
    )
    assert same(read(tmp_path / "a.pt", "ema."), weights(1))


# -- what asks to run code -------------------------------------------------------------------------


class Evil:
    """Leaves a mark when it is unpickled by an unpickler that lets it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def test_the_planted_pickle_would_run_code(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Evil(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_a_malicious_file_of_torch_is_refused(name: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "evil": Evil(tmp_path / "mark")}, tmp_path / name)
    assert refusal(tmp_path) == (
        f"{tmp_path / name} is refused: it asks for posix.system, and only tensors and plain "
        "values are read from such files. None of it was run.\n\nIf it comes from a source you "
        "trust, load it there and save model.state_dict() again, best as safetensors."
    )
    assert not (tmp_path / "mark").exists()


def metadata_of(path: Path) -> Any:
    return pickle.loads((path / ".metadata").read_bytes())


def refused_metadata(path: Path, planted: Any, protocol: int = 4) -> str:
    (path / ".metadata").write_bytes(pickle.dumps(planted, protocol))
    return refusal(path)


@pytest.mark.parametrize("protocol", range(2, 6))  # those before name copyreg
def test_a_malicious_metadata_is_refused(protocol: int, tmp_path: Path) -> None:
    path = dcp_flat(tmp_path / "dcp")
    told = metadata_of(path)
    told.planner_data = {"w": Evil(tmp_path / "mark")}
    assert refused_metadata(path, told, protocol) == (
        f"{path / '.metadata'} is refused: it asks for posix.system, and the metadata of a DCP "
        "checkpoint needs nothing of the kind. None of it was run.\n\nThe file is no such "
        "metadata, or made to do harm: do not open it by other means."
    )
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "name",
    [
        "builtins.eval",
        "builtins.getattr",
        "torch.load",
        "torch.serialization.load",
        "torch.distributed.checkpoint.metadata.os.system",
        "torch.distributed.checkpoint.metadata.field",
        "torch.Size.__class__",
        "pathlib.os.system",
    ],
)
def test_a_metadata_may_name_what_is_listed_only(name: str, tmp_path: Path) -> None:
    path = dcp_flat(tmp_path / "dcp")
    module, _, inner = name.rpartition(".")
    if module not in ("builtins", "torch", "torch.serialization"):
        module, inner = {
            "torch.distributed.checkpoint.metadata.os": (module[:-3], "os.system"),
            "torch.Size": ("torch", "Size.__class__"),
            "pathlib.os": ("pathlib", "os.system"),
        }.get(module, (module, inner))
    text = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode()
    text += b"\x8c" + bytes([len(inner)]) + inner.encode() + b"\x93."
    (path / ".metadata").write_bytes(text)
    assert refusal(path).startswith(
        f"{path / '.metadata'} is refused: it asks for {module}.{inner}, and the metadata "
    )


def test_a_metadata_cannot_change_the_classes_of_others(tmp_path: Path) -> None:
    """BUILD sets attributes of whatever is named, so that classes must be made for one file."""
    good = dcp_flat(tmp_path / "good")
    bad = dcp_flat(tmp_path / "bad")
    where = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
    (bad / ".metadata").write_bytes(
        b"\x80\x04" + where + b"N}\x8c\x08__hash__" + where + b"s\x86b."
    )
    refusal(bad)
    assert same(read(good), weights())
    assert isinstance(hash(dcp.metadata.MetadataIndex("w")), int)


def test_a_malicious_chunk_is_refused(tmp_path: Path) -> None:
    path = dcp_flat(tmp_path / "dcp")
    torch.save(Evil(tmp_path / "mark"), tmp_path / "evil")
    told = metadata_of(path)
    data = (tmp_path / "evil").read_bytes()
    file = path / "__0_0.distcp"
    start = file.stat().st_size
    with file.open("ab") as out:
        out.write(data)
    for index, info in told.storage_data.items():
        if index.fqn == "scale":
            info.offset, info.length = start, len(data)
    (path / ".metadata").write_bytes(pickle.dumps(told))
    with open_foreign(path) as source, pytest.raises(CheckpointError) as error:
        source.block("scale")
    assert str(error.value).startswith(
        f"scale cannot be read from {file}: Weights only load failed."
    )
    assert str(error.value).endswith("\n\nThe file is damaged; load another checkpoint.")
    assert not (tmp_path / "mark").exists()


def test_a_metadata_that_points_outside_is_refused(tmp_path: Path) -> None:
    path = dcp_flat(tmp_path / "dcp")
    told = metadata_of(path)
    for info in told.storage_data.values():
        info.relative_path = "../secret"
    assert refused_metadata(path, told) == (
        f"the metadata {path / '.metadata'} cannot be read: ValueError: the file name '../secret' "
        "leaves the directory.\n\nThe file is damaged, or of another version of torch; load another"
        " checkpoint."
    )


def test_an_index_that_points_outside_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text('{"weight_map": {"w": "../secret.bin"}}')
    assert refusal(tmp_path) == (
        f"the index {index} cannot be read: ValueError: a file name in its weight_map leaves the "
        'directory.\n\nIt should be JSON with a "weight_map" of file names by tensor; load another '
        "checkpoint."
    )


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("planted", [b"", b"nothing", b"\x80\x04N.", b"\x80\x04]."])
def test_a_damaged_metadata_is_named(planted: bytes, tmp_path: Path) -> None:
    path = dcp_flat(tmp_path / "dcp")
    (path / ".metadata").write_bytes(planted)
    text = refusal(path)
    assert text.startswith(f"the metadata {path / '.metadata'} cannot be read: ")
    assert text.endswith(
        "\n\nThe file is damaged, or of another version of torch; load another checkpoint."
    )


def test_missing_and_short_files_of_dcp_are_named(tmp_path: Path) -> None:
    pool(2).run(save_fsdp, str(tmp_path / "fsdp"))
    path = tmp_path / "fsdp"
    (path / "__1_0.distcp").unlink()
    short = path / "__0_0.distcp"
    size = short.stat().st_size
    short.write_bytes(short.read_bytes()[:-9])
    assert refusal(path) == (
        f"the DCP checkpoint {path} is not complete:\n  __0_0.distcp has {size - 9:,} of {size:,} "
        "bytes\n  __1_0.distcp is missing\n\nPut the files of all ranks into one directory, or "
        "load another checkpoint."
    )


def test_missing_shards_are_named(tmp_path: Path) -> None:
    path = colossal_safetensors(tmp_path / "a")
    (path / "model-00001.safetensors").unlink()
    text = refusal(path)
    assert text.startswith(
        f"the checkpoint {path / 'model.safetensors.index.json'} is missing files, or they are "
        "damaged:\n  model-00001.safetensors: No such file or directory"
    )
    assert text.endswith(
        "\n  what is there lacks layers.0.weight, layers.0.bias\n\n"
        "Put all of its files together, or load another checkpoint."
    )


def test_a_shard_that_lacks_a_tensor_is_named(tmp_path: Path) -> None:
    path = colossal_bin(tmp_path / "a")
    shutil.copy(path / "pytorch_model-00002.bin", path / "pytorch_model-00001.bin")
    assert refusal(path) == (
        f"the checkpoint {path / 'pytorch_model.bin.index.json'} is missing files, or they are "
        "damaged:\n  what is there lacks layers.0.weight, layers.0.bias\n\nPut all of its files "
        "together, or load another checkpoint."
    )


def test_a_damaged_file_of_torch_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save(weights(), path)
    path.write_bytes(path.read_bytes()[:200])
    text = refusal(path)
    assert text.startswith(f"{path} cannot be read: ")
    assert text.endswith(
        "\n\nIt is damaged, or not a file that torch.save has written since torch 1.6; load "
        "another checkpoint."
    )


def test_what_is_no_state_dict_is_named(tmp_path: Path) -> None:
    torch.save([torch.ones(2)], tmp_path / "a.pt")
    assert refusal(tmp_path / "a.pt") == (
        f"{tmp_path / 'a.pt'} holds a list; a dict of tensors by name was asked for.\n\n"
        "Save model.state_dict()."
    )


def test_what_is_unclear_or_unknown_is_said(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    assert refusal(tmp_path) == (
        f"a checkpoint was asked for in {tmp_path}, which holds notes.txt.\n\nGive a directory "
        "with an index.json of parallax, a .metadata of DCP, or a model's .safetensors or .bin "
        "files; or the path of one such file."
    )
    assert refusal(tmp_path / "notes.txt") == (
        f"a checkpoint was asked for in the file {tmp_path / 'notes.txt'}, whose name ends with "
        "'.txt'.\n\nGive a file that ends with .safetensors, .bin, .pt, .pth or .index.json, or a "
        "directory."
    )
    for name in ("one.bin", "two.bin"):
        torch.save({}, tmp_path / name)
    assert refusal(tmp_path) == (
        f"the model in {tmp_path} was asked for, and 2 files may be it: one.bin, two.bin.\n\n"
        "Give the path of one of them."
    )
