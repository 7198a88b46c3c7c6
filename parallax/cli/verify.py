"""`parallax verify`: does a composition train a script's model like one process?"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from parallax import parse
from parallax.errors import ParallaxError

FORM = "(model_fn, optimizer_fn, loss_fn, batches)"


def verify(
    script: Annotated[
        str, typer.Argument(help=f"script.py:setup, a function that returns {FORM}.")
    ],
    compose: Annotated[str, typer.Option(help='The composition, such as "tp(2), zero(2), bf16".')],
    world: Annotated[int | None, typer.Option(min=1, help="Number of ranks.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = 3,
    dtype: Annotated[
        Literal["fp64", "fp32", "native"],
        typer.Option(help="fp64 checks the logic, native the composition's own precision."),
    ] = "fp64",
    json: Annotated[Path | None, typer.Option(help="Also write the report there.")] = None,
) -> None:
    """Trains a model under a composition and in one process, and compares every number."""
    from parallax.testing.verify import (
        verify as run,  # brings DTensor, which plan and help need not
    )

    transform = parse(compose)
    model_fn, optimizer_fn, loss_fn, batches = _setup(script)
    report = run(
        transform, model_fn, optimizer_fn, loss_fn, batches, world=world, steps=steps, dtype=dtype
    )
    Console().print(report.table())
    if report.message:
        typer.echo(report.message)
    if json is not None:
        json.write_text(report.to_json())
    if not report.ok:
        raise typer.Exit(1)


def _setup(script: str) -> tuple[Any, Any, Any, Any]:
    name, _, function = script.rpartition(":")
    path = Path(name)
    if not name or not path.is_file():
        raise ParallaxError(
            f"verify was given {script!r}: there is no file {name or script}.\n\n"
            f"Write script.py:setup, where setup() returns {FORM}."
        )
    sys.path.insert(0, str(path.resolve().parent))  # as python script.py would have it; ranks too
    module = importlib.import_module(path.stem)
    setup = getattr(module, function, None)
    if not callable(setup):
        raise ParallaxError(
            f"verify was given {script!r}: {path.name} has no function {function!r}.\n\n"
            f"Define one that returns {FORM}."
        )
    made = setup()
    if not isinstance(made, tuple | list) or len(made) != 4:
        raise ParallaxError(
            f"{function}() in {path.name} returned a {type(made).__name__}"
            f"{f' of {len(made)}' if isinstance(made, tuple | list) else ''}.\n\n"
            f"Return {FORM}."
        )
    return tuple(made)  # type: ignore[return-value]
