"""State of any object as JSON and tensors: what stands in for pickle.

JSON has lists, texts, numbers, truth values and null. A dict is written as a row of pairs, since
keys need not be text; tuples, counters and bytes are tagged by their kind; a tensor is replaced by
the number under which it is kept beside.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallax.errors import CheckpointError

_DICTS = {dict: "dict", OrderedDict: "dict", Counter: "Counter"}
_LISTS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_MAKE: dict[str, Any] = {
    "dict": dict,
    "Counter": Counter,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "bytes": bytes.fromhex,
}


def plain(value: Any, where: str, tensors: list[Tensor] | None = None) -> Any:
    """A value as JSON holds it.

    Args:
        value: Any tree of plain values and tensors.
        where: What it is, for the message: `"CosineAnnealingLR"`.
        tensors: The tensors found are added here, in order; None refuses them, but for single
            numbers.

    Raises:
        CheckpointError: It holds something of another kind, which is named by its place.

    Example:
        >>> plain({"a": (1, 2)}, "it")
        {'dict': [['a', {'tuple': [1, 2]}]]}
        >>> back(plain({"a": (1, 2)}, "it"))
        {'a': (1, 2)}
    """
    kind: Any = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, Tensor) and not isinstance(value, DTensor):
        if tensors is not None:
            tensors.append(value.detach())
            return {"tensor": len(tensors) - 1}
        if value.ndim == 0:
            return {"number": [value.item(), str(value.dtype).removeprefix("torch.")]}
    if kind is list:
        return [plain(v, f"{where}[{i}]", tensors) for i, v in enumerate(value)]
    if kind in _LISTS:
        rows = sorted(value) if isinstance(value, set | frozenset) else value
        return {_LISTS[kind]: [plain(v, f"{where}[{i}]", tensors) for i, v in enumerate(rows)]}
    if isinstance(value, deque):
        return {"deque": [plain([*value], where, tensors), value.maxlen]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if kind in _DICTS and isinstance(value, dict):
        rows = [[plain(k, where), plain(v, f"{where}.{k}", tensors)] for k, v in value.items()]
        return {_DICTS[kind]: rows}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a number of numpy
        return plain(value.item(), where, tensors)
    raise CheckpointError(
        f"the state holds {where}, a {kind.__name__}, which is no plain value.\n\nLet its "
        "state_dict() hold numbers, text, tensors, and lists, tuples, sets and dicts of them only; "
        "give the rest again when the object is made."
    )


def back(value: Any, tensors: Sequence[Tensor] = ()) -> Any:
    """What `plain` was given.

    Raises:
        ValueError: It is nothing that `plain` makes.
    """
    if isinstance(value, list):
        return [back(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError(f"{sorted(value)} is no tag")
    ((kind, rows),) = value.items()
    if kind == "tensor":
        return tensors[int(rows)]
    if kind == "number":
        return torch.tensor(rows[0], dtype=getattr(torch, rows[1]))
    if kind == "deque":
        return deque(back(rows[0], tensors), rows[1])
    if kind in ("dict", "Counter"):
        return _MAKE[kind]({back(k): back(v, tensors) for k, v in rows})
    if kind not in _MAKE:
        raise ValueError(f"{kind!r} is no tag")
    return _MAKE[kind](rows if kind == "bytes" else [back(v, tensors) for v in rows])
