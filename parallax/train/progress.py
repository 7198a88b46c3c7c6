"""What a person sees while a job trains: a bar on a terminal, lines of text elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINES = 20
"""How many lines a whole run prints where there is no terminal."""


def peak_memory(device: torch.device) -> int:
    """The most memory this rank has used so far, in bytes: of its GPU, else of its process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # Not on Windows, where torch has no gloo to speak of either.

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Display:
    """Shows how far a run is, with its loss, speed, memory and time left.

    Args:
        steps: The step the run ends at.
        start: The step it starts after.
        device: Whose memory to show.
        silent: True on all ranks but the first.
        console: Where to write; the standard error stream when left out.
    """

    def __init__(
        self,
        steps: int,
        *,
        start: int,
        device: torch.device,
        silent: bool,
        console: Console | None = None,
    ) -> None:
        self.console = console or Console(stderr=True)
        self.steps = steps
        self.start = start
        self.device = device
        self.silent = silent
        self._bar: Progress | None = None
        if self.console.is_terminal and not silent:
            bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[line]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._bar = bar
            self._task = bar.add_task("", total=steps, completed=start, line="")
        self._begun = time.perf_counter()

    @property
    def every(self) -> int:
        """After how many steps to call `show`; reading the loss makes the host wait."""
        if self._bar and self.device.type == "cpu":
            return 1
        return 10 if self._bar else max(1, (self.steps - self.start) // LINES)

    def show(self, step: int, loss: float, tokens: int) -> None:
        """Shows a step.

        Args:
            step: The step just done.
            loss: Its loss.
            tokens: How many tokens this run has trained on since it started, over all ranks.
        """
        if self.silent:
            return
        passed = time.perf_counter() - self._begun
        memory = peak_memory(self.device) / 2**20
        line = f"loss {loss:.3f}  {tokens / passed:,.0f} tokens/s  {memory:,.0f} MiB"
        if self._bar:
            self._bar.update(self._task, completed=step, line=line)
            return
        left = passed / max(step - self.start, 1) * (self.steps - step)
        self.console.print(
            f"step {step}/{self.steps}  {line}  {left:.0f} s left", highlight=False, soft_wrap=True
        )

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        self._begun = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()
