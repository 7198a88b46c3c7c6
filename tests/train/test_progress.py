import io

import torch
from rich.console import Console

from parallax.train.progress import Display, peak_memory

CPU = torch.device("cpu")


def shown(*, terminal: bool, silent: bool = False) -> tuple[str, int]:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=100)
    display = Display(100, start=0, device=CPU, silent=silent, console=console)
    with display:
        display.show(50, 1.25, 5000)
    return stream.getvalue(), display.every


def test_without_a_terminal_a_step_is_a_line():
    text, every = shown(terminal=False)
    assert text.count("\n") == 1
    assert text.startswith("step 50/100  loss 1.250  ")
    for word in ("tokens/s", "MiB", "s left"):
        assert word in text
    assert every == 5


def test_on_a_terminal_there_is_a_bar():
    text, every = shown(terminal=True)
    assert "50/100" in text
    assert "loss 1.250" in text
    assert every == 1


def test_other_ranks_show_nothing():
    assert shown(terminal=False, silent=True)[0] == ""
    assert shown(terminal=True, silent=True)[0] == ""


def test_memory_is_that_of_this_process():
    assert 10 * 2**20 < peak_memory(CPU) < 2**40
