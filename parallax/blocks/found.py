"""The units that are recomputed or compiled."""

from __future__ import annotations

from torch import nn

from parallax.core.units import kept_of, units_of
from parallax.errors import RuleError


def found(model: nn.Module, wanted: tuple[str, ...] | None) -> dict[str, nn.Module]:
    """The units of a model by name, in the order of the model; empty when it has none.

    Raises:
        RuleError: A wish matches no module, or only the model itself and modules that share
            parameters with others.
    """
    units = units_of(model, wanted)
    if wanted is not None and not units:
        listed = ", ".join(map(repr, wanted))
        raise RuleError(
            f"units={listed} matches no module inside {type(model).__name__} that holds its "
            "parameters alone.\n\nName modules within the model that share no parameter with the "
            "rest of it."
        )
    return {name: module for name, module in model.named_modules() if name in units}


def nested(units: dict[str, nn.Module]) -> tuple[str, str] | None:
    """A unit, and another inside it."""
    for outer in units:
        for inner in units:
            if inner.startswith(f"{outer}."):
                return outer, inner
    return None


def shards_inside(
    units: dict[str, nn.Module], model: nn.Module, keep: tuple[str, ...], finer: set[str]
) -> list[str]:
    """Modules inside units that STORE shards by themselves.

    Args:
        units: Units by name.
        model: What they are units of.
        keep: What `Precision.keep` says.
        finer: Names of the units of sharding.
    """
    alone = finer | set(kept_of(model, keep))
    inside = (name for name, _ in model.named_modules() if name in alone)
    return [name for name in inside if any(name.startswith(f"{outer}.") for outer in units)]
