"""docs/precision.md: its table is the committed run, its code runs, and the run keeps every bound."""

from __future__ import annotations

import itertools
import json
import re
import runpy
from pathlib import Path

import numpy as np

from snippets import blocks, run_in_order
from tilewave.bench.accuracy.command import markdown_of
from tilewave.bench.accuracy.records import load_accuracy
from tilewave.precision.fp16x3 import COARSE, FINE
from tilewave.precision.mode_bounds import MODES
from tilewave.problem import Precision

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "precision.md").read_text(encoding="utf-8")
RUN = load_accuracy(ROOT / "benchmarks" / "results" / "accuracy_models.json")


def test_the_table_is_the_committed_run() -> None:
    table = PAGE.partition("<!-- table -->")[2].partition("<!-- end of table -->")[0]
    assert table.strip() == markdown_of(RUN, ["normal", "uniform"])


def test_the_table_of_sums_is_the_committed_run_and_keeps_what_the_page_says() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "fp16x3_sums.json").read_text(encoding="utf-8"))
    script = runpy.run_path(str(ROOT / "benchmarks" / "fp16x3_sums.py"), run_name="fp16x3_sums")
    table = PAGE.partition("<!-- sums -->")[2].partition("<!-- end of sums -->")[0]
    assert table.strip() == script["table"](record)
    assert {(one["data"], one["k"]) for one in record["products"]} == {
        (data, k) for data in ("normal", "uniform") for k in script["LENGTHS"]
    }
    coarse, fine = (next(k for k, v in script["KINDS"].items() if v == sums) for sums in (COARSE, FINE))
    for one in record["products"]:
        errors = one["errors"]
        assert errors[coarse] <= min(errors["K / 1"], errors["K / 2"]), one
        assert errors[fine] <= min(errors[f"K / {pieces}"] for pieces in script["PIECES"]), one


def test_errors_of_sums_are_made_afresh(rng: np.random.Generator) -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "fp16x3_sums.py"), run_name="fp16x3_sums")
    errors = script["errors"]("uniform", 1024, 48, rng)
    assert errors["16, runs"] < errors["K / 4"] < errors["64"] < errors["K / 1"]
    a, b = rng.random((2, 30), np.float32), rng.random((30, 3), np.float32)
    halves = (a[:, s].astype(float) @ b[s] for s in (slice(15), slice(15, 30)))
    assert np.allclose(script["cut_chains"](a, b, 2), sum(halves), rtol=1e-6)


def test_the_run_keeps_every_bound_and_fp16x3_is_float32() -> None:
    for point in RUN.points:
        assert point.in_bounds is not None
        if point.contender != "fp16x3-alone":
            assert point.in_bounds <= 1
    for data, sums in itertools.product(("normal", "uniform"), ("fp16x3", "fp16x3-large")):
        pairs = zip(RUN.series(data, sums), RUN.series(data, "ieee"), strict=True)
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
