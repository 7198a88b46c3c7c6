"""Rank processes of this machine, started by torch's own launcher."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from parallax import errors


class RankError(RuntimeError):
    """A rank failed; its text is that of the first rank that did, with its traceback."""


def start(entry: Callable[..., object], *args: object, nproc: int, max_restarts: int = 0) -> None:
    """Runs a function in some new processes, as ranks of one world, and waits for them.

    Args:
        entry: The function, importable by name.
        *args: What to call it with.
        nproc: How many processes.
        max_restarts: How often all are started again after one has failed.

    Raises:
        ParallaxError: A rank raised it; of the same kind and with the same text.
        RankError: A rank failed otherwise. The other ranks have been stopped.
        KeyboardInterrupt: The person stopped it; so have been the ranks.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id="parallax",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        # Without it the machine's own name is looked up, which need not resolve.
        local_addr="localhost",
        max_restarts=max_restarts,
        # "spawn", because threads and an initialised GPU do not survive a fork.
        start_method="spawn",
        monitor_interval=0.1,
    )
    try:
        with tempfile.TemporaryDirectory() as folder, _threads(nproc), _quiet():
            try:
                elastic_launch(config, _rank)(Path(folder), entry, args)
            except ChildFailedError as failed:
                raise _error(Path(folder), failed, attempt=max_restarts) from None
    except SignalException as stopped:
        raise KeyboardInterrupt from stopped


def _rank(folder: Path, entry: Callable[..., object], args: tuple[object, ...]) -> None:
    # An interrupt reaches every process of the terminal, and then again from the launcher; as an
    # exception it would be shown once a rank, from wherever it struck.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        entry(*args)
    except Exception as error:
        # Ranks that wait for a failed one fail as well, a moment later, and the launcher keeps
        # whichever it sees first. With a report from each, the first can be told by its time.
        report = {
            "time": time.time_ns(),
            "kind": type(error).__name__,
            "text": str(error),
            "trace": traceback.format_exc(),
        }
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        (folder / f"{attempt}-{os.environ['RANK']}").write_text(json.dumps(report))
        raise


def _error(folder: Path, failed: ChildFailedError, *, attempt: int) -> Exception:
    """The error of the rank that failed first, in the last attempt."""
    found = folder.glob(f"{attempt}-*")
    reports = {int(path.name.split("-")[1]): json.loads(path.read_text()) for path in found}
    rank, failure = failed.get_first_failure()
    if rank not in reports:
        return RankError(
            f"Rank {rank} ended with exit code {failure.exitcode} and left no traceback."
        )
    rank = min(reports, key=lambda rank: reports[rank]["time"])
    known = getattr(errors, reports[rank]["kind"], None)
    if isinstance(known, type) and issubclass(known, errors.ParallaxError):
        return known(reports[rank]["text"])
    return RankError(f"Rank {rank} failed:\n\n{reports[rank]['trace']}")


@contextlib.contextmanager
def _threads(nproc: int) -> Iterator[None]:
    """Shares the cores out: each rank would otherwise start a thread for every one of them."""
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ["OMP_NUM_THREADS"] = str(max(1, (cores or 1) // nproc))
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the launcher from logging the failure that is about to be raised."""
    # For all loggers at once: torch gives each of its modules a level of its own, and nothing but
    # the launcher runs in this process meanwhile.
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
