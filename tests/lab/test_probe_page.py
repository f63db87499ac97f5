"""docs/probes.md is made from the committed results, and its words follow them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_probe_command import assert_layout

from tilewave.lab.probe_catalog import PROBES
from tilewave.lab.probe_results import load_results

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "probe_report.py"
RESULTS = ROOT / "benchmarks" / "results" / "probes_h200.json"
PAGE = ROOT / "docs" / "probes.md"


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    return json.loads(RESULTS.read_text())


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import probe_report

    return probe_report


def test_the_page_is_up_to_date() -> None:
    answer = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


def test_the_committed_results_are_complete(committed: dict[str, Any]) -> None:
    assert_layout(committed, [*PROBES], emulated=False)
    for entry in committed["probes"]:
        for at in entry["sizes"]:
            assert at["timed"].keys() == entry["variants"].keys()
            for key, timed in at["timed"].items():
                assert timed["speed"]["tflops"] > 1
                product = entry["variants"][key]["product"]
                assert (timed["check"] is None) is not product
                assert not product or timed["check"]["error_in_bounds"] <= 1


def test_numbers_and_words_follow_the_results(committed: dict[str, Any], report: Any, tmp_path: Path) -> None:
    text = PAGE.read_text()
    changed = json.loads(json.dumps(committed))
    (entry,) = (entry for entry in changed["probes"] if entry["probe"] == "no-loads")
    (at,) = entry["sizes"]
    timed = at["timed"]["no-loads"]
    timed["ratio"] = 1.0
    timed["speed"] = dict(at["timed"]["rung-12"]["speed"])
    entry["examined"]["no-loads"]["build"]["registers"] = 99
    entry["judged"][0]["emulated"] = 0.5
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(changed))
    new = report.render(text, load_results(path))
    assert report.render(new, load_results(RESULTS)) == text
    before, after = (part(page, "no-loads") for page in (text, new))
    assert "Copying costs rung 12 nothing" in after
    assert "Copying costs rung 12 nothing" not in before
    assert "x 1.000 (rung 12 as it is)" in after
    assert "| 99 |" in after
    assert "Predictions: 3 of 4 hold in the emulator" in after
    assert "Not so: global loads of no copies after the first slice, x 0.016 predicted and x 0.500" in after
    for probe in PROBES:
        if probe != "no-loads":
            assert part(new, probe) == part(text, probe)


def part(page: str, name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- end of {name} -->", page, re.DOTALL)
    assert found is not None, name
    return found[1]


def test_what_is_no_product_is_marked_on_the_page() -> None:
    text = PAGE.read_text()
    for name in ("no-loads", "stores-only", "same-slice"):
        marked = [line for line in part(text, name).splitlines() if "not a product" in line]
        assert len(marked) == 2  # once among the kernels, once beside its rate
    others = [name for name in PROBES if name not in ("no-loads", "stores-only", "same-slice")]
    assert not any("not a product" in part(text, name) for name in others)


def test_a_page_without_a_part_is_refused(report: Any) -> None:
    results = load_results(RESULTS)
    text = PAGE.read_text().replace("<!-- padding -->", "")
    with pytest.raises(SystemExit, match="the page has parts for setting, no-loads"):
        report.render(text, results)
    fewer = replace(results, found=results.found[1:])
    with pytest.raises(SystemExit, match="the results for setting, stores-only"):
        report.render(PAGE.read_text(), fewer)


def test_check_fails_on_a_stale_page(report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / "probes.md"
    stale.write_text(PAGE.read_text().replace("| 4096 |", "| 4095 |"))
    monkeypatch.setattr(report, "PAGE", stale)
    monkeypatch.setattr(sys, "argv", ["probe_report.py", "--check"])
    with pytest.raises(SystemExit, match="is out of date: run python"):
        report.main()
    assert "| 4095 |" in stale.read_text()
    monkeypatch.setattr(sys, "argv", ["probe_report.py"])
    report.main()
    assert stale.read_text() == PAGE.read_text()


def test_every_probe_has_a_section_that_names_it() -> None:
    headings = re.findall(r"^## ([\w-]+): ", PAGE.read_text(), re.MULTILINE)
    assert headings == [*PROBES]
