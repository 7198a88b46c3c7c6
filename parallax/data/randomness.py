"""Random streams of data, which depend on neither ranks, workers nor restarts."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_all(*numbers: int) -> None:
    """Seed the CPU's generators of torch, Python and (if imported) numpy from a row of numbers."""
    packed = struct.pack(f"<{len(numbers)}q", *(n % (1 << 62) for n in numbers))
    # Well mixed, because torch's CPU generator and numpy's look at 32 bits of a seed.
    seed = int.from_bytes(hashlib.blake2b(packed, digest_size=7).digest(), "little")
    # Not torch.manual_seed, which seeds the GPU too: what a model draws there is not the data's.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))


@contextmanager
def apart(*numbers: int) -> Iterator[None]:
    """A block with generators of its own, seeded from a row of numbers; those outside go on after.

    Only the CPU's generators are set, since data is made there; a GPU's go on through the block.
    """
    before, python = torch.get_rng_state(), random.getstate()
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    seed_all(*numbers)
    try:
        yield
    finally:
        torch.set_rng_state(before)
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)
