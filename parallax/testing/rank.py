"""The process of one rank: joins the process group, then runs what its world sends, in order."""

from __future__ import annotations

import atexit
import os
import pickle
import queue
import shutil
import signal
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from parallax.testing.wire import pack_result


class Ready(NamedTuple):
    """The rank has joined the process group."""


class Value(NamedTuple):
    """The call returned; `pickled` is its result."""

    pickled: bytes


class Failure(NamedTuple):
    """The call raised: its exception in words, with its traceback, pickled where possible."""

    kind: str
    summary: str
    trace: str
    pickled: bytes | None


class Whereabouts(NamedTuple):
    """The stack of the rank's main thread, asked for when the rank does not answer."""

    stack: str


CALL, WHERE, STOP = b"c", b"w", b"s"


def main(
    *, fd: int, parent: int, rank: int, size: int, meeting: str, backend: str, timeout: float
) -> None:
    """Serve a world until it says stop or goes away.

    Args:
        fd: Inherited file descriptor of this rank's end of the connection.
        parent: Process id of the world's process.
        rank: Number of this rank.
        size: Number of ranks.
        meeting: A file in a directory of its own, which the ranks find each other through.
        backend: Backend of the process group.
        timeout: How long a collective may wait, in seconds.
    """
    # Ctrl-C reaches the whole foreground group; the world's process alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    line, calls = _Line(Connection(fd)), queue.SimpleQueue[bytes | None]()
    threading.Thread(target=_listen, args=(line, calls, parent, meeting), daemon=True).start()
    device = None
    if "nccl" in backend:
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    dist.init_process_group(
        backend,
        store=dist.FileStore(meeting, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
        device_id=device,
    )
    line.send(Ready())
    while (call := calls.get()) is not None:
        line.send(_perform(call))
    # A call may have destroyed the group itself.
    if dist.is_initialized():
        dist.destroy_process_group()
    # Taking torch's modules apart costs more than a second, and nothing here is worth it.
    atexit._run_exitfuncs()
    os._exit(0)


class _Line:
    """The connection to the world, on which two threads of this process speak."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._speaking = threading.Lock()

    def send(self, message: Ready | Value | Failure | Whereabouts) -> None:
        with self._speaking:
            self.connection.send(message)


def _listen(line: _Line, calls: queue.SimpleQueue[bytes | None], parent: int, meeting: str) -> None:
    """Take calls in, and leave when the world's process is gone, even from inside a collective."""
    main_thread = threading.main_thread().ident
    try:
        while True:
            # A process forked by the world's process may hold the other end open, so the end of the
            # line is not enough.
            while not line.connection.poll(1.0):
                if os.getppid() != parent:
                    raise EOFError
            message = line.connection.recv_bytes()
            if message[:1] == CALL:
                calls.put(message[1:])
            elif message == WHERE:
                frames = traceback.extract_stack(sys._current_frames().get(main_thread or 0))
                theirs = [frame for frame in frames if frame.filename not in (__file__, "<string>")]
                line.send(Whereabouts("".join(traceback.format_list(theirs))))
            else:
                calls.put(None)
                return
    except (EOFError, OSError):
        shutil.rmtree(os.path.dirname(meeting), ignore_errors=True)
        os._exit(1)


def _perform(call: bytes) -> Value | Failure:
    try:
        fn, args, kwargs = pickle.loads(call)
    except BaseException as error:
        note = "The rank could not read the function or its arguments: can it import their modules?"
        error.add_note(note)
        return _failure(error)
    try:
        return Value(pack_result(fn(*args, **kwargs)))
    except BaseException as error:
        return _failure(error)


def _failure(error: BaseException) -> Failure:
    # The first frame is the one above, which says nothing.
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
    trace = "".join(traceback.format_exception(error))
    pickled: bytes | None
    try:
        pickled = pack_result(error)
        # Exceptions whose __init__ takes other arguments than it passes on can be written, but not
        # read.
        pickle.loads(pickled)
    except Exception:
        pickled = None
    return Failure(type(error).__qualname__, _summary(error), trace, pickled)


def _summary(error: BaseException) -> str:
    text: Any = str(error).strip()
    return (
        f"{type(error).__qualname__}: {text.splitlines()[0]}" if text else type(error).__qualname__
    )
