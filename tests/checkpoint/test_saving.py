"""Saving: beside training, rotated, refused before anything is written; and what goes along."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist

from parallax import DataError, ParallaxError, compose, dp, load, schedules, zero
from parallax.checkpoint import latest, read_index
from parallax.core.slices import local
from parallax.testing import World, toys

pytestmark = pytest.mark.ranks


def build(seed: int = 0, transform: Any = None) -> Any:
    torch.manual_seed(seed)
    model = toys.Mlp()
    return (transform or zero(3))(model, toys.momentum(model))


def train(boosted: Any, step: int) -> None:
    boosted.train_step(toys.square, boosted.shard(toys.points(4, step)))


def weights(boosted: Any) -> list[torch.Tensor]:
    return [local(p).detach().clone() for p in boosted.params.values()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def refusal(call: Any) -> str:
    try:
        call()
    except ParallaxError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


class Slow:
    """Makes every write of this rank wait until it is let go, or fail."""

    def __init__(self, error: OSError | None = None) -> None:
        self.pieces: Any = importlib.import_module("parallax.checkpoint.pieces")
        self.real = self.pieces._write_all
        self.let_go = False
        self.error = error

    def __enter__(self) -> Self:
        def write(*args: Any) -> None:
            while not self.let_go:
                time.sleep(0.001)
            if self.error is not None:
                raise self.error
            self.real(*args)

        self.pieces._write_all = write
        return self

    def __exit__(self, *_: object) -> None:
        self.pieces._write_all = self.real


# -- beside training -------------------------------------------------------------------------------


def beside(directory: str) -> dict[str, Any]:
    boosted = build()
    train(boosted, 0)
    kept = weights(boosted)
    with Slow() as slow:
        saving = boosted.save(directory, asynchronous=True)
        early = saving.done(), saving.progress, Path(directory).exists()
        for step in range(1, 4):
            train(boosted, step)
        slow.let_go = True
        path = saving.result(timeout=60)
    late = saving.done(), saving.progress, path == Path(directory)
    other = build(1)
    other.load_(directory)
    same = equal(kept, weights(other))
    return {"early": early, "late": late, "same": same, "step": other.step}


def test_training_goes_on_while_the_state_of_the_call_is_written(
    world2: World, tmp_path: Path
) -> None:
    for row in world2.run(beside, str(tmp_path / "c")):
        assert row["early"] == (False, 0.0, False)
        assert row["late"] == (True, 1.0, True)
        assert row["same"]
        assert row["step"] == 1


def one_after_the_other(directory: str) -> list[int]:
    boosted = build()
    for step in range(3):
        train(boosted, step)
        boosted.save(f"{directory}/{step}", asynchronous=True)
    boosted.load_(f"{directory}/2")  # which waits for it
    return [read_index(Path(directory) / f"{step}").step for step in range(3)]


def test_a_second_save_and_a_load_wait_for_the_first(world2: World, tmp_path: Path) -> None:
    assert world2.run(one_after_the_other, str(tmp_path)) == [[1, 2, 3]] * 2


def failing(directory: str) -> dict[str, str]:
    boosted = build()
    found = {}
    for verb in ("save", "load_", "result"):
        train(boosted, 0)
        error = OSError(28, "No space left on device") if dist.get_rank() else None
        with Slow(error) as slow:
            saving = boosted.save(f"{directory}/{verb}", asynchronous=True)
            train(boosted, 1)  # an error does not disturb training
            slow.let_go = True
            call = saving.result if verb == "result" else None
            path = f"{directory}/next"
            found[verb] = refusal(call or (lambda p=path, v=verb: getattr(boosted, v)(p)))
        if verb == "result":
            boosted.saving = None
    boosted.save(f"{directory}/after")  # once said, an error is done with
    return found


def test_errors_surface_at_the_next_call_on_every_rank(world2: World, tmp_path: Path) -> None:
    for found in world2.run(failing, str(tmp_path)):
        for verb, text in found.items():
            assert text == (
                f"CheckpointError: cannot write a checkpoint to {tmp_path / verb}: rank 1: "
                "[Errno 28] No space left on device.\n\nCheck that the path exists for every rank, "
                "is writable and has room. Nothing that was there before has been changed."
            )
    assert [p.name for p in tmp_path.iterdir()] == ["after"]


def ends_at_once(directory: str) -> None:
    code = f"""
import parallax, torch, time
from parallax.testing import toys
parallax.launch()
model = toys.Mlp()
boosted = parallax.dp()(model, toys.momentum(model))
import parallax.checkpoint.pieces as pieces
real = pieces._write_all
def write(*args):
    time.sleep(0.05)
    real(*args)
pieces._write_all = write
boosted.save({directory!r}, asynchronous=True)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_program_that_ends_waits_for_its_checkpoint(tmp_path: Path) -> None:
    ends_at_once(str(tmp_path / "c"))
    assert read_index(tmp_path / "c").step == 0


def test_an_error_that_nobody_asked_for_is_said_at_the_end(tmp_path: Path) -> None:
    code = f"""
import parallax
from parallax.testing import toys
import parallax.checkpoint.pieces as pieces
def write(*args):
    raise OSError(28, "No space left on device")
pieces._write_all = write
parallax.launch()
model = toys.Mlp()
boosted = parallax.dp()(model, toys.momentum(model))
boosted.save({str(tmp_path / "c")!r}, asynchronous=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr == (
        f"CheckpointError: cannot write a checkpoint to {tmp_path / 'c'}: rank 0: [Errno 28] No "
        "space left on device.\n\nCheck that the path exists for every rank, is writable and has "
        "room. Nothing that was there before has been changed.\n"
    )


def by_hand(directory: str) -> str:
    """A hand-written loop is told, too."""
    boosted = build()
    boosted.attach(Counter(7), name="mine")
    boosted.save(directory)
    other = build(1)
    other.load_(directory)
    other.model(toys.points(4)).square().mean().backward()
    return refusal(other.optimizer.step)


def test_a_loop_by_hand_does_not_forget_either(world2: World, tmp_path: Path) -> None:
    for text in world2.run(by_hand, str(tmp_path / "c")):
        assert text.startswith("StepError: the checkpoint holds the state of mine, and nothing")


def reused(directory: str) -> bool:
    from parallax.checkpoint.save import _STAGING

    boosted = build()
    boosted.save(f"{directory}/a", asynchronous=True).result()
    before = _STAGING[boosted]._memory.data_ptr()
    boosted.save(f"{directory}/b", asynchronous=True).result()
    return before == _STAGING[boosted]._memory.data_ptr()


def test_the_copy_in_host_memory_is_allocated_once(world2: World, tmp_path: Path) -> None:
    assert world2.run(reused, str(tmp_path)) == [True, True]


# -- folders of checkpoints ------------------------------------------------------------------------


def rotated(directory: str) -> tuple[list[str], int]:
    boosted = build()
    for step in range(5):
        train(boosted, step)
        saving = boosted.save(directory, keep=2, asynchronous=step % 2 == 0)
        assert saving.directory == Path(directory) / f"step-{step + 1:08d}"
    saving.result()
    other = build(1)
    other.load_(directory)
    dist.barrier()
    return sorted(p.name for p in Path(directory).iterdir()), other.step


def test_the_newest_are_kept_and_the_newest_is_loaded(world2: World, tmp_path: Path) -> None:
    for found in world2.run(rotated, str(tmp_path / "run")):
        assert found == (["step-00000004", "step-00000005"], 5)
    assert latest(tmp_path / "run") == tmp_path / "run" / "step-00000005"


def went_back(directory: str) -> str:
    boosted = build()
    for step in range(3):
        train(boosted, step)
        boosted.save(directory, keep=5)
    boosted.load_(f"{directory}/step-00000001")
    train(boosted, 9)
    boosted.save(directory, keep=5)
    found = latest(directory)
    dist.barrier()
    return "" if found is None else found.name


def test_the_newest_is_what_was_completed_last(world2: World, tmp_path: Path) -> None:
    """A run that went back to step 1 goes on from its own step 2, not from the old step 3."""
    assert world2.run(went_back, str(tmp_path / "run")) == ["step-00000002"] * 2


def auto(directory: str) -> tuple[Any, ...]:
    def make() -> Any:
        torch.manual_seed(3)
        return toys.Mlp()

    begun = load(directory, zero(2), make, toys.momentum, resume="auto")
    train(begun, 0)
    begun.save(directory, keep=1)
    dist.barrier()
    resumed = load(directory, dp(), make, toys.momentum, resume="auto")
    said = load(directory, None, make, toys.momentum)
    missing = refusal(lambda: load(f"{directory}/no", zero(2), make))
    nothing = refusal(lambda: load(f"{directory}/no", None, make, resume="auto"))
    return begun.load_(f"{directory}/no", resume="auto"), resumed.step, repr(said), missing, nothing


def test_load_makes_a_pair_that_goes_on_or_begins(world2: World, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for found in world2.run(auto, str(run)):
        assert found == (
            False,
            1,
            "<boosted Mlp at step 1: zero(2)>",
            (
                f"CheckpointError: no checkpoint at {run / 'no'}: there is no such directory; "
                "beside "
                "it: step-00000001.\n\nGive the directory that boosted.save wrote."
            ),
            (
                f"CheckpointError: load was given no transform, and there is no checkpoint at "
                f"{run / 'no'} to take one from.\n\nGive the transform to begin with."
            ),
        )


# -- refused before anything is written ------------------------------------------------------------


def bad_calls(directory: str) -> list[str]:
    boosted = build()
    return [
        refusal(lambda: boosted.save(directory, keep=0, shard_size="lots", kinds=("params", "x"))),
        refusal(lambda: boosted.save(f"{directory}-{dist.get_rank()}")),
        refusal(lambda: boosted.load_(directory, kinds=("weights",))),
        refusal(lambda: boosted.load_(directory, resume="maybe")),
    ]


def test_bad_calls_are_refused_with_what_would_do(world2: World, tmp_path: Path) -> None:
    path = tmp_path / "c"
    kinds = "params, buffers, moments, rooms, step, random, attached"
    for found in world2.run(bad_calls, str(path)):
        assert found == [
            (
                "CheckpointError: save was given shard_size='lots'. Give bytes, such as "
                "1073741824 or "
                "'1GiB'.\n\nsave was given keep=0. Give the number of checkpoints to keep, at "
                "least 1."
                f"\n\nsave was given kinds=('params', 'x'). Give some of {kinds}."
            ),
            (
                f"CheckpointError: save was given {path}-0 on rank 0 and {path}-1 on "
                "others.\n\nGive "
                "the same directory on every rank."
            ),
            f"CheckpointError: load_ was given kinds=('weights',).\n\nGive some of {kinds}.",
            "CheckpointError: load_ was given resume='maybe'.\n\nGive 'must' or 'auto'.",
        ]
    assert list(tmp_path.iterdir()) == []


def no_room(directory: str) -> str:
    boosted = build()
    real = shutil.disk_usage
    shutil.disk_usage = lambda path: real(path)._replace(free=100)
    try:
        return refusal(lambda: boosted.save(directory))
    finally:
        shutil.disk_usage = real


def test_a_disk_with_too_little_room_is_found_before_writing(world2: World, tmp_path: Path) -> None:
    for text in world2.run(no_room, str(tmp_path / "c")):
        head, tail = text.split(" bytes was to be written to ")
        assert head.startswith("CheckpointError: a checkpoint of ")
        assert int(head.rsplit(" ", 1)[1].replace(",", "")) > 1000
        assert tail == (
            f"{tmp_path / 'c'}, and its disk has 100 free.\n\nFree some, keep fewer checkpoints, "
            "or give another disk."
        )
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_file_sizes_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    """A true refusal of the system, in the middle of writing."""
    code = f"""
import resource, parallax
from parallax.testing import toys
parallax.launch()
boosted = parallax.dp()(toys.Mlp(200, 300))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    boosted.save({str(tmp_path / "c")!r})
except parallax.CheckpointError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == (
        f"cannot write a checkpoint to {tmp_path / 'c'}: rank 0: [Errno 27] File too large.\n\n"
        "Check that the path exists for every rank, is writable and has room. Nothing that was "
        "there before has been changed.\n"
    ), done.stderr
    assert list(tmp_path.iterdir()) == []


def overwrite(directory: str) -> str:
    return refusal(lambda: build().save(directory))


def test_a_directory_of_something_else_is_not_replaced(world2: World, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    for text in world2.run(overwrite, str(tmp_path)):
        assert text == (
            f"CheckpointError: {tmp_path} exists and is no checkpoint, so it is not replaced.\n\n"
            "Give a directory of its own."
        )
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def others(directory: str) -> dict[str, Any]:
    boosted = build()
    train(boosted, 0)
    found: dict[str, Any] = {}
    boosted.save(f"{directory}/c")
    if dist.get_rank() == 0:
        (Path(directory) / "c" / "tokenizer.json").write_text("{}")
        (Path(directory) / "big").mkdir()
        (Path(directory) / "link").symlink_to("big")
    dist.barrier()
    found["other files"] = refusal(lambda: boosted.save(f"{directory}/c"))
    found["in a checkpoint"] = refusal(lambda: boosted.save(f"{directory}/c", keep=2))
    for _ in range(2):
        boosted.save(f"{directory}/link")
    boosted.save(f"{directory}/weights", kinds=("params", "buffers"))
    found["fewer kinds"] = refusal(lambda: boosted.load_(f"{directory}/weights"))
    found["no kinds"] = refusal(lambda: boosted.load_(f"{directory}/weights", kinds=()))
    dist.barrier()
    found["left"] = sorted(p.name for p in Path(directory).iterdir())
    return found


def test_nothing_of_others_is_replaced_or_hidden(world2: World, tmp_path: Path) -> None:
    for found in world2.run(others, str(tmp_path)):
        path = tmp_path / "c"
        assert found["other files"] == (
            f"CheckpointError: {path} holds what is no part of a checkpoint, so it is not "
            "replaced: "
            "tokenizer.json.\n\nGive a directory of its own."
        )
        assert found["in a checkpoint"] == (
            f"CheckpointError: save was given keep= and {path}, which is a checkpoint itself and "
            "would hide those in it.\n\nGive a folder of its own for the checkpoints."
        )
        assert found["fewer kinds"] == (
            f"CheckpointError: the checkpoint {tmp_path / 'weights'} does not fit Mlp:\n  it holds "
            "params, buffers only; read them with kinds=('params', 'buffers')\n\nBuild the model "
            "and the optimizer's groups as they were when it was saved, attach what was attached, "
            "or read less of it with kinds=."
        )
        assert found["no kinds"].startswith("CheckpointError: load_ was given kinds=().")
        assert found["left"] == ["big", "c", "link", "weights"]
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "big" / "index.json").is_file()


def lost(directory: str) -> list[str]:
    boosted = build()
    for step in range(2):
        train(boosted, step)
        boosted.save(directory, keep=2)
    newest = Path(directory) / "step-00000002"
    dist.barrier()
    if dist.get_rank() == 0:
        (newest / "index.json").unlink()
    dist.barrier()
    calls = [(directory, "auto"), (directory, "must"), (str(newest), "auto")]
    return [
        refusal(lambda p=p, r=r: boosted.load_(p, resume=r))  # pyright: ignore[reportArgumentType]
        for p, r in calls
    ]


def test_a_lost_index_is_no_reason_to_begin_anew(world2: World, tmp_path: Path) -> None:
    newest = tmp_path / "run" / "step-00000002"
    for found in world2.run(lost, str(tmp_path / "run")):
        assert (
            found
            == [
                (
                    f"CheckpointError: {newest} holds tensors and no index.json, so it is a "
                    "checkpoint "
                    "that was damaged.\n\nRemove it, or load another one by its own path."
                )
            ]
            * 3
        )


def copied(directory: str) -> int:
    boosted = build()
    for step in range(3):
        train(boosted, step)
        boosted.save(f"{directory}/a", keep=3)
    dist.barrier()
    if dist.get_rank() == 0:
        # In reverse order, and without their times.
        for path in sorted(Path(f"{directory}/a").iterdir(), reverse=True):
            shutil.copytree(path, f"{directory}/b/{path.name}", copy_function=shutil.copy)
    dist.barrier()
    boosted.load_(f"{directory}/b")
    return boosted.step


def test_a_copied_folder_has_the_same_newest(world2: World, tmp_path: Path) -> None:
    assert world2.run(copied, str(tmp_path)) == [3, 3]


# -- what goes along -------------------------------------------------------------------------------


def late_schedule(directory: str, early: bool) -> tuple[list[float], list[float]]:
    """Learning rates of the run that went on, and of one whose schedule is made before or after."""

    def schedule(boosted: Any) -> Any:
        return boosted.attach(schedules.cosine(boosted.optimizer, steps=9, warmup=2))

    def rates(boosted: Any, made: Any, steps: int) -> list[float]:
        found = []
        for step in range(steps):
            found.append(boosted.optimizer.param_groups[0]["lr"])
            train(boosted, step)
            made.step()
        return found

    boosted = build()
    made = schedule(boosted)
    rates(boosted, made, 4)
    boosted.save(directory)
    other = build(1)
    again = schedule(other) if early else None
    other.load_(directory)
    return rates(boosted, made, 3), rates(other, again or schedule(other), 3)


@pytest.mark.parametrize("early", [True, False])
def test_a_schedule_goes_on_whenever_it_is_made(early: bool, world2: World, tmp_path: Path) -> None:
    for through, resumed in world2.run(late_schedule, str(tmp_path / "c"), early):
        assert through == resumed
        assert len(set(through)) == 3


class Counter:
    """A user's own thing with state."""

    def __init__(self, count: int = 0) -> None:
        self.state: Any = {"count": count, "seen": {1: (2, 3)}, "weights": torch.ones(2)}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        if state["count"] < 0:
            raise DataError("a negative count.\n\nCount upwards.")
        self.state = state


def along(directory: str) -> list[Any]:
    boosted = build()
    mine = boosted.attach(Counter(7), name="mine")
    boosted.save(directory)
    other = build(1)
    other.load_(directory)
    found: list[Any] = [refusal(lambda: train(other, 0)), list(other.along.waiting)]
    counter = other.attach(Counter(), name="mine")
    train(other, 0)
    found += [counter.state["count"], counter.state["seen"] == mine.state["seen"]]
    found += [torch.equal(counter.state["weights"], torch.ones(2))]
    third = build(1)
    third.load_(directory)  # which waits for a Counter, and then is asked for less
    third.load_(directory, kinds=("params", "buffers", "moments", "rooms", "step", "random"))
    train(third, 0)
    return found


def test_state_that_waits_is_given_or_asked_for(world2: World, tmp_path: Path) -> None:
    for found in world2.run(along, str(tmp_path / "c")):
        assert found == [
            (
                "StepError: the checkpoint holds the state of mine, and nothing of that name was "
                "attached, so that training would not go on as it was.\n\nMake boosted.loader(..., "
                "name=...) and boosted.attach(scheduler, name=...) as in the run that saved it, or "
                "load without them: boosted.load_(directory, kinds=('params', 'buffers', "
                "'moments', "
                "'rooms', 'step', 'random'))."
            ),
            ["mine"],
            7,
            True,
            True,
        ]


def attached_wrongly(directory: str) -> list[str]:
    boosted = build()
    boosted.attach(Counter(), name="mine")
    odd = Counter()
    odd.state = {"it": print}
    found = [
        refusal(lambda: boosted.attach(Counter(), name="mine")),
        refusal(lambda: boosted.attach(object())),
    ]
    boosted.attach(odd)
    found.append(refusal(lambda: boosted.save(directory)))
    plain = build()
    plain.save(directory)
    found.append(refusal(lambda: boosted.load_(directory)))
    return found


def test_what_cannot_go_along_is_named(world2: World, tmp_path: Path) -> None:
    for found in world2.run(attached_wrongly, str(tmp_path / "c")):
        assert found == [
            (
                "CheckpointError: attach was given a Counter as 'mine', and a Counter has this "
                "name."
                "\n\nGive name= another one."
            ),
            (
                "CheckpointError: attach was given a object without state_dict and load_state_dict."
                "\n\nWhat goes along into checkpoints has state_dict() and load_state_dict(state)."
            ),
            (
                "CheckpointError: the state holds Counter.it, a builtin_function_or_method, which "
                "is "
                "no plain value.\n\nLet its state_dict() hold numbers, text, tensors, and lists, "
                "tuples, sets and dicts of them only; give the rest again when the object is made."
            ),
            (
                f"CheckpointError: the checkpoint {tmp_path / 'c'} does not fit Mlp:\n  mine is "
                "attached here only\n  Counter is attached here only\n\nBuild the model and the "
                "optimizer's groups as they were when it was saved, attach what was attached, or "
                "read "
                "less of it with kinds=."
            ),
        ]


def refused_along(directory: str) -> tuple[str, bool, int]:
    boosted = build()
    boosted.attach(Counter(7), name="a")
    boosted.attach(Counter(-1), name="b")
    boosted.save(directory)
    other = build(1)
    first, second = Counter(1), Counter(2)
    other.attach(first, name="a")
    other.attach(second, name="b")
    before = weights(other)
    text = refusal(lambda: other.load_(directory))
    same = equal(before, weights(other))
    return text, same, first.state["count"]


def test_a_thing_that_refuses_its_state_stops_all_before_it_begins(
    world2: World, tmp_path: Path
) -> None:
    for found in world2.run(refused_along, str(tmp_path / "c")):
        assert found == ("CheckpointError: a negative count.\n\nCount upwards.", True, 1)


def one_refuses(directory: str) -> tuple[str, int, list[str]]:
    boosted = build()
    boosted.attach(Counter(7), name="mine")
    boosted.save(directory)
    other = build(1)
    counter = Counter(1)
    if dist.get_rank() == 1:
        counter.load_state_dict = refuse
    other.attach(counter, name="mine")
    text = refusal(lambda: other.load_(directory))
    return text, counter.state["count"], list(other.along.waiting)


def refuse(state: Any) -> None:
    if state["count"] == 7:
        raise DataError("not here.\n\nNever.")


def test_what_one_rank_refuses_no_rank_has(world2: World, tmp_path: Path) -> None:
    for found in world2.run(one_refuses, str(tmp_path / "c")):
        assert found == ("CheckpointError: not here.\n\nNever.", 1, [])


def unlike(directory: str) -> list[str]:
    boosted = build()
    first = dist.get_rank() == 0
    nowhere: Any = directory if first else None
    found = [
        refusal(lambda: boosted.save(directory, keep=3 if first else None)),
        refusal(lambda: boosted.save(directory, asynchronous=first)),
        refusal(lambda: boosted.save(nowhere)),
        refusal(lambda: boosted.load_(directory, resume="must" if first else "auto")),
    ]
    dist.barrier()
    return found


def test_calls_that_differ_are_refused_and_hang_nowhere(world2: World, tmp_path: Path) -> None:
    for found in world2.run(unlike, str(tmp_path / "c"), timeout=60):
        assert found[0] == (
            "CheckpointError: save was given keep=3 and None on different ranks.\n\nGive the same "
            "on every rank."
        )
        assert "asynchronous=True and False" in found[1]
        assert "rank 1: TypeError" in found[2]
        assert "resume='must' and 'auto'" in found[3]


def a_folder_in_use(directory: str) -> list[str]:
    boosted = build()
    boosted.save(f"{directory}/best")
    for step in range(3):
        train(boosted, step)
        boosted.save(directory, keep=1)
        if step == 0 and dist.get_rank() == 0:
            (Path(directory) / "step-00000001" / "notes.txt").write_text("mine")
        dist.barrier()
    return sorted(p.name for p in Path(directory).iterdir())


def test_rotation_removes_only_what_it_made(world2: World, tmp_path: Path) -> None:
    for found in world2.run(a_folder_in_use, str(tmp_path / "run")):
        assert found == ["best", "step-00000001", "step-00000003"]


def interrupted(directory: str) -> bool:
    """Ctrl-C while waiting: the thread goes on, and the pair must not forget it."""
    boosted = build()
    with Slow() as slow:
        saving = boosted.save(directory, asynchronous=True)
        real, saving.result = saving.result, interrupt
        try:
            boosted.save(f"{directory}-2")
        except KeyboardInterrupt:
            kept = boosted.saving is saving
        saving.result = real
        slow.let_go = True
        boosted.save(f"{directory}-2")
    return kept and saving.done() and boosted.saving is None


def interrupt(timeout: float | None = None) -> Path:
    raise KeyboardInterrupt


def test_an_interrupted_wait_forgets_no_saving(world2: World, tmp_path: Path) -> None:
    assert world2.run(interrupted, str(tmp_path / "c")) == [True, True]


def nested(directory: str) -> list[str]:
    boosted = build()
    train(boosted, 0)
    parameter = next(iter(boosted.params.values()))
    boosted.optimizer.state[parameter]["avg"] = {"m": torch.ones(1)}
    found = [refusal(lambda: boosted.save(directory))]
    del boosted.optimizer.state[parameter]["avg"]
    boosted.optimizer.param_groups[0]["kind"] = print
    found.append(refusal(lambda: boosted.save(directory)))
    found.append(refusal(lambda: boosted.attach(Counter(), name="a/b")))
    return found


def test_state_that_would_not_come_back_is_refused(world2: World, tmp_path: Path) -> None:
    for found in world2.run(nested, str(tmp_path / "c")):
        assert found[0].startswith(
            "CheckpointError: the optimizer SGD keeps a dict as avg of layers.0.weight, and a "
        )
        assert found[1].startswith(
            "CheckpointError: the optimizer has the setting kind=<built-in function print>, a "
            "builtin_function_or_method, and a checkpoint holds numbers and text."
        )
        assert found[2] == (
            "CheckpointError: attach was given name='a/b'.\n\nGive a text without a slash."
        )
    assert list(tmp_path.iterdir()) == []


def busy(directory: str) -> str:
    from parallax import ema

    boosted = build(transform=compose(zero(2), ema(0.9)))
    train(boosted, 0)
    with boosted.averaged():
        return refusal(lambda: boosted.save(directory))


def test_saving_inside_averaged_is_refused(world2: World, tmp_path: Path) -> None:
    for text in world2.run(busy, str(tmp_path / "c")):
        assert text.startswith("StepError: save was called inside boosted.averaged()")
