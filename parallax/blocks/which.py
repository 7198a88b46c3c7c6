"""Which units are recomputed: pure functions of counts and bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
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


def spread(count: int, fraction: float) -> list[int]:
    """A fraction of so many units, spread evenly; at least one.

    Example:
        >>> spread(4, 0.5), spread(5, 0.5), spread(3, 0.1), spread(3, 1.0)
        ([0, 2], [0, 2, 4], [0], [0, 1, 2])
    """
    # In exact numbers of the decimal that was written: 10 * 0.1 is one unit, not two.
    share = Fraction(str(fraction))
    return [i for i in range(count) if -(-i * share // 1) < -(-(i + 1) * share // 1)]


def need(held: Sequence[int], inputs: Sequence[int], recomputed: set[int]) -> int:
    """The most bytes that units keep at any time of a step.

    At the end of the forward every unit keeps what it holds, a recomputed one its inputs. In
    backward order a recomputed unit holds everything again while it runs, and later ones nothing.

    Args:
        held: What each unit holds when it is not recomputed, in forward order.
        inputs: What each unit holds when it is.
        recomputed: Places of the recomputed units.

    Example:
        >>> need([10, 10, 10], [1, 1, 1], {0, 1, 2}), need([10, 10, 10], [1, 1, 1], {0})
        (12, 21)
    """
    most, before = 0, 0
    for i, (all_of_it, given) in enumerate(zip(held, inputs, strict=True)):
        most = max(most, before + all_of_it)
        before += given if i in recomputed else all_of_it
    return max(most, before)


def fit(held: Sequence[int], inputs: Sequence[int], budget: int) -> set[int] | None:
    """The units to recompute so that the rest fits a budget; None when nothing fits.

    The last units are the first to be spared: their activations are the first to go in the
    backward, and sparing the very last costs no memory at all.

    Example:
        >>> fit([10, 10, 10], [1, 1, 1], 21), fit([10, 10, 10], [1, 1, 1], 11)
        ({0}, None)
    """
    chosen = set(range(len(held)))
    if need(held, inputs, chosen) > budget:
        return None
    for i in reversed(range(len(held))):
        if need(held, inputs, chosen - {i}) <= budget:
            chosen.discard(i)
    return chosen
