"""Weights in each of the formats that are read, as the programs of others write them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from parallax import CheckpointError
from parallax.checkpoint.foreign import open_foreign
from parallax.testing import toys


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "layers.0.weight": torch.randn(7, 5),
        "layers.0.bias": torch.randn(7),
        "head.weight": torch.randn(3, 7).bfloat16(),
        "scale": torch.randn(()),
        "empty": torch.randn(0, 4),
        "counts": torch.arange(5),
    }


def read(path: Path, prefix: str | None = None) -> dict[str, torch.Tensor]:
    with open_foreign(path, prefix=prefix) as source:
        return {name: source.block(name).clone() for name in source.specs}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        a.dtype == other[n].dtype and a.shape == other[n].shape and torch.equal(a, other[n])
        for n, a in one.items()
    )


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        open_foreign(path, **options)
    return str(error.value)


def save_dcp(state: dict[str, Any], path: Path, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(state, checkpoint_id=path, no_dist=True, **options)


def load_dcp(path: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: torch.full_like(t, 7) for name, t in like.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=path, no_dist=True)
    return found


def sharded(folder: Path, suffix: str, index: str, save: Any) -> Path:
    """Files as ColossalAI's booster.save_model(shard=True) names them."""
    folder.mkdir()
    names, places = list(weights()), {}
    for number, part in enumerate((names[:2], names[2:]), 1):
        file = (
            f"{suffix.split('.', maxsplit=1)[0]}-{number:05d}.{suffix.rsplit('.', maxsplit=1)[-1]}"
        )
        save({n: weights()[n] for n in part}, folder / file)
        places |= dict.fromkeys(part, file)
    said = {"metadata": {"total_size": 0.1}, "weight_map": places}
    (folder / index).write_text(json.dumps(said))
    return folder


def colossal_bin(folder: Path) -> Path:
    sharded(folder, "pytorch_model.bin", "pytorch_model.bin.index.json", torch.save)
    torch.save([1], folder / "pytorch_optim_group.bin")
    (folder / "pytorch_optim.bin.index.json").write_text('{"weight_map": {}}')
    return folder


def colossal_safetensors(folder: Path) -> Path:
    return sharded(folder, "model.safetensors", "model.safetensors.index.json", save_file)


def colossal_prefixed_index(folder: Path) -> Path:
    return sharded(folder, "model.safetensors", "model.safetensors.index.mine.json", save_file)


def prefixed_bin(folder: Path) -> Path:
    folder.mkdir()
    torch.save(weights(), folder / "pytorch_model.mine.bin")
    return folder


def prefixed_safetensors(folder: Path) -> Path:
    folder.mkdir()
    save_file(weights(), folder / "model.mine.safetensors")
    return folder


def fsdp_full(folder: Path) -> Path:
    folder.mkdir()
    moments = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}
    torch.save({"model": weights(), "optimizer": moments, "step": 3}, folder / "full.pt")
    return folder / "full.pt"


def fsdp_full_flat(folder: Path) -> Path:
    folder.mkdir()
    state = nn.ParameterDict({"w": torch.ones(1)}).state_dict()  # an OrderedDict with _metadata
    state.update({f"_orig_mod.module.{name}": tensor for name, tensor in weights().items()})
    del state["w"]
    torch.save(state, folder / "full.pt")
    return folder


def dcp_nested(folder: Path) -> Path:
    moments = {"state": {"w": {"exp_avg": torch.ones(3)}}}
    save_dcp({"app": {"model": weights(), "optim": moments}, "step": 3}, folder)
    return folder


def dcp_flat(folder: Path) -> Path:
    save_dcp(weights(), folder)
    return folder


def dcp_unflattened(folder: Path) -> Path:
    """Without the planner's word on which keys led to a tensor."""
    state = {f"model.{name}": t for name, t in weights().items()} | {"optim.x": torch.ones(2)}
    save_dcp(state, folder, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    return folder


FORMS = [
    colossal_bin,
    colossal_safetensors,
    colossal_prefixed_index,
    prefixed_bin,
    prefixed_safetensors,
    fsdp_full,
    fsdp_full_flat,
    dcp_nested,
    dcp_flat,
    dcp_unflattened,
]


def save_fsdp(directory: str) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model = toys.Mlp()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    state, moments = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": moments}, checkpoint_id=directory)
    whole: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return whole
