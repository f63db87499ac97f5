"""What docs/planner.md says of the product's planner."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tilewave.planner.gemm.costs import THEORY
from tilewave.planner.gemm.options import OFFERED, WORKSPACE_LIMIT_BYTES
from tilewave.planner.gemm.select import CACHED_PLANS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
PRODUCT = PAGE[PAGE.index("# The product's planner") :]


def test_the_table_of_constants_is_the_code_s() -> None:
    table = PRODUCT[PRODUCT.index("<!-- gemm constants") : PRODUCT.index("<!-- end -->")]
    rows = re.findall(r"^\| (\w+) \| (.+) \| (.+) \|$", table, re.MULTILINE)[1:]
    expected = [
        (name, f"{c.value:.4g} {c.unit}", f"{c.basis}: {c.source}") for name, c in THEORY.constants().items()
    ]
    assert rows == expected


def test_names_and_limits_in_the_text_are_the_code_s() -> None:
    for kind in OFFERED:
        assert f"`{kind}`" in PRODUCT
    assert f"{WORKSPACE_LIMIT_BYTES // 2**20} MiB" in PRODUCT
    assert f"{CACHED_PLANS} latest plans" in PRODUCT
    folder = ROOT / "src" / "tilewave" / "planner" / "gemm"
    for module in folder.glob("*.py"):
        if module.name != "__init__.py":
            assert f"`{module.name}`" in PRODUCT
    for script in re.findall(r"benchmarks/\w+\.py", PRODUCT):
        assert (ROOT / script).is_file()


def test_planning_was_measured_to_be_fast_enough() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "planner_speed.json").read_text())
    assert record["problems"] >= 300
    assert record["cold"]["p95"] < 500
    assert record["cached"]["p95"] < 2


def test_the_calibration_s_tables_are_the_committed_readings() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "calibration_page.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_calibrated_choices_are_as_good_as_they_should_be() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "gemm_calibration_h200.json").read_text())
    judged = record["held_out"]["calibrated"]
    assert judged["all"]["median"] < 1.05
    assert judged["random"]["median"] < 1.05
    assert judged["random"]["p95"] < 1.15  # the other populations were made to be hard
