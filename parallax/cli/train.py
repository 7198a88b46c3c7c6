"""`parallax train`: the main job, in as many processes as asked for."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Annotated

import torch
import typer

from parallax.cli.ranks import RankError, start
from parallax.launch import surroundings
from parallax.train.decoder import SIZES
from parallax.train.job import check, run
from parallax.train.options import Job
from parallax.train.restart import put_aside

_DEFAULT = Job()


class Resume(enum.Enum):
    """Whether a job continues."""

    never = "never"
    auto = "auto"
    must = "must"


def train(
    compose: Annotated[
        str | None,
        typer.Option(
            help='A composition, such as "tp(2), zero(2), bf16".',
            show_default="tp(2), zero(2), bf16; without tp where the ranks are odd",
        ),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, help="Processes to start.", show_default="one a GPU; 4 without"),
    ] = None,
    size: Annotated[str, typer.Option(help=f"Model size: {', '.join(SIZES)}.")] = _DEFAULT.size,
    steps: Annotated[int, typer.Option(min=1, help="Step to train to.")] = _DEFAULT.steps,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Samples in a step, over all ranks.")
    ] = _DEFAULT.batch_size,
    seq: Annotated[int, typer.Option(min=1, help="Bytes in a sample.")] = _DEFAULT.seq,
    lr: Annotated[float, typer.Option(min=0, help="Highest learning rate.")] = _DEFAULT.lr,
    warmup: Annotated[
        int, typer.Option(min=0, help="Steps until it is reached.")
    ] = _DEFAULT.warmup,
    weight_decay: Annotated[
        float, typer.Option(min=0, help="Weight decay of matrices.")
    ] = _DEFAULT.weight_decay,
    seed: Annotated[
        int, typer.Option(help="Of weights, sample order and generated text.")
    ] = _DEFAULT.seed,
    data: Annotated[
        Path | None,
        typer.Option(help="A file or folder of text.", show_default="Python's standard library"),
    ] = None,
    data_limit: Annotated[
        int, typer.Option(min=1, help="Bytes of text to read at most.")
    ] = _DEFAULT.data_limit,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to.", show_default="runs/SIZE")
    ] = None,
    resume: Annotated[
        Resume, typer.Option(help="Continue from the last checkpoint in the folder; auto: if any.")
    ] = Resume.never,
    save_every: Annotated[
        int, typer.Option(min=0, help="Steps between checkpoints; 0: at the end only.")
    ] = _DEFAULT.save_every,
    keep: Annotated[
        int, typer.Option(min=1, help="How many of the newest checkpoints stay.")
    ] = _DEFAULT.keep,
    max_restarts: Annotated[
        int,
        typer.Option(min=0, help="How often to start all ranks again after one has died."),
    ] = 0,
    eval_windows: Annotated[
        int, typer.Option(min=1, help="Held-out samples to judge by, at most.")
    ] = _DEFAULT.eval_windows,
    sample_length: Annotated[
        int, typer.Option(min=0, help="Bytes of text to generate.")
    ] = _DEFAULT.sample_length,
    prompt: Annotated[str, typer.Option(help="What they continue.")] = _DEFAULT.prompt,
    temperature: Annotated[
        float, typer.Option(min=0, help="Of the draws; 0 takes the likeliest byte.")
    ] = _DEFAULT.temperature,
) -> None:
    """Trains a small language model on text and writes losses, a sample and a checkpoint."""
    found = surroundings(os.environ)
    inside = found.launcher != "none"
    ranks = found.world if inside else nproc or _processes()
    job = Job(
        compose=_DEFAULT.compose
        if compose is None and ranks % 2 == 0
        else compose or "zero(2), bf16",
        size=size,
        steps=steps,
        batch_size=batch_size,
        seq=seq,
        lr=lr,
        warmup=warmup,
        weight_decay=weight_decay,
        seed=seed,
        data=data,
        data_limit=data_limit,
        out=out or Path("runs") / size,
        resume=resume.value,
        save_every=save_every,
        keep=keep,
        eval_windows=eval_windows,
        sample_length=sample_length,
        prompt=prompt,
        temperature=temperature,
    )
    if inside:
        run(job)
        return
    check(job, ranks)
    if ranks == 1 and not max_restarts:
        run(job)
        return
    if job.resume == "never":
        # Before the ranks start: one that died before it had done so would be started again, and
        # take the earlier run's checkpoints for its own.
        aside = put_aside(job.out)
        if aside is not None:
            typer.echo(f"checkpoints of an earlier run are now in {aside}")
    try:
        start(run, job, nproc=ranks, max_restarts=max_restarts)
    except RankError as error:
        typer.echo(error, err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _processes() -> int:
    return torch.cuda.device_count() or 4
