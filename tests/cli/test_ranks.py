import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from parallax import launch
from parallax.cli.ranks import RankError, start
from parallax.errors import MeshError

pytestmark = pytest.mark.ranks


def rank(how: str) -> None:
    """What the ranks of these tests do: one fails, the others wait for it."""
    info = launch()
    if info.rank == 1 or how == "all":
        if how == "fault":
            raise KeyError("no such key")
        if how == "killed":
            os._exit(3)
        raise MeshError("Asked: this.\n\nDo: that.")
    dist.barrier()


@pytest.mark.parametrize("how", ["one", "all"])
def test_an_error_of_ranks_keeps_its_kind_and_text(how):
    with pytest.raises(MeshError) as error:
        start(rank, how, nproc=2)
    assert str(error.value) == "Asked: this.\n\nDo: that."


def test_a_fault_is_shown_once_with_the_traceback_of_the_rank_that_had_it():
    begun = time.monotonic()
    with pytest.raises(RankError) as error:
        start(rank, "fault", nproc=2)
    text = str(error.value)
    assert text.startswith("Rank 1 failed:\n\nTraceback (most recent call last):\n")
    assert text.endswith("KeyError: 'no such key'\n")
    assert text.count("Traceback") == 1
    assert time.monotonic() - begun < 60


def test_a_rank_that_dies_without_a_word_is_named():
    with pytest.raises(RankError) as error:
        start(rank, "killed", nproc=2)
    assert str(error.value) == "Rank 1 ended with exit code 3 and left no traceback."


def test_the_environment_is_left_as_it_was(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    with pytest.raises(MeshError):
        start(rank, "all", nproc=2)
    assert dict(os.environ) == before


def again(how: str, folder: str) -> None:
    """Fails with a word in its first attempt; then as it is told to."""
    info = launch()
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    Path(folder, f"{attempt}-{info.rank}").touch()
    if attempt == "0":
        raise MeshError("Asked: the first.\n\nDo: that.")
    if how == "killed" and info.rank == 1:
        os._exit(3)
    if how == "fault":
        raise KeyError("the second")
    dist.barrier()


def test_ranks_are_started_again(tmp_path):
    start(again, "well", str(tmp_path), nproc=2, max_restarts=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "0-1", "1-0", "1-1"]


@pytest.mark.parametrize(
    ("how", "ending"),
    [
        ("fault", "KeyError: 'the second'\n"),
        ("killed", "Rank 1 ended with exit code 3 and left no traceback."),
    ],
)
def test_the_error_is_that_of_the_last_attempt(tmp_path, how, ending):
    with pytest.raises(RankError) as error:
        start(again, how, str(tmp_path), nproc=2, max_restarts=1)
    assert str(error.value).endswith(ending)
