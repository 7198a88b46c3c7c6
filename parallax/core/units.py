"""Finding a model's units: the modules whose parameters are gathered and reduced as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from parallax.core.patterns import matches, nearest
from parallax.errors import RuleError


def units_of(model: nn.Module, wanted: tuple[str, ...] | None) -> dict[str, nn.Module]:
    """The units of a model, by name, inner before outer.

    Without a wish these are the model's repeated blocks: the outermost containers (ModuleList,
    Sequential, ModuleDict) that hold two or more children of one class with parameters and
    submodules of their own. What is in no unit belongs to the root.

    A module that shares a parameter with the outside is no unit, since one parameter can be
    gathered by one unit only: it stays with the root.

    Args:
        model: Any module.
        wanted: Class names or name patterns of the units, or None.

    Raises:
        RuleError: A wish matches no module.

    Example:
        >>> block = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> list(units_of(nn.Sequential(block(), block(), nn.Linear(2, 2)), None))
        ['0', '1']
    """
    found = dict(_blocks("", model)) if wanted is None else _named(model, wanted)
    found.pop("", None)
    return {name: m for name, m in found.items() if not shares_outside(model, m)}


def _blocks(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    kinds = Counter(type(child) for child in module.children() if _is_block(child))
    is_container = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if is_container and _is_block(child) and kinds[type(child)] > 1:
            yield path, child
        else:
            yield from _blocks(path, child)


def _is_block(module: nn.Module) -> bool:
    has_forward = not isinstance(module, nn.ModuleList | nn.ModuleDict)  # fully_shard needs one
    inner = next(module.children(), None) is not None
    return has_forward and inner and next(module.parameters(), None) is not None


def _named(model: nn.Module, wanted: tuple[str, ...]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for wish in wanted:
        hits = {
            name: m
            for name, m in modules.items()
            if matches(wish, name) or wish in {kind.__name__ for kind in type(m).__mro__[:-2]}
        }
        if not hits:
            classes = sorted({type(m).__name__ for m in modules.values()})
            raise RuleError(
                f"units={wish!r} matches no module of {type(model).__name__}.\n\nName a class "
                f"({', '.join(classes)}) or a pattern such as "
                f"{', '.join(nearest(wish, [n for n in modules if n]))}."
            )
        found.update(hits)
    # fully_shard must see inner modules first: an outer call takes whatever is not yet taken.
    order = sorted(found, key=lambda name: -name.count(".") if name else 1)
    return {name: found[name] for name in order if not isinstance(found[name], nn.ModuleList)}


def shares_outside(model: nn.Module, unit: nn.Module) -> bool:
    """Whether a module holds a parameter that another part of the model holds too."""
    inside = {id(m) for m in unit.modules()}
    mine = {id(p) for p in unit.parameters()}
    return any(
        id(p) in mine
        for m in model.modules()
        if id(m) not in inside
        for p in m.parameters(recurse=False)
    )


def kept_of(model: nn.Module, patterns: tuple[str, ...]) -> dict[str, nn.Module]:
    """The modules that `mixed_precision(keep=...)` means, by name: kept in float32, each a shard.

    The model itself is none: that would be `fp32`.

    Args:
        model: Any module.
        patterns: Class names, name patterns, or "norms".
    """
    found = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        own = next(module.parameters(recurse=False), None) is not None
        is_norm = "norms" in patterns and "norm" in kind.lower() and own
        named = any(p == kind or matches(p, name) for p in patterns)
        has_forward = not isinstance(module, nn.ModuleList | nn.ModuleDict)
        if (
            name
            and has_forward
            and (is_norm or named)
            and next(module.parameters(), None) is not None
        ):
            found[name] = module
    return found
