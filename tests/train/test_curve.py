import importlib.util

import pytest
import torch

from parallax.errors import ParallaxError, StepError
from parallax.train.curve import Curve, draw, require_plotting


def curve(path, losses, *, start=0):
    made = Curve(path, start=start)
    for step, loss in enumerate(losses, start + 1):
        made.add(step, torch.tensor(loss), 0.5, step * 10)
    return made


def test_losses_are_written_when_flushed(tmp_path):
    path = tmp_path / "loss.csv"
    made = curve(path, [2.0, 1.5])
    assert path.read_text().splitlines() == ["step,loss,learning_rate,tokens"]
    made.flush()
    assert path.read_text().splitlines()[1:] == ["1,2.0,0.5,10", "2,1.5,0.5,20"]


def test_a_resumed_run_replaces_the_lines_after_its_checkpoint(tmp_path):
    path = tmp_path / "loss.csv"
    curve(path, [4.0, 3.0, 2.0]).flush()
    curve(path, [2.5], start=2).flush()
    assert path.read_text().splitlines()[1:] == ["1,4.0,0.5,10", "2,3.0,0.5,20", "3,2.5,0.5,30"]


@pytest.mark.parametrize("torn", ["3", "30,2.0", "3,2.0,0.5,3"])
def test_half_a_line_of_a_killed_run_is_no_step(tmp_path, torn):
    path = tmp_path / "loss.csv"
    curve(path, [4.0, 3.0]).flush()
    with path.open("a") as file:
        file.write(torn)
    curve(path, [2.5], start=4).flush()
    assert path.read_text().splitlines()[1:] == ["1,4.0,0.5,10", "2,3.0,0.5,20", "5,2.5,0.5,50"]


def test_a_run_killed_while_it_shortens_the_file_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "loss.csv"
    curve(path, [4.0, 3.0, 2.0]).flush()
    before = path.read_text()

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("parallax.train.curve.csv.writer", killed)
        with pytest.raises(Killed):
            curve(path, [], start=2)
    assert path.read_text() == before
    curve(path, [2.5], start=2).flush()
    assert path.read_text().splitlines()[1:] == ["1,4.0,0.5,10", "2,3.0,0.5,20", "3,2.5,0.5,30"]
    assert [p.name for p in tmp_path.iterdir()] == ["loss.csv"]


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    with pytest.raises(StepError) as error:
        curve(None, [1.0, float("nan")]).flush()
    assert str(error.value) == (
        "Training was asked for; the loss at step 2 is nan, at a learning rate of 0.5.\n\n"
        "Lower --lr, or add clip(1.0) to the composition."
    )


def test_the_picture_is_a_png(tmp_path):
    made = curve(None, [3.0, 2.0])
    made.flush()
    draw(made, tmp_path / "loss.png", held_out={0: 3.1, 2: 2.1}, entropy=3.3)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_matplotlib_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ParallaxError) as error:
        require_plotting()
    assert str(error.value) == (
        "A picture of the loss was asked for; matplotlib, which draws it, is not installed.\n\n"
        'Install it with: pip install "parallax-torch[train]"'
    )
