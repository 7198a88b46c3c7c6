"""A model directory for transformers and others: weights, configuration and tokenizer."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from parallax.checkpoint.content import content
from parallax.checkpoint.folder import place
from parallax.checkpoint.layout import Spec
from parallax.checkpoint.save import SHARD, limit_of, write_out
from parallax.checkpoint.together import Ranks
from parallax.core.boosted import Boosted
from parallax.errors import CheckpointError

TOKENIZER = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
)
"""The files that transformers' tokenizers and processors are made from."""


def export(
    boosted: Boosted,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    tokenizer: Any = None,
    shard_size: int | str = SHARD,
) -> Path:
    """Write a directory from which transformers makes the model; collective over all ranks.

    It holds safetensors files (with `model.safetensors.index.json` when there are several), the
    `config.json` and `generation_config.json` of a model of transformers, tokenizer files if given,
    and an `index.json` with checksums for `parallax inspect`. Tied weights are written once. Inside
    `boosted.averaged()` the averages are exported.

    Args:
        boosted: The pair.
        directory: Where to; an older checkpoint or export there is replaced once all is written.
        dtype: What floating-point parameters become, such as `torch.bfloat16` or `"bf16"`; as they
            are by default. Buffers stay as they are.
        tokenizer: A tokenizer or processor (anything with `save_pretrained`), or a directory whose
            tokenizer files are copied.
        shard_size: Bytes of tensors in one file.

    Returns:
        The directory.

    Raises:
        CheckpointError: An argument is none of these, or it cannot be written; on every rank, and
            what was there stays.

    Cost:
        Each rank writes its own slices, with a chunk (about 4 MiB) of host memory.

    Example:
        >>> boosted.export("model", dtype="bf16", tokenizer=tokenizer)  # doctest: +SKIP
    """
    ranks = Ranks()
    target = place(directory)
    limit = ranks.do(lambda: limit_of("export", shard_size))
    wanted = ranks.do(lambda: _dtype(dtype))
    mine = ranks.do(lambda: content(boosted, ("params", "buffers")), "the model cannot be exported")
    if wanted is not None:
        for number, row in enumerate(mine.rows):
            if row.key.startswith("params/") and getattr(torch, row.spec.dtype).is_floating_point:
                mine.rows[number] = row._replace(spec=Spec(wanted, row.spec.shape))
    if ranks.rank == 0 and "config.json" in mine.texts:
        mine.texts["config.json"] = _told(mine.texts["config.json"], mine.rows)
    found = ranks.do(lambda: _tokenizer(tokenizer) if ranks.rank == 0 else {}, "the tokenizer")
    mine.texts |= found
    write_out(ranks, target, mine, limit)
    return target


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def _dtype(given: torch.dtype | str | None) -> str | None:
    if given is None:
        return None
    name = str(given).removeprefix("torch.")
    name = _SHORT.get(name, name)
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CheckpointError(
            f"export was given dtype={given!r}.\n\nGive a floating-point dtype, such as "
            f"torch.bfloat16, or one of {', '.join(_SHORT)}."
        )
    return name


def _told(config: bytes, rows: list[Any]) -> bytes:
    """A configuration that speaks of the dtype of the weights beside it."""
    told = json.loads(config)
    floating = [
        row.spec.dtype
        for row in rows
        if row.key.startswith("params/") and getattr(torch, row.spec.dtype).is_floating_point
    ]
    if floating:
        # transformers 5 reads "dtype", those before "torch_dtype".
        key = "torch_dtype" if "torch_dtype" in told and "dtype" not in told else "dtype"
        told[key] = max(set(floating), key=floating.count)
    return (json.dumps(told, indent=2, sort_keys=True) + "\n").encode()


def _tokenizer(given: Any) -> dict[str, bytes]:
    if given is None:
        return {}
    if callable(getattr(given, "save_pretrained", None)):
        with tempfile.TemporaryDirectory() as folder:
            given.save_pretrained(folder)
            return {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir()) if p.is_file()}
    folder = Path(given) if isinstance(given, str | os.PathLike) else None
    files = {p for pattern in TOKENIZER for p in folder.glob(pattern)} if folder else set()
    if not files:
        raise CheckpointError(
            f"export was given tokenizer={given!r}, which is neither a tokenizer nor a directory "
            f"with files of one ({', '.join(TOKENIZER)}).\n\nGive the tokenizer itself, or the "
            "directory it was loaded from."
        )
    return {p.name: p.read_bytes() for p in sorted(files) if p.is_file()}
