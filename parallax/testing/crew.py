"""The processes of a world: started together, asked together, ended together."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from parallax.testing.rank import CALL, STOP, WHERE, Failure, Ready, Value, Whereabouts

# Not `-m` and not multiprocessing: neither needs a guard in the caller's script then, which is
# never imported, and the path is complete before the package is looked for.
_BOOT = (
    "import json, sys; a = json.loads(sys.argv[1]); sys.path[:] = a.pop('path'); "
    "from parallax.testing.rank import main; main(**a)"
)
_LAUNCHERS = ("SLURM_", "OMPI_", "PMIX_", "TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_")


class Death(NamedTuple):
    """The process of a rank ended on its own; `how` says by what."""

    how: str


Answer = Value | Failure | Death | Ready


class Crew:
    """Live processes of the ranks of one world."""

    def __init__(self, size: int, backend: str, timeout: float) -> None:
        """Start the processes; `hear` says when they are ready.

        Args:
            size: Number of ranks.
            backend: Backend of the process group.
            timeout: How long a collective may wait, in seconds.
        """
        self._owner = os.getpid()
        self._folder = tempfile.mkdtemp(prefix="parallax-")
        self._lines: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        # Runs at interpreter exit too, so that nothing outlives a world that was not closed.
        self.close = weakref.finalize(
            self, _close, self._owner, self._folder, self._lines, self.processes
        )
        setting = {
            "path": [os.path.abspath(entry) for entry in sys.path],
            "parent": self._owner,
            "size": size,
            "meeting": os.path.join(self._folder, "meeting"),
            "backend": backend,
            "timeout": timeout,
        }
        for rank in range(size):
            ours, theirs = Pipe()
            assert isinstance(ours, Connection)  # Windows has another kind, and no pass_fds
            self._lines.append(ours)
            with theirs:
                command = json.dumps(setting | {"rank": rank, "fd": theirs.fileno()})
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", _BOOT, command],
                        env=_environ(rank, size),
                        stdin=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                    )
                )

    def say(self, call: bytes) -> None:
        """Send a call to all ranks.

        Args:
            call: The pickled call.
        """
        for line in self._lines:
            try:
                line.send_bytes(CALL + call)
            except OSError:
                continue  # the rank is dead, which `hear` reports

    def hear(self, limit: float, grace: float) -> dict[int, Answer]:
        """Wait for one answer of each rank, briefly only once one has failed.

        Args:
            limit: How long to wait, in seconds.
            grace: How long to wait for the others after the first failure, in seconds.

        Returns:
            Answers by rank, in the order in which they came; ranks that did not answer are missing.
        """
        until = time.monotonic() + limit
        waiting = {line: rank for rank, line in enumerate(self._lines)}
        answers: dict[int, Answer] = {}
        while waiting and (left := until - time.monotonic()) > 0:
            # In slices, as a process that a rank forked may keep the line of a dead rank open.
            heard = wait(list(waiting), min(left, 0.25))
            gone = () if heard else [i for i in waiting if self._poll(waiting[i]) is not None]
            for line in (*heard, *gone):
                answer = self._receive(line)  # pyright: ignore[reportArgumentType]
                if isinstance(answer, Whereabouts):
                    continue
                if isinstance(answer, Failure | Death) and not _failed(answers):
                    until = min(until, time.monotonic() + grace)
                answers[waiting.pop(line)] = answer  # pyright: ignore[reportArgumentType]
        return answers

    def whereabouts(self, ranks: list[int], limit: float = 1.0) -> dict[int, str]:
        """Ask ranks that do not answer where they are.

        Args:
            ranks: The ranks to ask.
            limit: How long to wait for all of them, in seconds.

        Returns:
            The stack of the main thread by rank, for those that could say.
        """
        until = time.monotonic() + limit
        stacks: dict[int, str] = {}
        for rank in ranks:
            line = self._lines[rank]
            try:
                line.send_bytes(WHERE)
                while line.poll(max(0.0, until - time.monotonic())):
                    message = line.recv()
                    if isinstance(message, Whereabouts):
                        stacks[rank] = message.stack
                        break
            except (EOFError, OSError):
                continue
        return stacks

    def kill(self) -> None:
        """End all processes at once, wherever they are."""
        for process in self.processes:
            process.kill()
        self.close()

    def _poll(self, rank: int) -> int | None:
        return self.processes[rank].poll()

    def _receive(self, line: Connection) -> Answer | Whereabouts:
        try:
            if line.poll():
                return line.recv()
        except (EOFError, OSError):
            pass
        process = self.processes[self._lines.index(line)]
        try:
            code = process.wait(5)
        except subprocess.TimeoutExpired:
            return Death("closed its connection")
        if code >= 0:
            return Death(f"exited with code {code}")
        return Death(f"was killed by {signal.Signals(-code).name}")


def _failed(answers: dict[int, Any]) -> bool:
    return any(isinstance(answer, Failure | Death) for answer in answers.values())


def _environ(rank: int, size: int) -> dict[str, str]:
    # A launcher's variables describe the world's process, not the ranks; these describe the rank
    # for code that looks.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    # gloo looks its own host name up otherwise, which fails on machines without a network.
    loopback = "lo" if sys.platform == "linux" else "lo0"
    return {"GLOO_SOCKET_IFNAME": loopback} | inherited | own


def _close(
    owner: int,
    folder: str,
    lines: list[Connection],
    processes: list[subprocess.Popen[bytes]],
) -> None:
    if os.getpid() != owner:
        return  # in a fork of the world's process, whose ranks these are not
    for line in lines:
        try:
            line.send_bytes(STOP)
        except OSError:
            continue
    until = time.monotonic() + 5
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for line in lines:
        line.close()
    shutil.rmtree(folder, ignore_errors=True)
