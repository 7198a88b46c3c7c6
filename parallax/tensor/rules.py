"""Rules: which module is cut in which style, and whether the sizes allow it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from parallax.core.names import Names
from parallax.core.patterns import matches, nearest
from parallax.errors import RuleError


@dataclass(frozen=True)
class Style:
    """What a style does to a module's weight.

    Attributes:
        name: The style in the words of a rule.
        linear: Dim of a Linear's weight that is cut, or None.
        embedding: Dim of an Embedding's weight that is cut, or None.
        any_module: Whether other kinds of modules may have this style.
    """

    name: str
    linear: int | None = None
    embedding: int | None = None
    any_module: bool = False

    def dim(self, module: nn.Module) -> int | None:
        """Dim of the module's weight that is cut; None when it is not."""
        if isinstance(module, nn.Linear):
            return self.linear
        return self.embedding if isinstance(module, nn.Embedding) else None


STYLES: dict[str, Style] = {
    style.name: style
    for style in (
        Style("colwise", linear=0, embedding=1),
        Style("rowwise", linear=1, embedding=0),
        Style("colwise_gather_output", linear=0, embedding=1),
        Style("rowwise_split_input", linear=1),
        Style("rowwise_scatter_sequence", linear=1),
        Style("embedding_rowwise", embedding=0),
        Style("embedding_colwise", embedding=1),
        Style("embedding_rowwise_scatter_sequence", embedding=0),
        Style("sequence_parallel", any_module=True),
        Style("replicated_with_grad_allreduce", any_module=True),
        Style("replicate", any_module=True),
    )
}

# Earlier names of styles in transformers' plans.
ALIASES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}

# Attributes by which attention modules of torch, transformers and common user code give head
# counts.
HEAD_COUNTS = (
    "num_heads",
    "n_heads",
    "n_head",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "kv_heads",
)


def own_plan(model: nn.Module) -> dict[str, str]:
    """The plan a model brings: its `tp_plan`, or transformers' `_tp_plan`; empty without one."""
    return dict(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {})


def resolve(
    model: nn.Module, rules: tuple[tuple[str, str], ...] | None, names: Names
) -> tuple[dict[str, str], list[RuleError]]:
    """The style of each module that has one, and what is wrong with the rules.

    A tied partner of a cut weight is cut with it: an embedding tied to a `colwise` head becomes
    `embedding_rowwise`.

    Args:
        model: The model, not yet cut.
        rules: The user's rules, or None for the model's own plan.
        names: The model's names, for its ties.
    """
    pairs = list(rules) if rules is not None else list(own_plan(model).items())
    if not pairs:
        return {}, [
            RuleError(
                f"tp has no rules for {type(model).__name__}, and the model has no tp_plan.\n\n"
                'Give rules: tp(2, rules={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}).'
            )
        ]
    modules = {name: m for name, m in model.named_modules() if name}
    faults: list[RuleError] = []
    found: dict[str, str] = {}
    for pattern, spoken in pairs:
        style = ALIASES.get(spoken, spoken)
        hits = [name for name in modules if matches(pattern, name)]
        if style not in STYLES:
            if hits or rules is not None:
                faults.append(_unknown_style(pattern, spoken))
            continue
        if not hits and rules is not None:
            close = ", ".join(nearest(pattern, modules))
            faults.append(
                RuleError(
                    f"the rule {pattern!r}: {spoken!r} matches no module of "
                    f"{type(model).__name__}.\n\nNearest names: {close}."
                )
            )
        for name in hits:
            if name in found and found[name] != style:
                faults.append(
                    RuleError(
                        f"two rules match {name}: {found[name]!r} and {style!r} (by {pattern!r})."
                        "\n\nMake the patterns disjoint."
                    )
                )
            found[name] = style
    faults += _wrong_kind(modules, found)
    faults += _ties(modules, found, names)
    return found, faults


def size_faults(model: nn.Module, found: dict[str, str], degree: int, by: str) -> list[RuleError]:
    """Find what cannot be cut into `degree` equal parts: one error, with the degrees that fit."""
    modules = dict(model.named_modules())
    sizes: dict[str, int] = {}
    for name, style in found.items():
        module = modules[name]
        dim = STYLES[style].dim(module)
        if dim is not None:
            weight = module.weight
            sizes[f"{name}.weight, dim {dim}"] = int(weight.shape[dim])  # type: ignore[index]
        if style == "colwise" and "." in name:
            sizes.update(_heads(name.rpartition(".")[0], modules[name.rpartition(".")[0]]))
    wrong = {what: size for what, size in sizes.items() if size % degree}
    if not wrong:
        return []
    largest = math.gcd(*sizes.values())
    fits = ", ".join(str(d) for d in range(1, largest + 1) if largest % d == 0)
    rows = "\n".join(f"  {what}: {size}" for what, size in list(wrong.items())[:6])
    more = f"\n  and {len(wrong) - 6} more" if len(wrong) > 6 else ""
    return [
        RuleError(
            f"{by} cuts {type(model).__name__} into {degree} parts, and {degree} does not divide\n"
            f"{rows}{more}\n\nDegrees that fit every rule: {fits}."
        )
    ]


def _heads(path: str, parent: nn.Module) -> dict[str, int]:
    sources = {path: parent, f"{path}.config": getattr(parent, "config", None)}
    return {
        f"{where}.{attribute}": value
        for where, source in sources.items()
        for attribute in HEAD_COUNTS
        if "attn" in path.lower() or "attention" in path.lower() or where == path
        if isinstance(value := getattr(source, attribute, None), int) and value > 0
    }


def _unknown_style(pattern: str, style: str) -> RuleError:
    return RuleError(
        f"the rule {pattern!r} asks for the style {style!r}, which parallax does not know.\n\n"
        f"Styles: {', '.join(STYLES)}."
    )


def _wrong_kind(modules: dict[str, nn.Module], found: dict[str, str]) -> Iterable[RuleError]:
    for name, spoken in found.items():
        style, module = STYLES[spoken], modules[name]
        if not style.any_module and style.dim(module) is None:
            kinds = [
                kind
                for kind, dim in (("Linear", style.linear), ("Embedding", style.embedding))
                if dim is not None
            ]
            yield RuleError(
                f"the style {spoken!r} was asked for {name}, which is a "
                f"{type(module).__name__}.\n\nIt cuts modules of the kind {' or '.join(kinds)}."
            )


def _ties(
    modules: dict[str, nn.Module], found: dict[str, str], names: Names
) -> Iterable[RuleError]:
    for alias, first in names.ties:
        (a, _, a_leaf), (b, _, b_leaf) = alias.rpartition("."), first.rpartition(".")
        if a == b or a_leaf != "weight" or b_leaf != "weight":
            continue
        for here, there in ((a, b), (b, a)):
            if here in found and there not in found and isinstance(modules[there], nn.Embedding):
                cut = STYLES[found[here]].dim(modules[here])
                if cut is not None:
                    found[there] = "embedding_rowwise" if cut == 0 else "embedding_colwise"
        dims = {
            path: STYLES[found[path]].dim(modules[path]) if path in found else None
            for path in (a, b)
        }
        if dims[a] != dims[b]:
            said = " and ".join(
                f"{path} has {found.get(path)!r}" if path in found else f"{path} has no rule"
                for path in (b, a)
            )
            yield RuleError(
                f"{alias} and {first} are one tied parameter, and their rules cut it differently: "
                f"{said}.\n\nCut both along the vocabulary (embedding_rowwise and "
                "colwise_gather_output), or neither."
            )
