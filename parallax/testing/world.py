"""A pool of live ranks on this machine, to run functions on: for tests and notebooks."""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch

from parallax.testing.crew import Answer, Crew, Death
from parallax.testing.rank import Failure, Ready, Value
from parallax.testing.wire import pack_call

_GRACE = 2.0


class RankError(RuntimeError):
    """A call failed on a rank: it raised, died, or did not answer in time.

    The message holds the traceback of the rank, `__cause__` the exception itself where it can be
    pickled.

    Attributes:
        rank: The rank that failed first.
    """

    def __init__(self, message: str, rank: int) -> None:
        """Make the error.

        Args:
            message: What happened, on which ranks.
            rank: The rank that failed first.
        """
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        """Return the message alone."""
        return self.args[0]


class World:
    """Live rank processes that run functions together; made by `world` or `pool`."""

    def __init__(self, size: int, *, backend: str, timeout: float) -> None:
        """Describe the world; its processes start when it is entered or first used.

        Args:
            size: Number of ranks.
            backend: Backend of the process group.
            timeout: How long a call may take, in seconds.
        """
        self.size = size
        self.backend = backend
        self.timeout = timeout
        self._crew: Crew | None = None
        self._running = threading.Lock()

    def run(
        self, fn: Callable[..., Any], /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Run a function on every rank.

        When one rank fails, the others get two seconds to answer and are stopped otherwise. A world
        in which not all ranks returned, and not all raised the same kind of error, may hold
        half-finished communication: the next call finds its ranks started afresh.

        Args:
            fn: The function, from anywhere: a module, a test, a notebook cell, a closure.
            *args: Its positional arguments.
            timeout: How long it may take on the slowest rank, in seconds; by default the world's
                own bound.
            **kwargs: Its keyword arguments.

        Returns:
            The results in rank order, with all tensors on the CPU.

        Raises:
            RankError: The call raised or died on a rank, or some rank did not answer in time.
            pickle.PicklingError: The call cannot be sent to the ranks.

        Example:
            >>> two = world(2, backend="gloo")
            >>> with two:  # doctest: +SKIP
            ...     two.run(lambda: torch.distributed.get_rank())
            [0, 1]
        """
        call = pack_call(fn, args, kwargs)
        limit = self.timeout if timeout is None else timeout
        with self._running:
            crew = self._start()
            try:
                crew.say(call)
                answers = crew.hear(limit, _GRACE)
                if len(answers) == self.size:
                    values = [answers[rank] for rank in range(self.size)]
                    if all(isinstance(value, Value) for value in values):
                        return [
                            pickle.loads(value.pickled)
                            for value in values
                            if isinstance(value, Value)
                        ]
                error = self._error(crew, answers, limit)
            except BaseException:
                # Also KeyboardInterrupt: the ranks would answer a call that nobody waits for any
                # more.
                self._kill()
                raise
            kinds = {a.kind if isinstance(a, Failure) else None for a in answers.values()}
            if len(answers) < self.size or len(kinds) > 1 or None in kinds:
                self._kill()
        raise error from error.__cause__

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, in rank order; empty while none are running."""
        return tuple(p.pid for p in self._crew.processes) if self._crew else ()

    def close(self) -> None:
        """End the ranks; a later `run` starts new ones."""
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.close()

    def __enter__(self) -> Self:
        """Start the ranks."""
        with self._running:
            self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the ranks."""
        self.close()

    def __repr__(self) -> str:
        """Return the call that makes this world."""
        return f"world({self.size}, backend={self.backend!r}, timeout={self.timeout!r})"

    def _start(self) -> Crew:
        if self._crew is None:
            # The bound of a collective lies behind that of the call, whose message says more.
            crew = self._crew = Crew(self.size, self.backend, self.timeout + 60)
            try:
                answers = crew.hear(max(self.timeout, 120), _GRACE)
                if list(map(type, answers.values())) != [Ready] * self.size:
                    raise self._error(crew, answers, self.timeout)
            except BaseException:
                self._kill()
                raise
        return self._crew

    def _kill(self) -> None:
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.kill()

    def _error(self, crew: Crew, answers: dict[int, Answer], limit: float) -> RankError:
        silent = [rank for rank in range(self.size) if rank not in answers]
        failed = {r: a for r, a in answers.items() if isinstance(a, Failure | Death)}
        # A death comes first, as the peers of a dead rank fail only because of it.
        ordered = sorted(failed, key=lambda rank: not isinstance(failed[rank], Death))
        lines: list[str] = []
        cause: BaseException | None = None
        if ordered:
            first = failed[ordered[0]]
            lines.append(f"rank {ordered[0]} of {self.size} {_what(first)}")
            if isinstance(first, Failure):
                lines.append(first.trace.rstrip())
                cause = _load(first.pickled)
            lines += [f"rank {rank} {_what(failed[rank])}" for rank in ordered[1:]]
            late = f"had not answered {_GRACE:g} seconds later and was stopped"
        else:
            lines.append(
                f"{len(silent)} of {self.size} ranks did not answer within {limit:g} seconds"
            )
            late = "was stopped"
        stacks = crew.whereabouts(silent)
        for rank in silent:
            stack = f" in:\n{stacks[rank].rstrip()}" if rank in stacks else ""
            lines.append(f"rank {rank} {late}{stack}")
        error = RankError("\n\n".join(lines), ordered[0] if ordered else silent[0])
        error.__cause__ = cause
        return error


def world(n: int, *, backend: str | None = None, timeout: float = 300.0) -> World:
    """Hold n live ranks on this machine, to try and to test distributed code from one process.

    The ranks are processes of their own, with one thread each, in one process group; they live
    until the `with` block ends, so that a call costs under two milliseconds. They end with this
    process, however it ends.

    Args:
        n: Number of ranks.
        backend: Backend of the process group; by default NCCL for CUDA tensors and gloo for CPU
            tensors where this machine has n GPUs, otherwise gloo.
        timeout: How long a call may take, in seconds.

    Returns:
        A context manager whose `run(fn, *args)` runs a function on every rank.

    Raises:
        ValueError: n is below one.

    Example:
        >>> world(2, backend="gloo")
        world(2, backend='gloo', timeout=300.0)
        >>> def total(x):
        ...     y = torch.tensor(float(x + torch.distributed.get_rank()))
        ...     torch.distributed.all_reduce(y)
        ...     return y.item()
        >>> with world(2) as w:  # doctest: +SKIP
        ...     w.run(total, 10)
        [21.0, 21.0]
    """
    if n < 1:
        raise ValueError(f"world({n}) was asked for, and a world has one rank at least.")
    if backend is None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        backend = "cpu:gloo,cuda:nccl" if gpus >= n else "gloo"
    return World(n, backend=backend, timeout=timeout)


@functools.cache
def pool(n: int) -> World:
    """Return the shared world of n ranks, kept until this process ends: what test fixtures use.

    Args:
        n: Number of ranks.

    Returns:
        The same world at every call, which starts its ranks at its first `run`.

    Example:
        >>> pool(2) is pool(2)
        True
    """
    return world(n)


def _what(answer: Failure | Death) -> str:
    return answer.how if isinstance(answer, Death) else f"raised {answer.summary}"


def _load(pickled: bytes | None) -> BaseException | None:
    if pickled is None:
        return None
    try:
        return pickle.loads(pickled)
    except Exception:  # noqa: BLE001  (reading runs code of the exception's class)
        # Its class exists on the rank only; the message has the traceback anyway.
        return None
