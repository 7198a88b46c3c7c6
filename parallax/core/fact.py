"""Facts: what a transform states about a training run, and how statements are joined.

A fact is a frozen dataclass whose every field may be None, "unsaid". Two facts of one kind are
joined field by field: unsaid < value < conflict. The join is associative, commutative and
idempotent, which is why the order of transforms in a composition cannot matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from parallax.errors import ConflictError

if TYPE_CHECKING:
    from parallax.core.rewrite import Rewrite

F = TypeVar("F", bound="Fact")


@dataclass(frozen=True)
class Fact:
    """Base of all facts. Subclasses are frozen dataclasses; every field defaults to None.

    Field values must be hashable and have a `repr` that evaluates to themselves (numbers, text,
    tuples), since they end up in the plan, which is compared between ranks.

    Example:
        >>> from parallax.store.facts import Sharding
        >>> Sharding(stage=2)
        Sharding(stage=2)
    """

    def said(self) -> dict[str, Any]:
        """The fields that say something, by name."""
        pairs = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in pairs if value is not None}

    def without(self, names: Iterable[str]) -> Self:
        """The same fact with these fields unsaid."""
        return replace(self, **dict.fromkeys(names))

    def __repr__(self) -> str:
        body = ", ".join(f"{name}={value!r}" for name, value in self.said().items())
        return f"{type(self).__name__}({body})"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # dataclass(frozen=True) would write a repr that shows every unsaid field.
        super().__init_subclass__(**kwargs)
        cls.__repr__ = Fact.__repr__


class Claim(NamedTuple):
    """A fact, who stated it, and what carries it out.

    Attributes:
        by: The transform in the user's own spelling, for instance `"zero(2)"`.
        fact: What it states.
        rewrites: The rewrites it names.
    """

    by: str
    fact: Fact
    rewrites: tuple[Rewrite, ...] = ()


def join(claims: Iterable[Claim]) -> dict[type[Fact], Fact]:
    """Join claims into one fact a kind.

    Args:
        claims: Any number of claims, in any order.

    Returns:
        The joined fact by its type.

    Raises:
        ConflictError: Two claims give one field different values. All conflicts are listed.

    Example:
        >>> from parallax.core.axes import Axes
        >>> join([Claim("tp(2)", Axes(tp=2)), Claim("dp(4)", Axes(data_replicate=4))])
        {<class 'parallax.core.axes.Axes'>: Axes(data_replicate=4, tp=2)}
    """
    said: dict[tuple[type[Fact], str], dict[Any, set[str]]] = {}
    for by, fact, _ in claims:
        said.setdefault((type(fact), ""), {})
        for name, value in fact.said().items():
            said.setdefault((type(fact), name), {}).setdefault(value, set()).add(by)
    disputes = {key: values for key, values in said.items() if len(values) > 1}
    if disputes:
        raise ConflictError(_dispute_text(disputes))
    kinds = sorted({kind for kind, _ in said}, key=lambda kind: kind.__qualname__)
    return {
        kind: kind(**{f.name: next(iter(said.get((kind, f.name), {})), None) for f in fields(kind)})
        for kind in kinds
    }


def _dispute_text(disputes: dict[tuple[type[Fact], str], dict[Any, set[str]]]) -> str:
    lines: list[str] = []
    remedies: dict[str, None] = {}
    for (kind, name), values in sorted(
        disputes.items(), key=lambda item: (item[0][0].__qualname__, item[0][1])
    ):
        parties = sorted((min(by), value) for value, by in values.items())
        names = [by for by, _ in parties]
        overrule = f"override({names[0]}, {names[1]})"
        remedies[f"Keep one of {', '.join(names)}; to overrule on purpose: {overrule}."] = None
        stated = " and ".join(f"{by} says {value!r}" for by, value in parties)
        lines.append(f"{kind.__name__}.{name}: {stated}.")
    return "the transforms disagree. " + " ".join(lines) + "\n\n" + "\n".join(remedies)
