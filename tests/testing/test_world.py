"""The pool of ranks: results in order, failures with their reasons, and nothing left behind."""

from __future__ import annotations

import functools
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallax.testing import RankError, World, pool, wire, world

pytestmark = pytest.mark.ranks
SCALE = 10
ROOT = str(Path(__file__).parents[2])


class BoomError(Exception):
    """Its arguments are not what __init__ takes, so that it cannot be unpickled."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def scaled_rank() -> int:
    return SCALE * dist.get_rank()


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    with world(2, backend="gloo", timeout=60) as w:
        yield w


def test_results_come_in_rank_order_with_this_modules_globals(two: World) -> None:
    assert two.run(scaled_rank) == [0, 10]


def test_closures_lambdas_partials_and_arguments(two: World) -> None:
    offset = torch.tensor([1.0, 2.0])

    def total(x: float, *, y: float) -> torch.Tensor:
        out = offset + x + y + dist.get_rank()
        dist.all_reduce(out)
        return out

    for result in two.run(total, 1.0, y=2.0):
        assert torch.equal(result, torch.tensor([9.0, 11.0]))
    assert two.run(lambda: dist.get_rank() + 1) == [1, 2]
    assert two.run(functools.partial(pow, 2), 3) == [8, 8]
    assert two.run(os.path.basename, "a/b") == ["b", "b"]


def test_ranks_run_one_thread_and_say_who_they_are(two: World) -> None:
    def facts() -> tuple[int, str, str]:
        return torch.get_num_threads(), os.environ["RANK"], os.environ["WORLD_SIZE"]

    assert two.run(facts) == [(1, "0", "2"), (1, "1", "2")]


def test_launch_inside_a_rank_finds_the_world(two: World) -> None:
    def facts() -> tuple[int, int, int]:
        from parallax.launch import launch

        here = launch()
        return here.rank, here.world, here.local_rank

    assert two.run(facts) == [(0, 2, 0), (1, 2, 1)]


def test_classes_made_here_come_back_as_themselves(two: World) -> None:
    class Point:
        pass

    assert all(type(point) is Point for point in two.run(Point))


def test_an_exception_comes_back_while_peers_wait_in_a_collective(two: World) -> None:
    def uneven() -> None:
        if dist.get_rank() == 1:
            raise KeyError("the reason")
        dist.all_reduce(torch.ones(1))

    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        two.run(uneven)
    assert time.monotonic() - start < 5
    text = str(caught.value)
    assert text.startswith("rank 1 of 2 raised KeyError: 'the reason'\n\nTraceback")
    assert 'raise KeyError("the reason")' in text
    assert "rank 0 had not answered 2 seconds later and was stopped in:" in text
    assert "dist.all_reduce(torch.ones(1))" in text
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, KeyError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
    assert two.run(scaled_rank) == [0, 10]


def test_an_exception_that_cannot_be_unpickled_comes_back_as_text(two: World) -> None:
    def fail() -> None:
        raise BoomError(1, 2)

    with pytest.raises(RankError, match=r"of 2 raised BoomError: 1 and 2\n") as e:
        two.run(fail)
    assert e.value.__cause__ is None


@pytest.mark.parametrize(
    ("death", "words"),
    [(lambda: os._exit(3), "exited with code 3"), (None, "was killed by SIGKILL")],
)
def test_a_dead_rank_is_reported_and_replaced(two: World, death: object, words: str) -> None:
    def fall() -> None:
        if dist.get_rank() == 0:
            death() if callable(death) else os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        two.run(fall)
    assert time.monotonic() - start < 5
    assert str(caught.value).startswith(f"rank 0 of 2 {words}")
    assert caught.value.rank == 0
    assert two.run(scaled_rank) == [0, 10]


def test_a_rank_that_died_between_calls_is_reported(two: World) -> None:
    two.run(scaled_rank)
    os.kill(two.pids[1], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
        two.run(scaled_rank)
    assert two.run(scaled_rank) == [0, 10]


def test_the_same_error_on_all_ranks_keeps_them(two: World) -> None:
    def fail() -> None:
        raise ValueError(f"on {dist.get_rank()}")

    two.run(scaled_rank)
    before = two.pids
    with pytest.raises(RankError, match=r"rank (0|1) of 2 raised ValueError: on \1"):
        two.run(fail)
    assert two.run(scaled_rank) == [0, 10]
    assert two.pids == before


def test_an_error_on_one_rank_replaces_all_even_when_the_others_returned(two: World) -> None:
    def unpaired() -> None:
        if dist.get_rank() == 0:
            dist.isend(torch.full((1,), 666.0), dst=1)
        else:
            raise ValueError("before the receive")

    def paired() -> float:
        x = torch.ones(1)
        if dist.get_rank() == 0:
            dist.send(x, dst=1)
        else:
            dist.recv(x, src=0)
        return x.item()

    with pytest.raises(RankError, match="before the receive"):
        two.run(unpaired)
    assert two.run(paired) == [1.0, 1.0]


def test_leaving_the_interpreter_is_an_error(two: World) -> None:
    with pytest.raises(RankError, match="raised SystemExit: 0"):
        two.run(sys.exit, 0)


def test_a_call_has_a_bound(two: World) -> None:
    two.run(scaled_rank)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        two.run(time.sleep, 60, timeout=0.5)
    assert time.monotonic() - start < 4
    assert str(caught.value).startswith(
        "2 of 2 ranks did not answer within 0.5 seconds\n\nrank 0 was stopped"
    )
    assert two.run(scaled_rank) == [0, 10]


def test_results_that_cannot_travel_are_an_error(two: World) -> None:
    def sharded() -> object:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, distribute_tensor

        return distribute_tensor(torch.ones(2), init_device_mesh("cpu", (2,)), [Replicate()])

    with pytest.raises(RankError, match="a DTensor means nothing outside its mesh"):
        two.run(sharded)


def test_calls_that_cannot_travel_are_an_error(two: World) -> None:
    lock = threading.Lock()
    with pytest.raises(pickle.PicklingError, match="Make it inside the function"):
        two.run(lambda: lock)


def test_functions_of_two_modules_of_ones_own(two: World, tmp_path: Path) -> None:
    """Each module is sent by value, one inside the other; a lock taken twice would wait forever."""
    found = []
    for name, text in (("outer", "def call(f): return f()"), ("inner", "def one(): return 1")):
        path = tmp_path / f"two_modules_{name}.py"
        path.write_text(text + "\n")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found.append(module)
    outer, inner = found
    assert two.run(outer.call, inner.one) == [1, 1]


def test_without_cloudpickle_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_cloudpickle", lambda: None)
    with pytest.raises(pickle.PicklingError, match=r"parallax-torch\[testing\]"):
        wire.pack_call(lambda: 1, (), {})
    assert pickle.loads(wire.pack_call(scaled_rank, (), {}))[0] is scaled_rank


def test_five_hundred_calls_are_cheap_and_leak_nothing(two: World) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    mine, theirs = descriptors(), two.run(descriptors)
    times = []
    for _ in range(500):
        start = time.perf_counter()
        two.run(lambda: None)
        times.append(time.perf_counter() - start)
    # The median: the machine may be busy with something else for some of them.
    assert sorted(times)[250] < 2e-3
    assert (descriptors(), two.run(descriptors)) == (mine, theirs)


def test_worlds_leave_no_descriptor_process_or_folder(tmp_path: Path) -> None:
    # In a process of its own, so that descriptors other tests open do not count.
    text = """
import os, tempfile
from parallax.testing import world
def facts():
    return len(os.listdir("/proc/self/fd")), os.listdir(tempfile.gettempdir())
before = facts()
for _ in range(2):
    with world(1, backend="gloo") as w:
        w.run(os.getpid)
        pid = w.pids[0]
    assert not os.path.exists(f"/proc/{pid}")
assert facts() == before, (before, facts())
"""
    run_script(text, tmp_path)


SCRIPT = """
import os, signal, sys, time
import torch.distributed as dist
from parallax.testing import pool
def main_function():
    return dist.get_rank()
w = pool(2)
assert w.run(main_function) == [0, 1]
print(*w.pids, flush=True)
"""
HANG = "time.sleep(60) if dist.get_rank() == 0 else dist.barrier()"


def run_script(text: str, tmp_path: Path, code: int = 0) -> list[int]:
    path = tmp_path / "script.py"
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        env=os.environ | {"PYTHONPATH": ROOT, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr
    if code == 0:
        assert done.stderr == ""
    return [int(word) for word in done.stdout.split()]


def gone(pids: list[int], within: float) -> bool:
    until = time.monotonic() + within
    while time.monotonic() < until:
        if not any(os.path.exists(f"/proc/{pid}") for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_a_plain_script_without_a_guard_leaves_no_rank(tmp_path: Path) -> None:
    pids = run_script(SCRIPT, tmp_path)
    assert len(pids) == 2
    assert gone(pids, within=0.2)


def test_killing_the_process_ends_its_busy_ranks(tmp_path: Path) -> None:
    text = f"""{SCRIPT}
import threading
threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
def hang():
    {HANG}
w.run(hang)
"""
    pids = run_script(text, tmp_path, code=-signal.SIGKILL)
    assert len(pids) == 2
    assert gone(pids, within=5)
    assert not list(tmp_path.glob("parallax-*"))


def test_interrupting_a_call_ends_its_ranks(tmp_path: Path) -> None:
    text = f"""{SCRIPT}
import threading
threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
def hang():
    {HANG}
try:
    w.run(hang)
except KeyboardInterrupt:
    assert w.pids == ()
"""
    assert gone(run_script(text, tmp_path), within=0.2)


def test_the_pool_is_shared_and_a_world_needs_a_rank() -> None:
    assert pool(3) is pool(3)
    assert pool(3).pids == ()
    with pytest.raises(ValueError, match=r"world\(0\) was asked for"):
        world(0)


@pytest.mark.gpu
def test_ranks_on_gpus_speak_nccl_and_send_results_home() -> None:
    size = torch.cuda.device_count()

    def total() -> tuple[torch.Tensor, torch.nn.Parameter, str]:
        x = torch.ones(2, device="cuda") * dist.get_rank()
        dist.all_reduce(x)
        return x, torch.nn.Parameter(x.clone()), dist.get_backend_config()

    with world(size) as w:
        results = w.run(total)
    for x, parameter, backend in results:
        assert x.device.type == parameter.device.type == "cpu"
        assert torch.equal(x, torch.full((2,), size * (size - 1) / 2))
        assert isinstance(parameter, torch.nn.Parameter)
        assert backend == "cpu:gloo,cuda:nccl"
