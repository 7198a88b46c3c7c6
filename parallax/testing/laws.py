"""The law suite: random compositions of everything parallax has, on random models, verified.

Each transform that parallax exports has one row in `TABLE`; a test fails when one is missing. What
is drawn is plain data, so that a failure prints as the call that repeats it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from torch import nn

from parallax.core.transform import Transform
from parallax.errors import ConflictError
from parallax.parse import parse
from parallax.testing import toys
from parallax.testing.report import Report
from parallax.testing.setting import Check
from parallax.testing.verify import verify

Spoken = tuple[str, int]
"""A transform's text, and the factor of the world it takes; 0 takes whatever is left."""


@dataclass(frozen=True)
class Member:
    """How a transform is drawn.

    Attributes:
        draw: Given the factor of the world that is left, a strategy of what may be said.
        needs_plan: Whether the model must say how it is cut.
        without: Toy models it is refused on.
        needs: What it must be composed with.
        apart: A member it is not drawn with.
        needs_blocks: Whether the model must have repeated blocks.
        rare: Drawn a quarter as often as others, since it takes long.
    """

    draw: Callable[[int], st.SearchStrategy[Spoken]]
    needs_plan: bool = False
    without: tuple[str, ...] = ()
    needs: str = ""
    apart: str = ""
    needs_blocks: bool = False
    rare: bool = False


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _tp(left: int) -> st.SearchStrategy[Spoken]:
    options = st.sampled_from(["", ", loss_parallel=True"])
    degrees = st.sampled_from([d for d in _divisors(left) if d <= 4])
    return st.builds(lambda d, o: (f"tp({d}{o})", d), degrees, options)


def _zero(left: int) -> st.SearchStrategy[Spoken]:
    stages = st.sampled_from([1, 2, 3])
    degrees = st.sampled_from([0, *_divisors(left)])
    units = st.sampled_from(["", ", units='Linear'"])
    return st.builds(
        lambda s, d, u: (f"zero({s}{f', degree={d}' if d else ''}{u})", d), stages, degrees, units
    )


def _dp(left: int) -> st.SearchStrategy[Spoken]:
    degrees = st.sampled_from([0, *_divisors(left)])
    return degrees.map(lambda d: (f"dp({d or ''})", d))


def _said(*texts: str) -> Callable[[int], st.SearchStrategy[Spoken]]:
    return lambda left: st.sampled_from([(text, 1) for text in texts])


def _accumulate(left: int) -> st.SearchStrategy[Spoken]:
    reduce = st.sampled_from(["", ", reduce='step'", ", reduce='microbatch'"])
    return st.builds(lambda n, r: (f"accumulate({n}{r})", 1), st.integers(1, 4), reduce)


TABLE: dict[str, Member] = {
    "tp": Member(_tp, needs_plan=True),
    "zero": Member(_zero),
    "dp": Member(_dp),
    "bf16": Member(_said("bf16")),
    "fp32": Member(_said("fp32")),
    "mixed_precision": Member(
        _said(
            "mixed_precision('bf16', reduce='bf16')",
            "mixed_precision('bf16', keep='norms')",
            "mixed_precision('bf16', outputs='bf16')",
            "mixed_precision('fp16', scale=256.0)",
        )
    ),
    "fp16": Member(_said("fp16")),
    "compress": Member(_said("compress('fp8')", "compress('bf16')")),
    "clip": Member(
        _said(
            "clip(0.05)",
            "clip(1000.0)",
            "clip(0.05, norm_type='inf', nonfinite='skip')",
            "clip(0.05, value=0.001, nonfinite='zero')",
        )
    ),
    "accumulate": Member(_accumulate, without=("ConvNet",)),
    "fp8": Member(
        _said("fp8(emulate=True)", "fp8('rowwise', emulate=True, gather=True)"),
        without=("ConvNet", "Mlp", "Reader"),  # whose sizes do not divide by 16
        needs="bf16",
        apart="tp",  # the toy's sizes do not divide by 32
    ),
    "ema": Member(_said("ema(0.9)", "ema(0.5, warmup=True)")),
    "remat": Member(
        _said("remat()", "remat(0.5)", "remat(budget='8MiB')", "remat(offload=True)"),
        needs_blocks=True,
    ),
    # Tracing costs seconds on the ranks of a test, lowering would cost minutes. Sizes are fixed,
    # since torch 2.13 fails on symbolic ones where DTensors meet a broken graph.
    "compile": Member(_said("compile(backend='eager', dynamic=False)"), rare=True),
}

ALIASES = {"shard_zero": "zero", "tensor_parallel": "tp"}
"""Long names of members."""


@dataclass(frozen=True)
class Case:
    """One draw: everything `verify` is called with, as plain data.

    Attributes:
        world: Number of ranks.
        parts: The transforms as text, in the order they are composed.
        model: Name of a toy model.
        options: Its options.
        optimizer: Name of an optimizer.
        loss: Name of a loss.
        rows: Rows of a global batch; need not divide by the data ranks.
        dtype: In which precision it is checked: float64 for the logic, or the composition's own.
    """

    world: int
    parts: tuple[str, ...]
    model: str
    options: tuple[tuple[str, Any], ...]
    optimizer: str
    loss: str
    rows: int
    dtype: Check = "fp64"

    @property
    def transform(self) -> Transform:
        """The composition."""
        return parse(", ".join(self.parts))

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the members that take part."""
        return tuple(sorted({name_of(part) for part in self.parts}))

    def verify(self, *, steps: int = 2, blame: bool = True) -> Report:
        """Run it."""
        make, batch, _ = MODELS[self.model]
        options = dict(self.options)
        return verify(
            self.transform,
            _Make(make, options),
            getattr(toys, self.optimizer),
            getattr(toys, self.loss),
            [batch(self.rows, seed) for seed in range(steps)],
            world=self.world,
            steps=steps,
            dtype=self.dtype,
            blame=blame,
        )


@dataclass(frozen=True)
class _Make:
    make: Callable[..., nn.Module]
    options: dict[str, Any]

    def __call__(self) -> nn.Module:
        return self.make(**self.options)


MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[..., Any], tuple[str, ...]]] = {
    "Gpt": (toys.Gpt, toys.tokens, ("next_token", "mean_next_token")),
    "Mlp": (toys.Mlp, toys.points, ("square",)),
    "ConvNet": (toys.ConvNet, toys.images, ("classify",)),
    "Reader": (toys.Reader, toys.pages, ("score",)),
}
"""By name: what makes a model, what makes its batches, and its losses."""

GPT_OPTIONS = ("tied", "scalar", "frozen", "unused", "empty")


def name_of(text: str) -> str:
    """The member that a transform's text is of."""
    return text.partition("(")[0]


def _disagree(parts: list[str], text: str) -> bool:
    try:
        parse(", ".join([*parts, text]))
    except ConflictError:
        return True
    return False


@st.composite
def cases(
    draw: st.DrawFn,
    worlds: tuple[int, ...] = (1, 2, 4),
    dtypes: tuple[Check, ...] = ("fp64", "fp64", "native"),
) -> Case:
    """Draw a world, a composition that fills it in a random order, a model and a run."""
    world = draw(st.sampled_from(worlds))
    names = draw(st.permutations(sorted(TABLE)))
    wanted = draw(st.sets(st.sampled_from(sorted(TABLE)), max_size=len(TABLE)))
    left, parts, opened = world, [], False
    has_plan = has_blocks = False
    for name in names:
        member = TABLE[name]
        if name not in wanted or (member.rare and draw(st.integers(0, 3))):
            continue
        if any(name == TABLE[name_of(p)].apart or name_of(p) == member.apart for p in parts):
            continue
        text, factor = draw(member.draw(left))
        added = [member.needs] if member.needs and member.needs not in parts else []
        if (factor == 0 and opened) or _disagree([*parts, *added], text):
            continue
        parts += added
        opened |= factor == 0
        left //= factor or 1
        has_plan |= member.needs_plan
        has_blocks |= member.needs_blocks
        parts.append(text)
    if left > 1 and not opened:
        filler = draw(
            st.sampled_from(
                [n for n in ("zero", "dp") if not any(p.startswith(n) for p in parts)] or [""]
            )
        )
        if filler:
            parts.append(
                f"{filler}({draw(st.sampled_from([1, 2, 3])) if filler == 'zero' else ''})"
            )
        else:
            world //= left  # both data axes have their numbers: the world is as large as they say
    parts = list(draw(st.permutations(parts)))
    refused = {m for part in parts for m in TABLE[name_of(part)].without}
    fitting = sorted(set(MODELS) - refused)
    model = "Gpt" if has_plan or has_blocks else draw(st.sampled_from(fitting))
    options: list[tuple[str, Any]] = []
    if model == "Gpt":
        options = [(name, True) for name in GPT_OPTIONS if draw(st.booleans())]
        # One block is no repeated one: compile takes the model as one unit, which tp may forbid.
        has_blocks |= {"compile", "tp"} <= {name_of(part) for part in parts}
        options.append(("blocks", draw(st.integers(1 + has_blocks, 3))))
        if any(part.startswith("accumulate") for part in parts):
            options.append(("counts", False))
    return Case(
        world=world,
        parts=tuple(parts),
        model=model,
        options=tuple(options),
        optimizer=draw(st.sampled_from(["adamw", "momentum", "adafactor"])),
        loss=draw(st.sampled_from(MODELS[model][2])),
        rows=draw(st.sampled_from([8, 7, 5])),
        dtype=draw(st.sampled_from(dtypes)),
    )


def exported() -> set[str]:
    """Names of all transforms that parallax exports."""
    import parallax

    tools = {
        "compose",
        "override",
        "part",
        "parse",
        "state",
        "layout",
        "launch",
        "launch_from_torch",
        "load",
        "schedules",
        "verify",
    }
    found = set()
    for name in parallax.__all__:
        value = getattr(parallax, name)
        is_class = isinstance(value, type)
        if isinstance(value, Transform) or (callable(value) and not is_class and name not in tools):
            found.add(name)
    return found
