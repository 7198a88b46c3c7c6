"""Functions named now and imported when first called."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Late:
    """A function by its address, so that stating a composition does not import what carries it out.

    DTensor and FSDP2 bring sympy and much else: half of torch's own import time, which a program
    that only plans, parses or prints compositions need not pay.

    Attributes:
        path: `"module:function"`.

    Example:
        >>> Late("math:gcd")(12, 18)
        6
    """

    path: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Import the function and call it."""
        module, _, name = self.path.partition(":")
        return getattr(importlib.import_module(module), name)(*args, **kwargs)
