"""Transforms of a model's blocks."""

from __future__ import annotations

from typing import Any

from parallax.blocks.facts import Compilation, Keep, Recomputation, Which
from parallax.core.amount import bytes_of
from parallax.core.late import Late
from parallax.core.phase import Phase
from parallax.core.rewrite import Rewrite
from parallax.core.spell import names_of, one_of, spell
from parallax.core.transform import Transform, state

REMAT = Rewrite(
    "remat",
    Phase.RECOMPUTE,
    Late("parallax.blocks.recomputation:build"),
    Late("parallax.blocks.recomputation:check"),
)
"""Has units compute their activations again in the backward."""

COMPILE = Rewrite(
    "compile",
    Phase.COMPILE,
    Late("parallax.blocks.compilation:build"),
    Late("parallax.blocks.compilation:check"),
)
"""Compiles each unit's forward."""

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_QUICK = ("inductor", "aot_eager", "eager")


def remat(
    fraction: float | None = None,
    *,
    every: int | None = None,
    budget: int | str | None = None,
    keep: Keep | None = None,
    offload: bool | None = None,
    units: tuple[str, ...] | str | type | None = None,
) -> Transform:
    """Keep less between forward and backward: units compute their activations again (1604.06174).

    While gradients are computed, a unit keeps its inputs alone and runs its forward once more when
    the backward reaches it: with the same random numbers and the same buffers, so losses and
    gradients are bitwise those without, and running statistics count once. Names do not change. In
    evaluation mode and under `no_grad` nothing is kept or computed twice. Hooks on the unit itself
    run once; hooks on modules inside it run with each forward. A key/value cache is not filled
    while training, which is also what transformers' own checkpointing does.

    States:
        Recomputation.

    Cost:
        With n units, of which each keeps A bytes plainly and I bytes of inputs: all units
        n x I + A instead of n x A bytes, for one more forward of each (a third more arithmetic).
        `keep="matmuls"` keeps the results of matrix products, attention and collectives too, and
        computes the cheap rest again. `offload=True` moves n x I bytes to pinned host memory and
        back, beside the computation.

    Args:
        fraction: The part of the units to recompute, spread evenly; all when nothing is said.
        every: Recompute every n-th unit, from the first.
        budget: Bytes of activations that the units of this rank may keep, as a number or as text
            (`"20GiB"`). The first training step recomputes every unit and measures each, by one
            more forward; from the second on, as few are recomputed as fit, the same on all ranks.
            Embedding, head and loss come on top. `boosted.rooms["remat"].notes` has the figures.
        keep: `"matmuls"` keeps results that cost arithmetic.
        offload: Keep the inputs of recomputed units in host memory, and fetch those of the next
            unit while one is computed. On a CPU they are copied and copied back.
        units: Class names or name patterns of the units; found as `zero` finds its own when unsaid.

    Raises:
        ValueError: An argument is out of range, or two of them answer the same question.

    Example:
        >>> remat(), remat(0.5), remat(every=2)
        (remat(), remat(0.5), remat(every=2))
        >>> remat(keep="matmuls", units="Block")
        remat(keep='matmuls', units=('Block',))
        >>> remat(budget="20GiB")
        remat(budget='20GiB')
    """
    answers = {"fraction": fraction, "every": every, "budget": budget}
    given = [name for name, value in answers.items() if value is not None]
    if len(given) > 1:
        raise ValueError(
            f"remat was given {' and '.join(given)}, which each say which units are recomputed. "
            "Give one of them."
        )
    which: Which | None = None
    if fraction is not None:
        which = ("fraction", _share(fraction))
    elif every is not None:
        which = ("every", _stride(every))
    elif budget is not None:
        which = ("budget", _bytes(budget))
    if keep is not None:
        one_of("remat", "keep", keep, ("matmuls",))
    _switch("remat", "offload", offload)
    if fault := clash(which, keep, offload):
        raise ValueError(f"remat was given {fault}")
    wanted = names_of("remat", "units", units)
    by = spell(
        "remat", fraction, every=every, budget=budget, keep=keep, offload=offload, units=wanted
    )
    if which is None and keep is None and offload is None and wanted is None:
        which = ("fraction", 1.0)  # remat() says all; so does remat(1.0)
    fact = Recomputation(which=which, keep=keep, offload=offload, units=wanted)
    return state(by, fact, rewrites=(REMAT,))


def clash(which: Which | None, keep: Keep | None, offload: bool | None) -> str:
    """Why statements about recomputation do not go together, also those of several transforms."""
    if keep and offload:
        return (
            "keep and offload: torch holds the results that keep names where they cannot be moved "
            "from. Leave one of them out."
        )
    if keep and which is not None and which[0] == "budget":
        return (
            "keep and budget: a budget counts units that keep everything or their inputs alone. "
            "Leave one of them out, or give keep with a fraction."
        )
    return ""


def compile(  # noqa: A001  (what one says aloud, as torch does)
    *,
    backend: str | None = None,
    mode: str | None = None,
    fullgraph: bool | None = None,
    dynamic: bool | None = None,
    units: tuple[str, ...] | str | type | None = None,
) -> Transform:
    """Compile each unit's forward by `torch.compile`; equal units share the compiled code.

    A model without repeated blocks is compiled as one. Compilation takes place when a unit is first
    called, and again for evaluation and for other sizes. Hooks of sharding stay outside, so they
    break no graph; a module that is sharded by itself inside a unit (`zero(units=...)` finer than
    blocks, `mixed_precision(keep=...)`) does break it. Under `remat` the compiled forward is what
    is run again.

    States:
        Compilation.

    Cost:
        Compilation of one unit of each kind, instead of all; no memory.

    Args:
        backend: Name of a compiler that torch knows; inductor when unsaid.
        mode: What inductor aims at: `"default"`, `"reduce-overhead"`, `"max-autotune"`,
            `"max-autotune-no-cudagraphs"`.
        fullgraph: Make it an error when a unit is not one graph.
        dynamic: Whether sizes are symbols from the first call on (True) or never (False); when
            unsaid, once they were seen to change.
        units: Class names or name patterns of the units; found as `zero` finds its own when unsaid.

    Raises:
        ValueError: The backend or the mode is unknown, or the mode is not the backend's.

    Example:
        >>> compile()
        compile()
        >>> compile(mode="max-autotune-no-cudagraphs", units="Block")
        compile(mode='max-autotune-no-cudagraphs', units=('Block',))
    """
    if backend is not None:
        _backend(backend)
    if mode is not None:
        one_of("compile", "mode", mode, MODES)
        if backend not in (None, "inductor"):
            raise ValueError(
                f"compile was given mode={mode!r} and backend={backend!r}. A mode is inductor's: "
                "leave one of them out."
            )
    _switch("compile", "fullgraph", fullgraph)
    _switch("compile", "dynamic", dynamic)
    wanted = names_of("compile", "units", units)
    options = {"mode": mode, "fullgraph": fullgraph, "dynamic": dynamic, "units": wanted}
    by = spell("compile", backend=backend, **options)
    return state(by, Compilation(backend=backend, **options), rewrites=(COMPILE,))


def _share(fraction: Any) -> float:
    number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
    if not (number and 0 < fraction <= 1):
        raise ValueError(
            f"remat was given fraction={fraction!r}. Give a number above 0 and up to 1; to "
            "recompute nothing, leave remat out."
        )
    return float(fraction)


def _stride(every: object) -> int:
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(
            f"remat was given every={every!r}. Give a whole number, 1 or more: every=2 recomputes "
            "the first unit, the third and so on."
        )
    return every


def _bytes(budget: object) -> int:
    count = bytes_of(budget)
    if count is None:
        raise ValueError(
            f"remat was given budget={budget!r}. Give a positive number of bytes, or text such as "
            "'20GiB' or '512MiB'."
        )
    return count


def _switch(name: str, what: str, value: object) -> None:
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} was given {what}={value!r}. Choose one of True, False.")


def _backend(name: str) -> None:
    if name in _QUICK:
        return  # the list below costs seconds of imports
    import torch

    known = torch.compiler.list_backends(exclude_tags=())
    if name not in known:
        usual = ", ".join(n for n in torch.compiler.list_backends() if n not in _QUICK)
        raise ValueError(
            f"compile was given backend={name!r}, which torch does not know. Choose one of "
            f"{', '.join(_QUICK)}, {usual}, or register it by torch._dynamo.register_backend."
        )
