"""Plans: everything a composition means in a world of a given size, as a value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from parallax.core.axes import AXES, DATA_AXES, Axes, Fill, layout
from parallax.core.fact import Claim, Fact, join
from parallax.core.rewrite import Rewrite

F = TypeVar("F", bound=Fact)


@dataclass(frozen=True)
class Plan:
    """A composition laid out over a world. Needs no process group and no model.

    Attributes:
        world: Number of ranks.
        sizes: Size of each mesh axis, outermost first.
        facts: The joined facts, one a kind.
        rewrites: What will run, in order.
        claims: The statements the facts were joined from.
        composition: The composition in the user's spelling.

    Example:
        >>> from parallax import compose, tp, zero
        >>> plan = compose(tp(2, rules={"up": "colwise"}), zero(2)).plan(1024)
        >>> plan.size("data_shard"), plan.size("tp")
        (512, 2)
    """

    world: int
    sizes: tuple[tuple[str, int], ...]
    facts: tuple[Fact, ...]
    rewrites: tuple[Rewrite, ...]
    claims: frozenset[Claim]
    composition: str

    def __getitem__(self, kind: type[F]) -> F:
        """The joined fact of a kind; with every field unsaid when nobody stated one."""
        return next((fact for fact in self.facts if isinstance(fact, kind)), kind())

    def size(self, *axes: str) -> int:
        """Product of the sizes of these axes; of the data axes when none is named."""
        sizes, product = dict(self.sizes), 1
        for axis in axes or DATA_AXES:
            product *= sizes[axis]
        return product

    def said_by(self, kind: type[Fact], name: str) -> str:
        """Who stated a field, in the user's spelling; the field's own name when nobody did."""
        return said_by(self.claims, kind, name)

    def who(self, axis: str) -> str:
        """Who takes a mesh axis, in the user's spelling."""
        numbered = self[Axes].said().get(axis) is not None
        return self.said_by(Axes if numbered else Fill, axis)

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {self.size(name)}" for name in AXES if self.size(name) > 1)
        facts = ", ".join(repr(f) for f in self.facts if not isinstance(f, Axes | Fill))
        steps = " -> ".join(f"{r.name} [{r.phase.name}]" for r in self.rewrites)
        return "\n".join(
            (
                f"{self.composition} on {self.world} rank{'s' if self.world != 1 else ''}",
                f"  mesh      {axes or 'one rank on every axis'}",
                f"  facts     {facts or 'none'}",
                f"  rewrites  {steps or 'none'}",
            )
        )


def ordered(rewrites: Iterable[Rewrite]) -> tuple[Rewrite, ...]:
    """Each rewrite once, by phase; by name within a phase, where any order would do."""
    return tuple(sorted(set(rewrites), key=lambda r: (r.phase, r.name)))


def said_by(claims: frozenset[Claim], kind: type[Fact], name: str) -> str:
    """Who stated a field of a fact, in the user's spelling."""
    parties = sorted(
        claim.by
        for claim in claims
        if isinstance(claim.fact, kind) and claim.fact.said().get(name) is not None
    )
    return parties[0] if parties else name


def plan_of(claims: frozenset[Claim], world: int, composition: str) -> Plan:
    """Lay claims out over a world.

    Raises:
        ConflictError: Two claims disagree.
        MeshError: The axes do not fit the world.
    """
    facts = join(claims)
    axes, fill = facts.get(Axes, Axes()), facts.get(Fill, Fill())
    assert isinstance(axes, Axes)
    assert isinstance(fill, Fill)
    speakers = {name: said_by(claims, Fill, name) for name in fill.said()}
    speakers.update({name: said_by(claims, Axes, name) for name in axes.said()})
    return Plan(
        world=world,
        sizes=tuple(layout(axes, fill, world, said_by=speakers).items()),
        facts=tuple(facts.values()),
        rewrites=ordered(r for claim in claims for r in claim.rewrites),
        claims=claims,
        composition=composition,
    )
