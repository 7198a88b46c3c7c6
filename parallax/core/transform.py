"""Transforms: values that state facts and name the rewrites that carry them out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from parallax.core.fact import Claim, Fact, join
from parallax.core.plan import Plan, plan_of
from parallax.core.rewrite import Rewrite

if TYPE_CHECKING:
    from parallax.core.boosted import Boosted

OptimizerLike = Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer] | None


@dataclass(frozen=True, repr=False)
class Transform:
    """A statement about how to train, with the rewrites that make it true.

    A transform is a value: two transforms that state the same are equal, hash alike, pickle, and
    `eval(repr(t)) == t`. It does nothing until it is called on a model and an optimizer.

    Note that `compose(f, g)(model, opt)` is not `g(f(model, opt))`: statements are joined first and
    carried out once. Calling a transform on a model that is already boosted is refused.

    Attributes:
        claims: What is stated, by whom, and the rewrites that carry it out.

    Example:
        >>> from parallax import bf16, compose, zero
        >>> compose(zero(2), bf16) == compose(bf16, zero(2)) == (bf16 | zero(2))
        True
        >>> compose(zero(2), bf16)
        compose(bf16, zero(2))
    """

    claims: frozenset[Claim] = frozenset()

    @property
    def rewrites(self) -> frozenset[Rewrite]:
        """The rewrites that will run."""
        return frozenset(r for claim in self.claims for r in claim.rewrites)

    @property
    def atoms(self) -> dict[str, Transform]:
        """The transforms this one was composed of, by spelling."""
        return {
            by: Transform(frozenset(c for c in self.claims if c.by == by))
            for by in sorted({claim.by for claim in self.claims})
        }

    def __call__(self, model: nn.Module, optimizer: OptimizerLike = None) -> Boosted:
        """Rewrite a model and its optimizer, in place, on every rank.

        Args:
            model: Any plain module. It is changed in place and stays the model to use.
            optimizer: An optimizer made on this model (re-pointed in place: settings, groups and
                state are kept), or a function of parameters that makes one, or None.

        Returns:
            The boosted pair with the verbs that train it.

        Raises:
            ParallaxError: The composition does not fit the world, the model or the optimizer, or
                the ranks disagree. Raised on every rank, before anything is changed.
        """
        from parallax.core.boost import boost  # boost needs Transform's result type

        return boost(self, model, optimizer)

    def plan(self, world: int) -> Plan:
        """What this composition means for so many ranks; pure, for any number, on any machine.

        Raises:
            MeshError: The axes do not fit the world.
        """
        return plan_of(self.claims, world, repr(self))

    def __or__(self, other: Transform) -> Transform:
        return compose(self, other)

    def __repr__(self) -> str:
        names = list(self.atoms)
        return names[0] if len(names) == 1 else f"compose({', '.join(names)})"


def state(by: str, *facts: Fact, rewrites: Iterable[Rewrite] = ()) -> Transform:
    """Make a transform out of facts: the constructor that transforms are written with.

    Args:
        by: The transform in the spelling that evaluates to it, for instance `"zero(2)"`.
        *facts: What it states.
        rewrites: The rewrites that carry the facts out.

    Example:
        >>> from parallax.core.axes import Axes
        >>> state("tensor_only(2)", Axes(tp=2))
        tensor_only(2)
    """
    return Transform(frozenset(Claim(by, fact, tuple(rewrites)) for fact in facts))


def compose(*transforms: Transform) -> Transform:
    """Join transforms into one. Order-free, associative, idempotent; `compose()` is the identity.

    Args:
        *transforms: Any transforms.

    Raises:
        ConflictError: Two of them give one thing different values; all conflicts are listed.
        TypeError: An argument is not a transform.

    Example:
        >>> from parallax import clip, compose, zero
        >>> compose(zero(2), clip(1.0), zero(2))
        compose(clip(1.0), zero(2))
        >>> compose()
        compose()
    """
    for given in transforms:
        if not isinstance(given, Transform):
            hint = f"{given.__name__}(...)" if callable(given) else "a transform such as zero(2)"
            raise TypeError(f"compose was given {given!r}, which is not a transform. Write {hint}.")
    joined = Transform(frozenset().union(*(t.claims for t in transforms)))
    join(joined.claims)
    return joined


def override(base: Transform, new: Transform) -> Transform:
    """Overrule `base` on purpose: whatever `new` states replaces what `base` states about it.

    Args:
        base: Any transform.
        new: What must hold instead; fields it leaves unsaid are kept from `base`.

    Example:
        >>> from parallax import bf16, compose, override, zero
        >>> override(compose(zero(2), bf16), zero(3)) == compose(zero(3), bf16)
        True
    """
    ruled = {
        f"{kind.__name__}.{name}" for kind, fact in join(new.claims).items() for name in fact.said()
    }
    # An axis that takes what is left, and one that takes a number, are two answers to one question.
    ruled |= {f"Axes.{r.removeprefix('Fill.')}" for r in ruled if r.startswith("Fill.")}
    kept: set[Claim] = set()
    for atom in base.atoms.values():
        fields = _fields(atom)
        kept |= (part(atom, *sorted(fields - ruled)) if fields & ruled else atom).claims
    return Transform(frozenset(kept) | new.claims)


def part(transform: Transform, *fields: str) -> Transform:
    """What a transform states about some fields only.

    Args:
        transform: Any transform.
        *fields: Fields as they are named in errors, for instance `"Axes.data_shard"`.

    Raises:
        ValueError: The transform states nothing about one of the fields.

    Example:
        >>> from parallax import zero
        >>> part(zero(2, degree=4), "Axes.data_shard")
        part(zero(2, degree=4), 'Axes.data_shard')
    """
    missing = set(fields) - _fields(transform)
    if missing:
        raise ValueError(
            f"{transform!r} states nothing about {', '.join(sorted(missing))}. It states "
            f"{', '.join(sorted(_fields(transform)))}."
        )
    by = f"part({', '.join((repr(transform), *map(repr, fields)))})"
    kept: set[Claim] = set()
    for claim in transform.claims:
        kind = type(claim.fact).__name__
        rest = claim.fact.without(n for n in claim.fact.said() if f"{kind}.{n}" not in fields)
        if rest.said():
            kept.add(claim._replace(by=by, fact=rest))
    return Transform(frozenset(kept))


def _fields(transform: Transform) -> set[str]:
    return {f"{type(c.fact).__name__}.{n}" for c in transform.claims for n in c.fact.said()}
