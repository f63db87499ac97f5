"""docs/precision.md: its table is the committed run, its code runs, and the run keeps every bound."""

from __future__ import annotations

import re
from pathlib import Path

from snippets import blocks, run_in_order
from tilewave.bench.accuracy.command import markdown_of
from tilewave.bench.accuracy.records import load_accuracy
from tilewave.precision.mode_bounds import MODES
from tilewave.problem import Precision

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "precision.md").read_text(encoding="utf-8")
RUN = load_accuracy(ROOT / "benchmarks" / "results" / "accuracy_models.json")


def test_the_table_is_the_committed_run() -> None:
    table = PAGE.partition("<!-- table -->")[2].partition("<!-- end of table -->")[0]
    assert table.strip() == markdown_of(RUN, ["normal", "uniform"])


def test_the_run_keeps_every_bound_and_fp16x3_is_float32() -> None:
    for point in RUN.points:
        assert point.in_bounds is not None
        if point.contender != "fp16x3-alone":
            assert point.in_bounds <= 1
    for data in ("normal", "uniform"):
        pairs = zip(RUN.series(data, "fp16x3"), RUN.series(data, "ieee"), strict=True)
        for mode, plain in pairs:
            assert mode.relative is not None
            assert plain.relative is not None
            assert mode.relative <= (plain.relative if mode.k >= 1024 else 3e-7)


def test_the_command_on_the_page_is_the_one_of_the_run() -> None:
    shown = re.search(r"^tilewave accuracy .*?(?=^```)", PAGE, re.MULTILINE | re.DOTALL)
    assert shown is not None
    words = [Path(word).name for word in shown.group().replace("\\\n", " ").split()]
    recorded = RUN.environment["command"].split()  # with files by their names only
    assert recorded[-len(words) + 1 :] == words[1:]


def test_every_mode_is_on_the_page() -> None:
    assert set(MODES) == {str(mode) for mode in Precision}
    for mode in MODES:
        assert f"| `{mode}` |" in PAGE


def test_the_code_of_the_page_runs() -> None:
    codes = blocks("docs/precision.md", gpu=False)
    assert codes
    run_in_order(codes)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).resolve().exists(), target
