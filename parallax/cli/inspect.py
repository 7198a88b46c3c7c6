"""`parallax inspect`: what a checkpoint holds, whether it is sound, how it differs from another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from parallax.core.amount import shown
from parallax.errors import raise_all

if TYPE_CHECKING:  # it brings DTensor, which help need not
    from parallax.checkpoint.inspect import Difference, Inspected

WIDTH = 160
"""How wide tables are where there is no terminal."""


def inspect(
    directory: Annotated[
        Path, typer.Argument(help="A checkpoint, or a folder of them: the newest is taken.")
    ],
    other: Annotated[Path | None, typer.Argument(help="Another, to compare it with.")] = None,
    pattern: Annotated[
        str | None, typer.Option("--filter", help="Only tensors with such keys: 'params/*'.")
    ] = None,
    verify: Annotated[bool, typer.Option(help="Compare all checksums.")] = True,
) -> None:
    """Shows and verifies a checkpoint, or compares two; exit code 1 when damaged or different."""
    from parallax.checkpoint.inspect import Inspected, compared, difference

    out = Console()
    if not out.is_terminal:
        out = Console(width=WIDTH)
    with Inspected(directory, pattern) as one:
        if other is None:
            _show(out, one)
            _verify([one], verify)
            return
        with Inspected(other, pattern) as two:
            _verify([one, two], verify)
            with bar("comparing", compared(one, two), Console(stderr=True)) as advance:
                found = difference(one, two, advance)
            _show_difference(out, one, two, found)
            if found:
                raise typer.Exit(1)


@contextmanager
def bar(what: str, total: int, console: Console) -> Iterator[Callable[[int], None]]:
    """Shows how many bytes are done, on a terminal; nothing elsewhere.

    Args:
        what: What is done to them.
        total: How many there are.
        console: Where to show it.
    """
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    # Without a terminal rich would print the last state of the bar as a line of its own.
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def _verify(checkpoints: list[Inspected], verify: bool) -> None:
    faults = []
    if verify:
        with bar("verifying", sum(c.size for c in checkpoints), Console(stderr=True)) as advance:
            faults = [fault for c in checkpoints for fault in c.faults(advance)]
    raise_all(faults)
    for checkpoint in checkpoints:
        if checkpoint.index is None:
            said = f"{checkpoint.format} has no checksums; every tensor has its place in the files"
        elif not verify:
            said = "not verified"
        else:
            said = f"all checksums of {len(checkpoint.rows)} tensors are right"
        typer.echo(f"{checkpoint.directory}: {said}")


def _show(out: Console, found: Inspected) -> None:
    head = Table.grid(padding=(0, 2))
    for what, value in _head(found):
        head.add_row(what, Text(str(value)))
    out.print(head)
    table = Table("key", "shape", "dtype", "bytes", "file", "pieces")
    for column in table.columns:
        column.overflow = "fold"
    for name in ("bytes", "pieces"):
        next(c for c in table.columns if c.header == name).justify = "right"
    for key, row in found.rows.items():
        # As Text, since names may hold brackets, which rich takes for markup.
        shape = " x ".join(map(str, row.spec.shape)) or "scalar"
        cells = (key, shape, row.spec.dtype, f"{row.spec.size:,}", row.file, str(row.pieces))
        table.add_row(*map(Text, cells))
    out.print(table)
    totals = Table("kind", "tensors", "bytes", "")
    for kind, total in found.totals().items():
        totals.add_row(Text(kind), f"{total.tensors:,}", f"{total.size:,}", shown(total.size))
    count = len(found.rows)
    totals.add_row("all", f"{count:,}", f"{found.size:,}", shown(found.size))
    out.print(totals)


def _head(found: Inspected) -> Iterator[tuple[str, Any]]:
    yield "checkpoint", found.directory
    yield "format", found.format
    index = found.index
    if index is not None:
        yield "composition", index.composition or "none"
        yield "step", index.step
        ranks = math.prod(index.world.values())
        axes = " x ".join(f"{axis} {size}" for axis, size in index.world.items() if size > 1)
        yield "world", f"{ranks} rank{'s' * (ranks != 1)}{f': {axes}' * bool(axes)}"
        yield "optimizer", index.optimizer or "none"
        yield "kinds", ", ".join(index.kinds)


def _show_difference(out: Console, one: Inspected, two: Inspected, found: Difference) -> None:
    from parallax.checkpoint.inspect import Change

    def table(title: str, rows: list[Change]) -> None:
        if rows:
            made = Table("", str(one.directory), str(two.directory), title=title)
            for column in made.columns:
                column.overflow = "fold"
            for row in rows:
                made.add_row(*(Text(str(cell)) for cell in row))
            out.print(made)

    table("said of the run", found.about)
    table(
        "in one only",
        [Change(key, "there", "") for key in found.only_one]
        + [Change(key, "", "there") for key in found.only_other],
    )
    table(
        "dtypes and shapes",
        [
            Change(row.what, *(f"{s.dtype} of {s.shape}" for s in (row.one, row.other)))
            for row in found.specs
        ],
    )
    if found.values:
        made = Table("", "largest absolute difference", title="values")
        for key, largest in found.values.items():
            made.add_row(Text(key), f"{largest:.6g}")
        out.print(made)
    typer.echo(f"{found.same} tensors are equal" + ("" if found else ", and so is all else"))
