"""Which units are recomputed: pure functions of counts and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


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
