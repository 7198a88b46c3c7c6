"""What may be said about a model's blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from parallax.core.fact import Fact

Keep = Literal["matmuls"]
Which = tuple[Literal["fraction", "every", "budget"], float | int]


@dataclass(frozen=True)
class Recomputation(Fact):
    """Which units give up their activations after the forward and compute them again.

    Attributes:
        which: One answer to one question, so that two different ones are a conflict: a fraction of
            the units, every n-th, or as many as a budget of bytes asks for. Unsaid: all.
        keep: Results of operations that recomputed units keep all the same.
        offload: Whether the inputs of recomputed units wait for the backward in host memory.
        units: Class names or name patterns of the units.
    """

    which: Which | None = None
    keep: Keep | None = None
    offload: bool | None = None
    units: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Compilation(Fact):
    """How units are compiled.

    Attributes:
        backend: Name of the compiler; unsaid: inductor.
        mode: What inductor aims at.
        fullgraph: Whether a unit that is not one graph is an error.
        dynamic: Whether sizes are symbols from the first call on (True), never (False), or once
            they were seen to change (unsaid).
        units: Class names or name patterns of the units.
    """

    backend: str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    units: tuple[str, ...] | None = None
