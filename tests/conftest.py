"""Fixtures shared by all tests: fresh random data, a program cache of our own, the GPU marker."""

from __future__ import annotations

import os
import random
import secrets
from collections import defaultdict
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the cases of a test marked `sampled(n)` keep n, drawn afresh in every run.

    All workers of a run draw the same ones. TILEWAVE_TEST_ALL=1 keeps all cases.
    """
    if os.environ.get("TILEWAVE_TEST_ALL"):
        return
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    counts: dict[str, int] = {}
    for item in items:
        if (marker := item.get_closest_marker("sampled")) is not None:
            function = item.nodeid.partition("[")[0]
            cases[function].append(item)
            counts[function] = marker.args[0]
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or secrets.token_hex()
    dropped: set[pytest.Item] = set()
    for function, found in cases.items():
        spare = max(0, len(found) - counts[function])
        dropped.update(random.Random(run + function).sample(found, spare))
    if dropped:
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]
