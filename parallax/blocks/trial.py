"""What each unit would keep for its backward, measured by running it once more."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from parallax.blocks.lower import Before, Unit
from parallax.core.slices import local


class Trial:
    """Measures units, each once; needs no more memory than one unit's activations.

    Args:
        offloaded: Whether inputs wait in host memory, where they do not count.

    Attributes:
        held: Bytes that a unit keeps when it is not recomputed, by name.
        inputs: Bytes that it keeps when it is.
    """

    def __init__(self, *, offloaded: bool) -> None:
        self.held: dict[str, int] = {}
        self.inputs: dict[str, int] = {}
        self._offloaded = offloaded
        # Weak, so that nothing lives longer; a weak reference's address is not given out again, so
        # that a mask which every unit is given is known again, and counted once.
        self._seen: tuple[set[StorageWeakRef], set[StorageWeakRef]] = (set(), set())

    def measure(self, unit: Unit, args: Any, kwargs: Any) -> None:
        """Run a unit on inputs cut from the graph; leave random streams and buffers alone."""
        if unit.name in self.held:
            return
        call: Any = (args, kwargs)
        given = [x for x in optree.tree_leaves(call) if isinstance(x, Tensor)]
        saved: list[Tensor] = []
        before = Before(unit.module)
        devices = sorted({x.device.index or 0 for x in given if x.is_cuda})
        cut: Any = optree.tree_map(_detached, call, none_is_leaf=True)

        def note(x: Tensor) -> Tensor:
            saved.append(x)
            return x

        with (
            torch.random.fork_rng(devices),
            before.replay(),
            saved_tensors_hooks(note, lambda x: x),
        ):
            out = unit.forward(*cut[0], **cut[1])
        own = {_storage(x)[0] for x in (*unit.module.parameters(), *unit.module.buffers())}
        self.held[unit.name] = _bytes(saved, own | self._seen[0], self._seen[0])
        waiting = [x for x in given if not (self._offloaded and x.requires_grad)]
        self.inputs[unit.name] = _bytes(waiting, own | self._seen[1], self._seen[1])
        del out


def _detached(x: Any) -> Any:
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def _storage(x: Tensor) -> tuple[StorageWeakRef, int]:
    storage = local(x.detach()).untyped_storage()
    return StorageWeakRef(storage), storage.nbytes()


def _bytes(tensors: list[Tensor], skip: set[StorageWeakRef], seen: set[StorageWeakRef]) -> int:
    """Bytes of distinct storages, but for some; they are noted as seen."""
    found = {key: size for key, size in map(_storage, tensors) if key not in skip}
    seen.update(found)
    return sum(found.values())
