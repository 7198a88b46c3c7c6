"""The loss of every step: kept on the device while training, then as CSV and as a picture."""

from __future__ import annotations

import csv
import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from parallax.errors import ParallaxError, StepError


class Point(NamedTuple):
    """One line of the curve, in the order of the columns of the CSV file."""

    step: int
    loss: float
    learning_rate: float
    tokens: int


class Curve:
    """Losses of a run, in steps.

    Args:
        path: The CSV file; None on ranks that write nothing.
        start: The step a resumed run starts after. Lines of the file beyond it are dropped: they
            came after the checkpoint and are about to be made again.
    """

    def __init__(self, path: Path | None, *, start: int = 0) -> None:
        self.path = path
        self.points = _read(path, start) if path and start and path.exists() else []
        self._waiting: list[tuple[int, Tensor, float, int]] = []
        if path:
            # Beside it first: a run killed while it shortens the file would lose what it keeps.
            new = path.with_name(f".{path.name}.new")
            with new.open("w", newline="") as file:
                csv.writer(file).writerows([Point._fields, *self.points])
            new.replace(path)

    def add(self, step: int, loss: Tensor, learning_rate: float, tokens: int) -> None:
        """Notes a loss without reading it, so that the device is not waited for."""
        self._waiting.append((step, loss.detach(), learning_rate, tokens))

    def flush(self) -> None:
        """Reads the losses noted so far and appends them to the file. Every rank calls it.

        Raises:
            StepError: A loss is not a finite number.
        """
        if not self._waiting:
            return
        losses = torch.stack([loss for _, loss, _, _ in self._waiting]).tolist()
        new = [
            Point(step, loss, rate, tokens)
            for (step, _, rate, tokens), loss in zip(self._waiting, losses, strict=True)
        ]
        self._waiting.clear()
        self.points += new
        if self.path:
            with self.path.open("a", newline="") as file:
                csv.writer(file).writerows(new)
        for point in new:
            if not math.isfinite(point.loss):
                raise StepError(
                    f"Training was asked for; the loss at step {point.step} is {point.loss}, at a "
                    f"learning rate of {point.learning_rate:.3g}.\n\n"
                    f"Lower --lr, or add clip(1.0) to the composition."
                )


def require_plotting() -> None:
    """Checks that pictures can be drawn, before hours of training rather than after.

    Raises:
        ParallaxError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ParallaxError(
            "A picture of the loss was asked for; matplotlib, which draws it, is not installed."
            '\n\nInstall it with: pip install "parallax-torch[train]"'
        )


def draw(curve: Curve, path: Path, *, held_out: Mapping[int, float], entropy: float) -> None:
    """Draws the curve as a PNG file.

    Args:
        curve: The training losses.
        path: The picture to write.
        held_out: Step to loss on the held-out text.
        entropy: The unigram entropy, drawn as a line to compare with.
    """
    # The object interface, and not pyplot: it leaves the caller's backend and figures alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(
        [point.step for point in curve.points],
        [point.loss for point in curve.points],
        linewidth=1,
        label="training",
    )
    axes.plot(list(held_out), list(held_out.values()), "o", label="held out")
    axes.axhline(entropy, linestyle="--", color="gray", label="unigram entropy, held out")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _read(path: Path, last: int) -> list[Point]:
    # A run killed while it wrote may have left half a line, of a step that is made again.
    whole, end, _ = path.read_text().rpartition("\n")
    rows = [
        Point(
            int(row["step"]),
            float(row["loss"]),
            float(row["learning_rate"]),
            int(row["tokens"]),
        )
        for row in csv.DictReader((whole + end).splitlines())
    ]
    return [row for row in rows if row.step <= last]
