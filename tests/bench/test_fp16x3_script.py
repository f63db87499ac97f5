"""benchmarks/fp16x3.py without a GPU: what it makes of readings."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fp16x3.py"


@pytest.fixture(scope="module")
def script() -> Any:
    # Dataclasses look for their module among those that are loaded.
    sys.modules["fp16x3_script"] = SimpleNamespace()  # type: ignore[assignment]
    yield SimpleNamespace(**runpy.run_path(str(SCRIPT), run_name="fp16x3_script"))
    del sys.modules["fp16x3_script"]


def test_readings_become_rates_ratios_and_verdicts(script: Any) -> None:
    cell = script.CELLS[0]
    assert str(cell) == "4096 x 4096 x 4096 NN"
    rounds = {script.CUBLAS: [2.0, 4.0, 2.0], script.SPLIT: [0.5, 1.0, 0.4], script.PACKED: [0.5, 1.0, 0.5]}
    hot = script.summary(cell, "hot", rounds)
    split = hot["contenders"][script.SPLIT]
    assert (split["us"], split["ratio"]) == (500.0, 4.0)  # medians: of the times, and of the rounds' ratios
    assert split["tflops"] == pytest.approx(2 * 4096**3 / 5e-4 * 1e-12)
    turned = script.Cell(4096, 4096, 4096, layouts="TN")
    slower = script.summary(turned, "hot", {script.SPLIT: [0.55, 0.55, 0.55]})
    found = {
        (one["cell"], one["contender"]): one["reached"]
        for one in script.verdicts([(cell, hot), (turned, slower)])
    }
    assert found == {
        (str(cell), script.SPLIT): True,  # 4.0 of 4.0
        (str(cell), script.PACKED): False,  # 4.0 of 4.2
        (str(turned), "fp16x3 NN"): False,  # 10 % slower than NN
    }
