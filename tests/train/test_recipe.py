import pytest
import torch
from torch import nn

from parallax.train.decoder import Decoder, Size
from parallax.train.options import Job
from parallax.train.recipe import adamw, learning_rate, schedule


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


def test_a_later_start_goes_on_with_the_same_rates():
    job = Job(steps=12, warmup=3, lr=0.5)

    def rates(start):
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.123)
        scheduler = schedule(optimizer, job, start)
        for step in range(start, job.steps):
            yield step, optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()

    whole, late = dict(rates(0)), dict(rates(7))
    assert late == {step: rate for step, rate in whole.items() if step >= 7}
