"""The commands, one file each, and how their errors look."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import typer

from parallax.cli.convert import convert
from parallax.cli.inspect import inspect
from parallax.cli.plan import plan
from parallax.cli.train import train
from parallax.cli.verify import verify
from parallax.errors import ParallaxError

P = ParamSpec("P")

app = typer.Typer(
    name="parallax",
    help="Composable functional transforms for distributed PyTorch training.",
    no_args_is_help=True,
    add_completion=False,
    # A fault of the program is reported as Python does, to be copied into an issue.
    pretty_exceptions_enable=False,
)


def _plainly(command: Callable[P, None]) -> Callable[P, None]:
    """The command, showing errors that are about its arguments as text, without a traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except ParallaxError as error:
            typer.echo(f"{type(error).__name__}: {error}", err=True)
            raise typer.Exit(1) from error

    return run


app.command()(_plainly(train))
app.command()(_plainly(plan))
app.command()(_plainly(verify))
app.command()(_plainly(inspect))
app.command()(_plainly(convert))


def main() -> None:
    """The entry of the console script."""
    app()
