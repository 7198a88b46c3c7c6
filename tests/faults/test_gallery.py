"""verify catches every fault of the gallery and blames it; and passes the same runs without it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from parallax.core.transform import Transform, compose
from parallax.parse import parse
from parallax.testing.toys import Gpt, adamw, next_token, tokens
from parallax.testing.verify import verify

sys.path.insert(0, str(Path(__file__).parent))  # ranks import the gallery by name

from gallery import EXHIBITS, Exhibit

BATCHES = [tokens(8, seed) for seed in range(2)]


def model() -> Gpt:
    return Gpt(tied=True, scalar=True, unused=True, frozen=True, blocks=2)


def surroundings(exhibit: Exhibit) -> Transform:
    """The partners the fault needs, in company: blame must not fall on bystanders."""
    text = ", ".join(exhibit.partners)
    axes = text.count("(2") + text.count("degree=2")
    bystander = "" if axes else "zero(2, degree=2)"
    extra = "bf16" if "clip" in text else "bf16, clip(0.05)"
    return parse(", ".join(part for part in (text, bystander, extra) if part))


@pytest.mark.ranks
@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda e: e.name)
def test_fault_is_caught_and_blamed(exhibit: Exhibit) -> None:
    broken = compose(surroundings(exhibit), exhibit.transform)
    report = verify(broken, model, adamw, next_token, BATCHES, steps=2)
    assert not report.ok, report
    assert sorted(report.blame) == sorted((exhibit.name, *exhibit.partners)), report.message
    assert exhibit.name in report.message
    assert report.where or report.error, report.message


@pytest.mark.ranks
@pytest.mark.parametrize("text", sorted({repr(surroundings(e)) for e in EXHIBITS}))
def test_the_same_run_passes_without_the_fault(text: str) -> None:
    report = verify(parse(text), model, adamw, next_token, BATCHES, steps=2)
    assert report.ok, report


def test_the_gallery_is_large_enough() -> None:
    assert len({e.name for e in EXHIBITS}) == len(EXHIBITS) >= 25
