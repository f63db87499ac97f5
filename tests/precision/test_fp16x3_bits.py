"""benchmarks/fp16x3_bits.py, with the model in the GPU's place, and with something else there."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewave.kernels import fp16x3 as kernels
from tilewave.kernels.instances import Instance
from tilewave.precision import fp16x3, tf32

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fp16x3_bits.py"


def run(monkeypatch: pytest.MonkeyPatch, multiply: Any, out: Path) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr("tilewave.bench.accuracy.contenders.by_kernel", multiply)
    monkeypatch.setattr("tilewave.runtime.driver.Device", lambda: None)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--budget", "1", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return ended.value.code or 0, json.loads(out.read_text())


def by_model(a: np.ndarray, b: np.ndarray, instance: Instance) -> np.ndarray:
    sums = fp16x3.FINE if instance is kernels.SMALL else fp16x3.COARSE
    return fp16x3.multiply(a, b, sums=sums).values


def test_equal_bits_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, record = run(monkeypatch, by_model, tmp_path / "r.json")
    assert code == 0
    assert {one["sums"] for one in record["products"]} == {"fine", "coarse"}
    assert all(one["equal"] == one["kept"] for one in record["products"])
    assert "elements have the model's bits" in capsys.readouterr().out.splitlines()[-1]


def test_a_product_beyond_the_bound_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, record = run(monkeypatch, lambda a, b, _: tf32.multiply(a, b), tmp_path / "r.json")
    assert code == 1
    assert max(one["gpu_in_bounds"] for one in record["products"]) > 1
    assert any(one["equal"] < one["kept"] for one in record["products"])


def test_a_nan_is_beyond_every_bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def spoiled(a: np.ndarray, b: np.ndarray, instance: Instance) -> np.ndarray:
        values = by_model(a, b, instance)
        values[0, 0] = np.nan
        return values

    assert run(monkeypatch, spoiled, tmp_path / "r.json")[0] == 1
