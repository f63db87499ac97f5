"""benchmarks/reemitted.py without a GPU: what is compared and timed, in which order, and what is kept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import reemitted
import register_file_page


def pair(name: str, code: bytes = b"new", reason: str | None = None) -> Any:
    new = None if reason else code
    return reemitted.Pair(name, "symbol", b"old", new, reason, "1.2 -> 1.1; words", 0.5, {})


RATES = {"compiler": 50.0, "reemitted": 57.0, "reemitted/cuBLAS": 1.12}
RATE = {**RATES, "same bits": True, "schedule": "data-parallel"}


class Gpu:
    """Readings that take a second each."""

    def __init__(self, failing: str = "") -> None:
        self.seconds, self.failing = 0.0, failing
        self.done: list[str] = []
        self.kept = 0

    def compared(self, pair: Any) -> dict[str, Any]:
        self._take(f"bits {pair.name}")
        row = {"reason": pair.reason, "report": pair.report, "seconds": 0.5, "digest": pair.digest}
        return row if pair.reason else row | {"compared": 8, "wrong": []}

    def rate(self, pair: Any, size: int) -> dict[str, Any]:
        self._take(f"{size} {pair.name}")
        return dict(RATE)

    def _take(self, what: str) -> None:
        self.seconds += 1
        self.done.append(what)
        if self.failing and self.failing in what:
            raise MemoryError("no memory")

    def keep(self) -> None:
        self.kept += 1

    def run(self, pairs: list[Any], record: dict[str, Any], end: float = 100.0) -> None:
        reemitted.run(
            pairs, record, self.compared, self.rate, [4096, 2048], end, self.keep, lambda: self.seconds
        )


def test_all_are_compared_before_any_is_timed() -> None:
    gpu, record = Gpu(), {"instances": {}}
    gpu.run([pair("large_tile_128x64_nn_4", reason="spills"), pair("large_tile_128x64_nn_16")], record)
    assert gpu.done == [
        "bits large_tile_128x64_nn_4", "bits large_tile_128x64_nn_16",
        "4096 large_tile_128x64_nn_16", "2048 large_tile_128x64_nn_16",
    ]  # fmt: skip
    assert gpu.kept == 4
    table = register_file_page.measured_table(record)
    assert "| kernel | 2048 | 4096 |" in table
    assert "| `128x64_nn_4` | spills" not in table
    assert table.index("nn_16") < table.index("nn_4")
    assert "not emitted then" in table


def test_a_file_goes_on_except_for_other_machine_code() -> None:
    record: dict[str, Any] = {"instances": {}}
    Gpu().run([pair("a"), pair("b")], record, end=2.5)  # both compared, one timed
    assert [list(row.get("rates", {})) for row in record["instances"].values()] == [["4096"], []]
    gpu = Gpu()
    gpu.run([pair("a"), pair("b", b"newer")], record)
    assert gpu.done == ["bits b", "4096 b", "2048 a", "2048 b"]
    assert "not timed" not in register_file_page.measured_table(record)


@pytest.mark.parametrize("failing", ["bits a", "4096 a"])
def test_a_kernel_that_fails_costs_no_other_reading(failing: str) -> None:
    gpu, record = Gpu(failing), {"instances": {}}
    gpu.run([pair("a"), pair("b")], record)
    assert "no memory" in record["instances"]["a"]["error"]
    assert list(record["instances"]["b"]["rates"]) == ["4096", "2048"]
    assert "no memory" in reemitted.line("a", record["instances"]["a"])
    again = Gpu()
    again.run([pair("a"), pair("b")], record)
    assert again.done[0] == "bits a"
    assert "error" not in record["instances"]["a"]
