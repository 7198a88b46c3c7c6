"""`parallax plan`: what a composition comes to, without starting anything."""

from __future__ import annotations

from typing import Annotated

import typer

from parallax import parse


def plan(
    compose: Annotated[str, typer.Argument(help='A composition, such as "tp(2), zero(2), bf16".')],
    world: Annotated[int, typer.Option(min=1, help="How many ranks would run.")] = 8,
) -> None:
    """Prints the plan of a composition for a number of ranks."""
    typer.echo(str(parse(compose).plan(world)))
