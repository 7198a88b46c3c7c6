"""Transforms that change which modules a model is made of: fp8."""

from __future__ import annotations

from parallax.core.late import Late
from parallax.core.phase import Phase
from parallax.core.rewrite import Rewrite
from parallax.core.spell import names_of, one_of, spell
from parallax.core.transform import Transform, state
from parallax.surgery.facts import Float8, Recipe

FP8 = Rewrite(
    "fp8",
    Phase.SURGERY,
    Late("parallax.surgery.float8:build"),
    Late("parallax.surgery.float8:check"),
)
"""Lets linear layers multiply in float8."""


def fp8(
    recipe: Recipe | None = None,
    *,
    keep: tuple[str, ...] | str | None = None,
    min_size: int | None = None,
    gather: bool | None = None,
    emulate: bool | None = None,
) -> Transform:
    """Multiply in float8 where it pays, with bfloat16 elsewhere (arXiv:2209.05433), by torchao.

    Every `nn.Linear` whose two sizes divide by 16 (under `tp(n)` by 16 n), the kernels' rule,
    rounds its input, weight and output gradient before each product and scales the result;
    `boosted.rooms["fp8"]` lists which do and which do not. Master weights, gradients and everything
    else are as without. Compose it with `bf16`. Scales are powers of two, so that rounding what was
    rounded already changes nothing.

    With `gather=True`, weights cross the ranks of `zero` in float8, each row with a scale of its
    own, and come out in bfloat16: those that shard evenly and are tied to nothing.

    States:
        Float8.

    Cost:
        Products at up to twice bfloat16's rate on hardware that has them (NVIDIA from compute
        capability 8.9); a pass over each operand for its scale. With `gather=True`, traffic of
        these weights 1 + 4 / in_features bytes an element beside 2, for some ten small kernels a
        weight: worth it over slow links, not within one host of NVLink. Errors: a relative 2^-4 of
        each operand (e4m3; gradients by `"tensorwise"`: e5m2, 2^-3).

    Args:
        recipe: `"tensorwise"`, one scale a tensor (when unsaid); `"rowwise"`, one a row, which
            outliers hurt less; `"off"` to overrule.
        keep: Layers to leave in bfloat16: name patterns, for instance `"head"`.
        min_size: Leave layers with a smaller dim.
        gather: Gather weights in float8.
        emulate: Compute the products in bfloat16 from rounded operands: the same rounding on any
            hardware, for tests; slower than without fp8.

    Raises:
        ValueError: An argument is unknown. Where it is boosted: torchao is missing, the hardware
            cannot, nothing is left to convert, or it is composed with another dtype than bf16.

    Example:
        >>> fp8("rowwise", keep="head")
        fp8('rowwise', keep=('head',))
    """
    if recipe is not None:
        one_of("fp8", "recipe", recipe, ("tensorwise", "rowwise", "off"))
    for name, value in (("gather", gather), ("emulate", emulate)):
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"fp8 was given {name}={value!r}. Choose one of True, False.")
    whole = isinstance(min_size, int) and not isinstance(min_size, bool) and min_size > 0
    if min_size is not None and not whole:
        raise ValueError(f"fp8 was given min_size={min_size!r}. Give a whole number, 1 or more.")
    kept = names_of("fp8", "keep", keep)
    by = spell("fp8", recipe, keep=kept, min_size=min_size, gather=gather, emulate=emulate)
    fact = Float8(
        recipe=recipe or "tensorwise", keep=kept, least=min_size, gather=gather, emulate=emulate
    )
    return state(by, fact, rewrites=(FP8,))
