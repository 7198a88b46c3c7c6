import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import Subset

from parallax.errors import DataError, ParallaxError
from parallax.train.decoder import Decoder, Size
from parallax.train.job import Job, adamw, check, evaluate, learning_rate, next_byte_loss
from parallax.train.text import Windows


class Uniform(nn.Module):
    """Scores every byte alike."""

    def forward(self, tokens):
        return torch.zeros(*tokens.shape, 256)


def test_the_loss_is_a_sum_with_its_count():
    loss, count = next_byte_loss(Uniform(), torch.randint(256, (3, 11)))
    assert count == 30
    assert loss.item() == pytest.approx(30 * math.log(256))


def test_the_learning_rate_rises_then_falls_to_a_tenth():
    rates = [learning_rate(step, warmup=4, steps=20) for step in range(21)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert learning_rate(0, warmup=0, steps=1) == 1.0


def test_only_matrices_decay():
    model = Decoder(Size(dim=16, layers=1, heads=2, kv_heads=1, hidden=16))
    optimizer = adamw(model, Job(weight_decay=0.3))
    decays = {
        id(parameter): group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for name, parameter in model.named_parameters():
        assert decays[id(parameter)] == (0.0 if "norm" in name else 0.3), name


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
