"""The page on power and profile shows what the committed results say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from power_fakes import power_run

from tilewave.lab.power.records import CUBLAS, OURS, RANDOM, save_power_run
from tilewave.lab.power.verdict import judged
from tilewave.lab.profile.records import EMULATOR, KernelProfile, Profile, Reading, save_profile

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "benchmarks" / "power_and_profile.py"
    spec = importlib.util.spec_from_file_location("power_and_profile", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_committed_results_make_of_it(script: ModuleType) -> None:
    text = (ROOT / "docs" / "power-and-profile.md").read_text(encoding="utf-8")
    assert script.page(text, "h200") == text


def test_the_page_takes_its_tables_from_the_results(script: ModuleType, tmp_path: Path) -> None:
    run = judged(power_run({(OURS, RANDOM): [44.0, 44.1, 44.2], (CUBLAS, RANDOM): [51.0] * 3}))
    kernel = KernelProfile(15, "15 large patch", "sgemm", {EMULATOR: Reading({"registers": 237.0})})
    save_power_run(run, tmp_path / "power_x.json")
    save_profile(Profile("H200", 2048, "emulator", {}, (kernel,)), tmp_path / "profile_x.json")
    text = "a\n<!-- power -->\nold\n<!-- end of power -->\nb\n<!-- profile -->\n<!-- end of profile -->\n"
    made = script.page(text, "x", tmp_path)
    assert "| rung 17 plain a | random | 44.10 | 0.45% |" in made
    assert "* rung 17 plain a is behind cuBLAS through torch 2.11.0 on random data by 13.5 %" in made
    assert "| registers a thread | 237 |" in made
    assert "old" not in made
    assert script.page(made, "x", tmp_path) == made
    with pytest.raises(SystemExit, match="2 places for power"):
        script.page(text + text, "x", tmp_path)


def test_a_budget_that_is_too_short_is_refused(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="budget 20: at least 115 seconds"):
        script.measure(tmp_path, "x", 20.0)
