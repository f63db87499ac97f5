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
    assert host_time.rendered(page, record, host_time.on_gpu()) == page
    measured = host_time.rendered(page, record, {**record, "cpu": "the GPU's host"})
    assert measured.count("On the GPU's host") == 1
    assert host_time.rendered(measured, record, host_time.on_gpu()) == page
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


class Processes:
    """Processes that take so many seconds each, on a clock of their own; some fail."""

    def __init__(self, seconds: float, failing: tuple[int, ...] = ()) -> None:
        self.time, self.seconds, self.failing = 100.0, seconds, failing
        self.calls: list[tuple[str, ...]] = []
        self.kept: list[dict[str, Any]] = []

    def __call__(self, limit_s: float, *more: str) -> dict[str, Any]:
        warm_s = float(more[1]) if more[0] == "--budget" else 0.0
        self.calls.append(more)
        self.time += self.seconds + warm_s
        if len(self.calls) - 1 in self.failing:
            raise RuntimeError("no GPU")
        return {"matmul": 9.0} if warm_s else {"import": 30.0, "first_call": 50.0 + len(self.calls)}

    def keep(self, found: dict[str, Any]) -> None:
        self.kept.append(json.loads(json.dumps(found)))

    def now(self) -> float:
        return self.time


def test_a_library_s_figures_fit_its_budget_and_are_kept_as_they_come() -> None:
    processes = Processes(3.0)
    found = script().measure(processes, 25.0, processes.keep, processes.now)
    assert processes.time <= 125.5
    assert found["calls_us"] == {"matmul": 9.0}
    assert 3 <= len(found["first_calls_ms"]) <= script().PROCESSES
    assert any("calls_us" in one and "first_call_ms" not in one for one in processes.kept)
    assert processes.kept[-1] == found


def test_slow_processes_still_leave_warm_calls_and_one_first_call() -> None:
    processes = Processes(12.0)
    found = script().measure(processes, 25.0, processes.keep, processes.now)
    assert found["calls_us"] == {"matmul": 9.0}
    assert len(found["first_calls_ms"]) == 1


def test_what_fails_is_told_and_the_rest_is_kept() -> None:
    processes = Processes(1.0, failing=(1,))
    found = script().measure(processes, 25.0, processes.keep, processes.now)
    assert found["failed"] == {"warm calls": "no GPU"}
    assert found["first_call_ms"] > 0
    record = {"cpu": "C", "python": "3", "libraries": {"torch": found}}
    table = script().table(record)
    assert "| warm calls | failed: no GPU |" in table
    assert "| first call |" in table
