"""The model part of a directory as transformers writes it: what its files of text say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from parallax.checkpoint.files import Entry
from parallax.checkpoint.layout import MODEL

MODEL_INDEX = "model.safetensors.index.json"


def texts(model: nn.Module) -> dict[str, bytes]:
    """The files of text that let transformers make the model: by name, none for other models."""
    found = {}
    config: Any = getattr(model, "config", None)
    if _of_transformers(config):
        told: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
        told.setdefault("architectures", None)
        told["architectures"] = told["architectures"] or [own_class(model)]
        found["config.json"] = (json.dumps(told, indent=2, sort_keys=True) + "\n").encode()
    generation: Any = getattr(model, "generation_config", None)
    if _of_transformers(generation):
        found["generation_config.json"] = generation.to_json_string().encode()
    return found


def _of_transformers(config: object) -> bool:
    """Whether a configuration is one of transformers', not a thing of the user's of that name."""
    kinds = type(config).__mro__
    return any(kind.__module__.partition(".")[0] == "transformers" for kind in kinds)


def own_class(model: nn.Module) -> str:
    """The name of a model's class before `fully_shard` put one of its own in front."""
    kinds = [kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers.")]
    return (kinds or [type(model)])[0].__name__


def model_index(tensors: Mapping[str, Entry], prefix: str | None = None) -> dict[str, bytes]:
    """The index of the model's files as transformers reads it; nothing where there is one file."""
    model = {e.name: e for key, e in tensors.items() if key.split("/", 1)[0] in MODEL}
    if len({entry.file for entry in model.values()}) < 2:
        return {}
    said = {
        "metadata": {"total_size": sum(entry.spec.size for entry in model.values())},
        "weight_map": {name: entry.file for name, entry in model.items()},
    }
    name = MODEL_INDEX if prefix is None else f"model.safetensors.index.{prefix}.json"
    return {name: (json.dumps(said, indent=2, sort_keys=True) + "\n").encode()}
