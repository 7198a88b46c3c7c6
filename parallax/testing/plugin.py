"""pytest fixtures for projects that train with parallax.

In a conftest: `pytest_plugins = ["parallax.testing.plugin"]`.
"""

from __future__ import annotations

from typing import Any, Protocol

import pytest

from parallax.testing.report import Report
from parallax.testing.verify import verify


class TrainsLikeOneProcess(Protocol):
    """What the fixture gives: `verify`, raising where it fails."""

    def __call__(self, *args: Any, **options: Any) -> Report:
        """Verify; the arguments are those of `parallax.verify`."""
        ...


def assert_trains_like_one_process(*args: Any, **options: Any) -> Report:
    """Assert that a composition trains like one process: `parallax.verify`, raising on failure.

    Args:
        *args: As `parallax.verify`.
        **options: As `parallax.verify`.

    Returns:
        The report.

    Raises:
        AssertionError: With the table, the guilty transforms and the first module that differs.
    """
    __tracebackhide__ = True
    report = verify(*args, **options)
    if not report.ok:
        raise AssertionError(f"\n{report}")
    return report


@pytest.fixture(scope="session")
def trains_like_one_process() -> TrainsLikeOneProcess:
    """The assertion as a fixture; ranks stay alive for the session, so that calls are cheap."""
    return assert_trains_like_one_process
