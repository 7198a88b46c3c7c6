"""Random compositions on random models train like one process."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from parallax.testing.laws import ALIASES, TABLE, Case, cases, exported

DRAWS = 160
SEEN: Counter[str] = Counter()


@pytest.mark.ranks
@pytest.mark.timeout(1500)
@settings(
    max_examples=DRAWS,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),  # a case prints as what repeats it; shrinking would run it for hours
    suppress_health_check=list(HealthCheck),
)
@given(case=cases())
def test_a_composition_trains_like_one_process(case: Case) -> None:
    SEEN.update(case.members)
    report = case.verify()
    assert report.ok, f"{case}\n{report}"


@pytest.mark.ranks
def test_the_draws_reach_every_transform() -> None:
    assert set(SEEN) == set(TABLE), "run together with the law test above"


def test_every_exported_transform_is_in_the_suite() -> None:
    assert exported() == set(TABLE) | set(ALIASES)
