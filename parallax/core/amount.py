"""Amounts of memory, as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

_SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZES |= {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def bytes_of(given: object) -> int | None:
    """A number of bytes, from a whole number or from text such as `"20GiB"`; None when neither.

    Example:
        >>> bytes_of("1.5GiB"), bytes_of("512 MiB"), bytes_of(7), bytes_of("lots")
        (1610612736, 536870912, 7, None)
    """
    if isinstance(given, int) and not isinstance(given, bool):
        return given if given > 0 else None
    found = (
        re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGT]?i?B)", given) if isinstance(given, str) else None
    )
    if found is None or found[2] not in _SIZES:
        return None
    return int(Fraction(found[1]) * _SIZES[found[2]]) or None


def shown(count: int) -> str:
    """A number of bytes for people.

    Example:
        >>> shown(1610612736), shown(999)
        ('1.50 GiB', '999 bytes')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count >= _SIZES[unit]:
            return f"{count / _SIZES[unit]:.2f} {unit}"
    return f"{count} bytes"
