"""verify's own promises: what it compares, what it says, and that each part of it can fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from parallax import ParallaxError, bf16, clip, compose, dp, tp, verify, zero
from parallax.cli import app
from parallax.core.fact import Claim
from parallax.core.transform import Transform, state
from parallax.testing import Report, Row, toys
from parallax.testing.plugin import assert_trains_like_one_process
from parallax.testing.record import Record, Trial
from parallax.testing.reference import Narrowest, roundoff, run
from parallax.testing.setting import NoDropout, Setting
from parallax.testing.verify import in_dtype, smallest_world

BATCHES = [toys.points(7, seed) for seed in range(2)]


def setting(dtype: str = "fp64") -> Setting:
    return Setting(toys.Mlp, toys.momentum, toys.square, BATCHES, dtype)  # type: ignore[arg-type]


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "native"])
def test_a_right_composition_passes_in_every_dtype(dtype: str) -> None:
    transform = compose(zero(2), bf16, clip(0.05))
    report = verify(transform, toys.Mlp, toys.momentum, toys.square, BATCHES, steps=2, dtype=dtype)
    assert report.ok, report
    assert report.message == ""
    assert [row.quantity for row in report.rows] == [
        "initial parameters",
        "loss",
        "gradient",
        "gradient norm",
        "parameters",
        "optimizer state",
        "evaluation loss",
        "resumed loss",
        "resumed parameters",
        "resumed optimizer state",
        "resumed evaluation loss",
        "loss equal on all ranks",
        "random streams",
    ]


@pytest.mark.ranks
def test_without_an_optimizer_gradients_are_compared() -> None:
    report = verify(zero(3), toys.Mlp, None, toys.square, BATCHES, steps=2)
    assert report.ok, report
    assert "gradient" in {row.quantity for row in report.rows}
    assert "optimizer state" not in {row.quantity for row in report.rows}


def test_a_composition_that_does_not_fit_the_world_is_refused() -> None:
    with pytest.raises(ParallaxError, match="and 2 does not divide 3"):
        verify(tp(2), toys.Gpt, toys.adamw, toys.next_token, BATCHES, world=3)


def test_the_smallest_world_has_two_ranks_on_open_axes() -> None:
    assert smallest_world(compose()) == 1
    assert smallest_world(zero(2)) == 2
    assert smallest_world(compose(tp(2), zero(2))) == 4
    assert smallest_world(compose(dp(2), zero(3, degree=2))) == 4


def test_the_compute_dtype_is_replaced_for_the_check_only() -> None:
    transform = compose(zero(2), bf16)
    assert in_dtype(transform, "native") is transform
    assert "fp64" in repr(in_dtype(transform, "fp64"))
    assert in_dtype(zero(2), "fp64") == zero(2)


@pytest.mark.ranks
def test_a_rank_that_raises_is_reported_with_its_transform() -> None:
    def missing(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if type(model).__name__.startswith("FSDP"):
            raise KeyError("labels")
        return model(batch).square().mean()

    report = verify(compose(zero(2), clip(1.0)), toys.Mlp, toys.momentum, missing, BATCHES, steps=1)
    assert not report.ok
    assert report.error == "'labels'"
    assert report.blame == ["zero(2)"]


def test_a_report_is_a_table_json_and_a_message() -> None:
    rows = [Row("loss", "step 0", 1e-16, 1e-14), Row("gradient", "head.weight, step 1", 0.5, 1e-13)]
    report = Report("zero(2)", 2, 3, "fp64", rows, ["zero(2)"], "In the first forward, ...")
    assert not report.ok
    assert report.message == (
        "zero(2) on 2 ranks does not train like one process.\n"
        "gradient (head.weight, step 1): off by 5.0e-01, bound 1.0e-13.\n"
        "Broken by zero(2).\n"
        "In the first forward, ..."
    )
    assert "head.weight, step 1" in str(report)
    assert "FAIL" in str(report)
    told = json.loads(report.to_json())
    assert told["ok"] is False
    assert [row["ok"] for row in told["rows"]] == [True, False]


@pytest.mark.parametrize("error", [float("nan"), float("inf"), 2e-14])
def test_a_row_fails_on_anything_above_its_bound(error: float) -> None:
    assert not Row("loss", "step 0", error, 1e-14).ok
    assert Row("loss", "step 0", 1e-14, 1e-14).ok


def test_no_rows_are_no_proof() -> None:
    assert not Report("zero(2)", 2, 3, "fp64").ok


def test_dropout_is_off_and_training_is_on() -> None:
    attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    net = nn.Sequential(nn.Dropout(0.9), nn.Linear(8, 8), nn.AlphaDropout(0.9))
    x = torch.randn(2, 3, 8)
    with NoDropout():
        assert torch.equal(net(x), net(x))
        assert torch.equal(attention(x, x, x)[0], attention(x, x, x)[0])
        full = nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.9)
        assert torch.equal(full, nn.functional.scaled_dot_product_attention(x, x, x))
        assert net.training
    assert not torch.equal(net(x), net(x)), "without the mode, dropout drops"


def test_the_narrowest_dtype_inside_a_model_is_found() -> None:
    class Inside(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.dtype = dtype

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.w).to(self.dtype).double()

    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        with Narrowest() as inside:
            Inside(dtype)(torch.ones(3, dtype=torch.float64))
        assert inside.unit == torch.finfo(dtype).eps / 2


def test_noise_moves_the_reference_and_no_noise_does_not() -> None:
    plan = compose().plan(1)
    exact, again = run(setting(), plan, 2), run(setting(), plan, 2)
    assert exact.losses == again.losses
    noise = roundoff(setting(), plan, toys.Mlp().double())
    assert 0 < noise < 1e-13
    shaken = run(setting(), plan, 2, noise=noise, draw=1)
    assert exact.losses != shaken.losses
    apart = max(float((exact.params[n] - shaken.params[n]).abs().max()) for n in exact.params)
    assert 0 < apart < 1e-12


def _trial(**changes: object) -> Trial:
    plain = {"losses": [[1.0], [1.0]], "randomness": [(0, (0.1,)), (1, (0.2,))]}
    return Trial(Record(), Record(), **{**plain, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("randomness", "worst"),
    [
        ([(0, (0.1,)), (1, (0.1,))], "ranks 0 and 1 draw the same numbers"),
        ([(0, (0.1,)), (0, (0.2,))], "ranks 0 and 1 draw different numbers"),
        ([(0, (0.1,)), (1, (0.2,))], "all ranks"),
        ([(0, (0.1,)), (0, (0.1,))], "all ranks"),
    ],
)
def test_random_streams_are_judged(
    randomness: list[tuple[int, tuple[float, ...]]], worst: str
) -> None:
    from parallax.testing.verify import _equal_losses, _random_streams

    row = _random_streams(_trial(randomness=randomness))
    assert row.worst == worst
    assert row.ok == (worst == "all ranks")
    assert not _equal_losses(_trial(losses=[[1.0], [1.0 + 1e-16 + 1e-15]])).ok


@pytest.mark.ranks
def test_the_fixture_raises_with_the_table(trains_like_one_process) -> None:
    def broken() -> Transform:
        return state("broken", *(c.fact for c in zero(2).claims), rewrites=zero(2).rewrites)

    assert trains_like_one_process(
        broken(), toys.Mlp, toys.momentum, toys.square, BATCHES, steps=1
    ).ok
    wrong = [toys.points(8), toys.points(8, seed=1)]

    def unlike(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean() * len(batch)  # not a mean over rows

    with pytest.raises(AssertionError, match="DOES NOT train like one process"):
        assert_trains_like_one_process(
            zero(2), toys.Mlp, toys.momentum, unlike, wrong, steps=1, blame=False
        )


SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x):
        return self.layers(x)

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)

def loss(model, batch):
    return model(batch).square().mean()

def setup():
    return Net, optimizer, loss, [torch.ones(6, 4)]

def three():
    return Net, optimizer, loss
"""


@pytest.mark.ranks
def test_the_command_line_proves_a_script(tmp_path: Path) -> None:
    script = tmp_path / "a_script_to_verify.py"
    script.write_text(SCRIPT)
    told = tmp_path / "report.json"
    result = CliRunner().invoke(
        app, ["verify", f"{script}:setup", "--compose", "zero(2), bf16", "--json", str(told)]
    )
    assert result.exit_code == 0, result.output
    assert "trains like one process" in result.output
    assert json.loads(told.read_text())["ok"] is True
    form = "(model_fn, optimizer_fn, loss_fn, batches)"
    three = f"three() in {script.name} returned a tuple of 3.\n\nReturn {form}."
    four = f"verify was given '{script}:four': {script.name} has no function 'four'.\n\n"
    nowhere = "verify was given 'nowhere.py:setup': there is no file nowhere.py.\n\n"
    for spoken, text in (
        (f"{script}:three", three),
        (f"{script}:four", f"{four}Define one that returns {form}."),
        ("nowhere.py:setup", f"{nowhere}Write script.py:setup, where setup() returns {form}."),
    ):
        result = CliRunner().invoke(app, ["verify", spoken, "--compose", "zero(2)"])
        assert result.exit_code == 1
        assert result.stderr.strip() == f"ParallaxError: {text}"


def test_atoms_are_what_a_composition_was_made_of() -> None:
    whole = compose(zero(2), bf16, clip(1.0))
    assert compose(*whole.atoms.values()) == whole
    assert set(whole.atoms) == {"bf16", "clip(1.0)", "zero(2)"}
    assert all(isinstance(c, Claim) for atom in whole.atoms.values() for c in atom.claims)
