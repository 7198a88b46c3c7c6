"""`parallax convert`: a model's weights from one format of checkpoint into another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from parallax.core.amount import shown


def convert(
    source: Annotated[
        Path,
        typer.Argument(help="A directory or file: parallax, ColossalAI, DCP, FSDP, transformers."),
    ],
    target: Annotated[Path, typer.Argument(help="The directory to write, which is not there yet.")],
    to: Annotated[
        Literal["transformers", "dcp", "parallax"], typer.Option(help="The format to write.")
    ],
    dtype: Annotated[
        str | None, typer.Option(help="Converts float tensors: fp64, fp32, fp16 or bf16.")
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(help="Taken off the names, and only names with it; '' keeps all as they are."),
    ] = None,
    buffers: Annotated[
        str | None, typer.Option(help="Which names are buffers, such as '*.running_*'.")
    ] = None,
    shard_size: Annotated[str, typer.Option(help="The most in one file, such as 4GiB.")] = "4GiB",
) -> None:
    """Converts the model part of a checkpoint; only tensors and plain values are unpickled."""
    from parallax.checkpoint.convert import convert as run  # brings DTensor, which help need not
    from parallax.checkpoint.foreign import open_foreign
    from parallax.cli.inspect import bar

    with open_foreign(source, prefix=prefix) as found:
        typer.echo(
            f"{source}: {found.format}, {len(found.specs)} tensors of the model, "
            f"{shown(found.size)}"
        )
        for note in found.notes:
            typer.echo(f"  {note}")
        with bar("converting", found.size, Console(stderr=True)) as advance:
            path = run(
                found,
                target,
                to,
                dtype=dtype,
                buffers=buffers,
                shard_size=shard_size,
                progress=advance,
            )
    typer.echo(f"{path}: written for {to}")
