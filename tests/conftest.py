"""Fixtures shared by all tests: fresh random data, a program cache of our own, the GPU marker."""

from __future__ import annotations

import hashlib
import os
import random
import secrets
from collections import defaultdict
from pathlib import Path

import hypothesis
import numpy as np
import pytest

# Tests share one program cache inside the repository, so that a second run compiles nothing.
os.environ.setdefault("TILEWAVE_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "programs"))

SOURCES = {".py", ".cu", ".cuh", ".json", ".toml"}


def seed_of_run() -> str:
    """What every random draw of a run starts from: the contents of the sources and tests.

    So every change draws its own inputs, and whoever tests the same tree sees the same result.
    TILEWAVE_TEST_SEED=fresh draws anew.
    """
    asked = os.environ.get("TILEWAVE_TEST_SEED")
    if asked:
        return secrets.token_hex() if asked == "fresh" else asked
    root = Path(__file__).parents[1]
    contents = hashlib.sha256()
    for folder in ("src", "tests"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SOURCES and path.is_file():
                contents.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return contents.hexdigest()


SEED_OF_RUN = os.environ.setdefault("TILEWAVE_TEST_SEED_OF_RUN", seed_of_run())


def seed_of(name: str) -> int:
    """The seed of one test: TILEWAVE_TEST_SEED where it is a number, else its own of the run's."""
    return int(SEED_OF_RUN) if SEED_OF_RUN.isdecimal() else random.Random(SEED_OF_RUN + name).getrandbits(32)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator with a seed of the test's own; set TILEWAVE_TEST_SEED to repeat a failure."""
    seed = seed_of(request.node.nodeid)
    request.node.add_report_section("setup", "rng", f"TILEWAVE_TEST_SEED={seed}")
    return np.random.default_rng(seed)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give hypothesis the run's seed; of the cases of a test marked `sampled(n)` keep n, drawn from it.

    TILEWAVE_TEST_ALL=1 keeps all cases.
    """
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            hypothesis.seed(seed_of(item.nodeid))(item.obj)  # type: ignore[attr-defined]
    if os.environ.get("TILEWAVE_TEST_ALL"):
        return
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    counts: dict[str, int] = {}
    for item in items:
        if (marker := item.get_closest_marker("sampled")) is not None:
            function = item.nodeid.partition("[")[0]
            cases[function].append(item)
            counts[function] = marker.args[0]
    dropped: set[pytest.Item] = set()
    for function, found in cases.items():
        spare = max(0, len(found) - counts[function])
        dropped.update(random.Random(SEED_OF_RUN + function).sample(found, spare))
    if dropped:
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]
