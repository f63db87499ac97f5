"""Fixtures shared by all tests: fresh random data, a program cache of our own, the GPU marker."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import numpy as np
import pytest

# Tests share one program cache inside the repository, so that a second run compiles nothing.
os.environ.setdefault("TILEWAVE_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "programs"))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded afresh for every test; set TILEWAVE_TEST_SEED to repeat a failure."""
    seed = int(os.environ.get("TILEWAVE_TEST_SEED") or secrets.randbits(32))
    request.node.add_report_section("setup", "rng", f"TILEWAVE_TEST_SEED={seed}")
    return np.random.default_rng(seed)
