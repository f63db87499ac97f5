"""The page on host time shows the committed record and the code's own limits."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from tilewave import warm

ROOT = Path(__file__).parents[2]


def script() -> Any:
    found = importlib.util.spec_from_file_location("host_time", ROOT / "benchmarks" / "host_time.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_table_is_the_committed_record() -> None:
    host_time = script()
    page = host_time.PAGE.read_text(encoding="utf-8")
    record = json.loads(host_time.RECORD.read_text(encoding="utf-8"))
    assert host_time.rendered(page, record) == page
    assert f"{warm.MOST_LAUNCHES} launches" in page
    calls = record["libraries"]["torch"]["calls_us"]
    assert calls["matmul"] < 0.2 * calls["matmul, nothing kept"]


def test_a_record_from_a_gpu_has_shares() -> None:
    calls = {"matmul": 5.0, "torch.matmul": 10.0}
    record = {
        "cpu": "C",
        "python": "3",
        "libraries": {"torch": {"import_ms": 1, "first_call_ms": 2, "calls_us": calls}},
    }
    assert "| matmul | 5.0 us | 0.50 |" in script().table(record)
