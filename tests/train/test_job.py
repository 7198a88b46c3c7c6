import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import Subset

from parallax.errors import DataError, ParallaxError
from parallax.train.job import check, evaluate, next_byte_loss
from parallax.train.options import Job
from parallax.train.text import Windows


class Uniform(nn.Module):
    """Scores every byte alike."""

    def forward(self, tokens):
        return torch.zeros(*tokens.shape, 256)


def test_the_loss_is_a_sum_with_its_count():
    loss, count = next_byte_loss(Uniform(), torch.randint(256, (3, 11)))
    assert count == 30
    assert loss.item() == pytest.approx(30 * math.log(256))


def test_held_out_loss_is_a_mean_over_windows_of_an_uneven_number_of_batches():
    windows = Subset(Windows(torch.arange(31, dtype=torch.uint8), seq=3), list(range(10)))
    losses = torch.arange(10.0)

    def batches(data, *, batch_size, shuffle, seed, drop_last):
        assert not shuffle
        assert not drop_last
        return torch.arange(len(data)).split(batch_size)

    boosted = SimpleNamespace(loader=batches, eval_step=lambda loss_fn, batch: losses[batch].mean())
    assert evaluate(boosted, windows, Job(batch_size=4)) == pytest.approx(4.5)


def test_a_text_of_less_than_one_batch_is_an_error(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("x" * 1000)
    with pytest.raises(DataError) as error:
        check(Job(compose="bf16", data=path, seq=40, batch_size=32), 1)
    assert str(error.value) == (
        "A batch of 32 samples of 40 bytes was asked for; the training text has 950 bytes, which "
        "are 23 samples.\n\nGive more text, or a --batch-size of at most 23."
    )


def test_an_empty_prompt_is_an_error():
    with pytest.raises(ParallaxError) as error:
        check(Job(prompt=""), 4)
    assert str(error.value) == (
        "Generated text was asked for with an empty --prompt; a model needs at least one byte to "
        "continue.\n\nGive --prompt some text."
    )
