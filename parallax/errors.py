"""The errors parallax raises: what was asked, what was found, what to do.

Every error is a `ParallaxError`, which is a `ValueError`: the call did nothing, the arguments or
the surroundings have to change. Errors that concern a whole world carry the same text on every
rank.
"""

from __future__ import annotations

from collections.abc import Iterable


class ParallaxError(ValueError):
    """Base of all errors raised by parallax."""


class ConflictError(ParallaxError):
    """Two transforms state different values for the same thing."""


class MeshError(ParallaxError):
    """Mesh axes and the number of running ranks do not fit."""


class RuleError(ParallaxError):
    """A model and the rules for it (tensor-parallel styles, units, patterns) do not fit."""


class RenameError(ParallaxError):
    """A rewrite broke the name law: a parameter's original full name was changed or lost."""


class CheckpointError(ParallaxError):
    """A checkpoint is missing, damaged, or does not fit the model."""


class OptimizerError(ParallaxError):
    """An optimizer does not fit the model or the way its parameters are laid out."""


class DataError(ParallaxError):
    """A dataset, batch or batch size does not fit the data axes."""


class LaunchError(ParallaxError):
    """The environment of the process does not describe a consistent world."""


class StepError(ParallaxError):
    """A training step was called in an order or with values that would train wrongly."""


def gather_faults(faults: Iterable[ParallaxError]) -> tuple[str, str]:
    """The kind and the text of the error that `raise_all` would raise; empty without faults."""
    try:
        raise_all(faults)
    except ParallaxError as fault:
        return type(fault).__name__, str(fault)
    return "", ""


def raise_found(found: list[tuple[str, str]]) -> None:
    """Raise what the ranks of a world found: one kind and one text on all of them.

    Args:
        found: Kind and text of each rank, in rank order; empty strings where nothing was found.

    Raises:
        ParallaxError: Of the first kind found. When the ranks found different things, each text is
            given with its rank.
    """
    kinds = [kind for kind, _ in found if kind]
    if not kinds:
        return
    kind = next((k for k in _all_kinds() if k.__name__ == kinds[0]), ParallaxError)
    if len(set(found)) == 1:
        raise kind(found[0][1])
    raise kind("\n".join(f"rank {rank}: {text}" for rank, (_, text) in enumerate(found) if text))


def _all_kinds() -> list[type[ParallaxError]]:
    kinds, frontier = [ParallaxError], list(ParallaxError.__subclasses__())
    while frontier:
        kinds.append(frontier.pop())
        frontier += kinds[-1].__subclasses__()
    return kinds


def raise_all(faults: Iterable[ParallaxError]) -> None:
    """Raise one error that lists every fault, of the kind of the first one.

    Args:
        faults: Errors made but not yet raised. Nothing happens when there are none.

    Raises:
        ParallaxError: The only fault itself, or an error of the first fault's kind with all texts.

    Example:
        >>> raise_all([])
        >>> raise_all([MeshError("a"), RuleError("b")])
        Traceback (most recent call last):
            ...
        parallax.errors.MeshError: 2 faults:
        <BLANKLINE>
        1. a
        <BLANKLINE>
        2. b
    """
    found = list(faults)
    if not found:
        return
    if len(found) == 1:
        raise found[0]
    lines = "\n\n".join(f"{i}. {fault}" for i, fault in enumerate(found, start=1))
    raise type(found[0])(f"{len(found)} faults:\n\n{lines}")
