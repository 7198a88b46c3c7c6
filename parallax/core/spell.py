"""How transforms are written: spellings that evaluate to themselves, and checks of arguments."""

from __future__ import annotations

from typing import Any


def spell(name: str, *args: Any, **options: Any) -> str:
    """The call that makes a transform, leaving out what was not given.

    Example:
        >>> spell("zero", 2, degree=None, units=("blocks.*",))
        "zero(2, units=('blocks.*',))"
    """
    parts = [repr(a) for a in args if a is not None]
    parts += [f"{key}={value!r}" for key, value in options.items() if value is not None]
    return f"{name}({', '.join(parts)})"


def degree_fault(name: str, degree: Any) -> None:
    """Raise unless a degree is None or a positive whole number."""
    good = degree is None or (
        isinstance(degree, int) and not isinstance(degree, bool) and degree > 0
    )
    if not good:
        raise ValueError(
            f"{name} was given the degree {degree!r}. A degree is a whole number of ranks, 1 or "
            "more, and a factor of the number of ranks that run."
        )


def one_of(name: str, what: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise unless a value is one of the choices."""
    if value not in choices or isinstance(value, bool):
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{name} was given {what}={value!r}. Choose one of {listed}.")


def names_of(name: str, what: str, given: Any) -> tuple[str, ...] | None:
    """Modules as one names them: by pattern, class name or class, one or several.

    Example:
        >>> names_of("zero", "units", "blocks.*")
        ('blocks.*',)
    """
    if given is None:
        return None
    rows = given if isinstance(given, tuple | list) else (given,)
    if not rows or not all(isinstance(row, str | type) for row in rows):
        raise ValueError(
            f"{name} was given {what}={given!r}. Give a name pattern such as 'blocks.*', the "
            "name of "
            "a class or a class, or several in a tuple."
        )
    return tuple(row if isinstance(row, str) else row.__name__ for row in rows)
