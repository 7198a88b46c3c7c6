"""The main job, as every rank runs it: read text, boost a model, train it, judge it, keep it."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Subset

from parallax import launch, parse
from parallax.errors import DataError, ParallaxError
from parallax.train.curve import Curve, draw, require_plotting
from parallax.train.decoder import Decoder, size
from parallax.train.options import Job
from parallax.train.progress import Display
from parallax.train.recipe import adamw, schedule
from parallax.train.restart import NAME, Run, begun, checkpoints, put_aside, restarted
from parallax.train.sample import generate
from parallax.train.text import Corpus, Windows, corpus, unigram_entropy

if TYPE_CHECKING:
    from parallax import Boosted


class Outcome(NamedTuple):
    """How a run ended; losses in nats per byte."""

    step: int
    held_out_before: float
    held_out: float
    unigram_entropy: float
    seconds: float


def check(job: Job, world: int) -> None:
    """Finds what would stop a job, before any process starts.

    Args:
        job: The job.
        world: How many ranks will run it.

    Raises:
        ParallaxError: The composition does not fit the ranks, an option is not as it has to be,
            there is too little text, or no checkpoint to resume from.
    """
    parse(job.compose).plan(world)
    _check_options(job)
    text = corpus(job.data, limit=job.data_limit)
    _windows(text, job)
    _begun(job, Run(_identity(job, text)))


def next_byte_loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    """Summed loss of predicting each byte from those before it, and how many there are."""
    scores = model(batch[:, :-1])
    targets = batch[:, 1:].flatten()
    loss = functional.cross_entropy(scores.flatten(0, 1).float(), targets, reduction="sum")
    return loss, targets.numel()


def run(job: Job) -> Outcome:
    """Runs the job; every rank calls it.

    Args:
        job: What to do.

    Returns:
        How it ended. The job's folder then has loss.csv, loss.png, sample.txt, result.json and
        checkpoints.

    Raises:
        ParallaxError: The job cannot be done as asked.
    """
    begun = time.perf_counter()
    info = launch()
    _check_options(job)
    first = info.rank == 0
    device = torch.device(info.device)
    out = Console(quiet=not first, highlight=False, soft_wrap=True)

    text = corpus(job.data, limit=job.data_limit)
    train, held_out = _windows(text, job)
    entropy = unigram_entropy(text.held_out)
    out.print(
        f"text: {text.source}, {text.files} files, {len(text.train):,} bytes to train on and "
        f"{len(text.held_out):,} held out"
    )

    torch.manual_seed(job.seed)
    with device:
        model = Decoder(size(job.size))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    transform = parse(job.compose)
    boosted = transform(model, adamw(model, job))
    out.print(f"model: {job.size}, {parameters:,} parameters; {transform!r} on {info.world} ranks")

    run = boosted.attach(Run(_identity(job, text)), name=NAME)
    loader = boosted.loader(
        train, batch_size=job.batch_size, shuffle=True, seed=job.seed, drop_last=True, name="train"
    )
    start = _together(lambda: _begun(job, run))
    if start is not None:
        boosted.load_(checkpoints(job.out))
        out.print(f"continued from step {start}")
    elif first:
        job.out.mkdir(parents=True, exist_ok=True)
        aside = put_aside(job.out)
        if aside is not None:
            out.print(f"checkpoints of an earlier run are now in {aside}")
    start = start or 0

    before = evaluate(boosted, held_out, job)
    out.print(f"held-out loss before: {before:.4f} nats per byte")
    curve = Curve(job.out / "loss.csv" if first else None, start=start)
    _train(boosted, loader, curve, job, start=start, device=device, silent=not first)
    after = evaluate(boosted, held_out, job)

    sample = generate(
        boosted.model,
        job.prompt,
        length=job.sample_length,
        window=job.seq,
        device=device,
        temperature=job.temperature,
        seed=job.seed,
    )
    result = Outcome(job.steps, before, after, entropy, time.perf_counter() - begun)
    if first:
        draw(
            curve, job.out / "loss.png", held_out={start: before, job.steps: after}, entropy=entropy
        )
        (job.out / "sample.txt").write_text(sample, encoding="utf-8")
        (job.out / "result.json").write_text(json.dumps(result._asdict(), indent=2) + "\n")
    out.print(f"\n{sample}\n", markup=False)
    out.print(
        f"held-out loss: {after:.4f} nats per byte\n"
        f"unigram entropy of the held-out text: {entropy:.4f} nats per byte\n"
        f"{result.seconds:.0f} s; loss.png, loss.csv, sample.txt and checkpoints are in {job.out}"
    )
    return result


def evaluate(boosted: Boosted, held_out: Subset[Tensor], job: Job) -> float:
    """The mean loss over the held-out windows, the same on every rank."""
    loader = boosted.loader(
        held_out, batch_size=job.batch_size, shuffle=False, seed=job.seed, drop_last=False
    )
    total, left = 0.0, len(held_out)
    for batch in loader:
        count = min(job.batch_size, left)
        total += count * boosted.eval_step(next_byte_loss, batch).item()
        left -= count
    return total / len(held_out)


def _train(
    boosted: Boosted,
    loader: Iterable[Tensor],
    curve: Curve,
    job: Job,
    *,
    start: int,
    device: torch.device,
    silent: bool,
) -> None:
    assert boosted.optimizer is not None
    scheduler = schedule(boosted.optimizer, job, start)
    batches = itertools.islice(_epochs(loader), job.steps - start)
    with Display(job.steps, start=start, device=device, silent=silent) as display:
        for step, batch in enumerate(batches, start + 1):
            rate = float(scheduler.get_last_lr()[0])
            loss = boosted.train_step(next_byte_loss, batch.to(device, non_blocking=True))
            scheduler.step()
            curve.add(step, loss, rate, step * job.batch_size * job.seq)
            if step % display.every == 0 or step == job.steps:
                curve.flush()
                display.show(step, curve.points[-1].loss, (step - start) * job.batch_size * job.seq)
            if step == job.steps or (job.save_every and step % job.save_every == 0):
                curve.flush()
                boosted.save(checkpoints(job.out), keep=job.keep)


def _check_options(job: Job) -> None:
    size(job.size)
    if not job.prompt:
        raise ParallaxError(
            "Generated text was asked for with an empty --prompt; a model needs at least one byte "
            "to continue.\n\nGive --prompt some text."
        )
    require_plotting()


def _epochs(loader: Iterable[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from loader


def _windows(text: Corpus, job: Job) -> tuple[Windows, Subset[Tensor]]:
    """All windows to train on, and evenly spread ones to judge by."""
    train = Windows(text.train, job.seq, name="training text")
    if len(train) < job.batch_size:
        raise DataError(
            f"A batch of {job.batch_size} samples of {job.seq} bytes was asked for; the training "
            f"text has {len(text.train)} bytes, which are {len(train)} samples.\n\n"
            f"Give more text, or a --batch-size of at most {len(train)}."
        )
    held_out = Windows(text.held_out, job.seq, name="held-out text")
    count = min(job.eval_windows, len(held_out))
    return train, Subset(held_out, [i * len(held_out) // count for i in range(count)])


def _identity(job: Job, text: Corpus) -> dict[str, object]:
    digest = hashlib.blake2b(text.train.numpy().tobytes(), digest_size=16).hexdigest()
    return {
        "size": job.size,
        "batch_size": job.batch_size,
        "seq": job.seq,
        "seed": job.seed,
        "text": digest,
    }


def _begun(job: Job, run: Run) -> int | None:
    """The step to continue from; None to begin anew."""
    resume = "auto" if restarted() else job.resume
    step = begun(job.out, run, resume)
    # What a restart finds finished was killed after its last step, and has its results to write.
    if step is not None and (step > job.steps or (step == job.steps and resume == "must")):
        folder = str(checkpoints(job.out))
        raise ParallaxError(
            f"Training to step {job.steps} was asked for; the last checkpoint in {folder!r} is at "
            f"step {step}.\n\nGive --steps more than {step}, or leave out --resume."
        )
    return step


def _together(look: Callable[[], int | None]) -> int | None:
    """What rank 0 finds, or raises, on every rank: before it changes what others would find."""
    found: list[int | ParallaxError | None] = [None]
    if dist.get_rank() == 0:
        try:
            found = [look()]
        except ParallaxError as error:
            found = [error]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(found, src=0)
    (step,) = found
    if isinstance(step, ParallaxError):
        raise step
    return step
