"""benchmarks/torch_overhead.py without a GPU: what fails costs no other reading, each is written at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import torch_overhead  # noqa: E402


def readings(name: str) -> dict[str, Any]:
    return {"microseconds": {f"ours: {name}": 9.0, f"torch: {name}": 18.0}, "ratios": {name: 0.5}}


def test_a_part_that_fails_leaves_the_others() -> None:
    clock, given = [50.0], {}
    kept: list[dict[str, Any]] = []

    def run(part: str, budget: float, limit: float) -> dict[str, Any]:
        given[part] = budget
        clock[0] += budget
        assert limit > budget
        if part == "compiled":
            raise RuntimeError("BackendCompilerFailed\nno C compiler")
        return {"eager": readings("eager"), "graphs": {"graphs": 1}, "training": {"graphs": 1}}[part]

    record = torch_overhead.measure({}, torch_overhead.PARTS, 80.0, run, kept.append, lambda: clock[0])
    assert list(given) == list(torch_overhead.PARTS)
    assert sum(given.values()) == pytest.approx(80.0)
    assert list(kept[0]) == ["microseconds", "ratios"]
    assert record["ratios"] == {"eager": 0.5}
    assert record["graphs"] == 1
    table = torch_overhead.table(record)
    assert "compiled failed: no C compiler" in table
    assert "0.50" in table


def test_time_that_a_part_leaves_goes_to_the_next() -> None:
    clock, given = [0.0], {}

    def run(part: str, budget: float, limit: float) -> dict[str, Any]:
        given[part] = budget
        clock[0] += 1.0
        return {}

    torch_overhead.measure({}, torch_overhead.PARTS, 80.0, run, lambda record: None, lambda: clock[0])
    assert given["training"] == pytest.approx(77.0)


def test_parts_are_merged() -> None:
    both = torch_overhead.merged(readings("eager") | {"torch": "2"}, readings("compiled"))
    assert both["ratios"] == {"eager": 0.5, "compiled": 0.5}
    assert len(both["microseconds"]) == 4
    assert json.loads(json.dumps(both))["torch"] == "2"


def test_a_process_that_fails_is_told_with_its_last_words() -> None:
    with pytest.raises(RuntimeError, match="invalid choice"):
        torch_overhead.run_part("no such part", 1.0, 60.0, environment={}, stand_in=False)
