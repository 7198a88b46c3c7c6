"""What all tests share: pools of ranks, one thread each, and the hypothesis profile."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

from parallax.testing import World, pool

pytest_plugins = ["parallax.testing.plugin"]

# Before any test starts a thread pool: ranks and tests share few cores.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

# Deadlines measure the machine, and a test that fails must fail again.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")


@pytest.fixture(scope="session")
def world2() -> World:
    """Two live ranks, kept for the session."""
    return pool(2)


@pytest.fixture(scope="session")
def world4() -> World:
    """Four live ranks, kept for the session."""
    return pool(4)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the gpu tier where there is no GPU: the only tests that may be skipped."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
