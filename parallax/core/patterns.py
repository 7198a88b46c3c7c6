"""Name patterns: how rules and units point at modules and parameters."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import lru_cache


@lru_cache(maxsize=4096)
def _regex(pattern: str) -> re.Pattern[str]:
    parts = {"**": r".+", "*": r"[^.]+"}
    return re.compile("".join(parts.get(t, re.escape(t)) for t in re.split(r"(\*\*|\*)", pattern)))


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern names a dotted name: `*` stands within one segment, `**` for any.

    Example:
        >>> matches("blocks.*.attn.q", "blocks.11.attn.q"), matches("blocks.*", "blocks.1.mlp")
        (True, False)
        >>> matches("**.q", "encoder.blocks.1.q")
        True
    """
    return _regex(pattern).fullmatch(name) is not None


def nearest(pattern: str, names: Iterable[str], most: int = 3) -> list[str]:
    """The names a mistyped pattern most likely meant, numbers written as `*`."""
    shapes = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names))
    return difflib.get_close_matches(pattern, shapes, n=most, cutoff=0.4) or shapes[:most]
