"""The ladder's tables on a narrow terminal: nothing cut off, nothing missing, wrong results shouted."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from ladders import made_up_ladder
from rich.console import Console

from tilewave.lab.judge import judge
from tilewave.lab.ladder_table import print_ladder
from tilewave.lab.records import Check, Ladder
from tilewave.lab.registry import get_rung, load_rungs


def shown(ladder: Ladder, width: int = 80, rungs: range = range(1, 13)) -> str:
    stream = io.StringIO()
    print_ladder(ladder, rungs, ladder.sizes(), Console(file=stream, width=width, highlight=False))
    return stream.getvalue()


def with_real_titles(ladder: Ladder) -> Ladder:
    """The made-up figures under the registry's names and reports, whose lengths the columns must hold."""
    ladder.rows = [
        replace(row, title=get_rung(row.rung).title[3:], reported=get_rung(row.rung).reported.throughput)
        for row in ladder.rows
    ]
    return ladder


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("width", [80, 100, 120])
def test_nothing_is_cut_off(rng: np.random.Generator, timed: bool, width: int) -> None:
    numbers = range(1, len(load_rungs()) + 1)
    ladder = made_up_ladder(rng, timed=timed, rungs=len(numbers))
    text = shown(with_real_titles(ladder), width, numbers)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for rung in load_rungs():
        assert text.count(f"{rung.number:02d} {rung.name.replace('_', ' ')}") == 4 + 2 * timed


def test_figures_stand_where_they_belong(rng: np.random.Generator) -> None:
    ladder = made_up_ladder(rng, sizes=(1024,))
    row, baseline = ladder.find(6, 1024), ladder.baseline(1024)
    assert row is not None
    assert row.speed is not None
    assert baseline is not None
    lines = [line.split() for line in shown(ladder).splitlines() if line.startswith("06 made up 6")]
    speed, build, counted, _ = lines
    assert speed[4:7] == [f"{row.speed.tflops:.2f}", "2.0", "30.0"]
    assert speed[8:10] == ["+19", "%"]
    assert build[4:9] == [str(row.build.registers), "8/8", "32.0", "2", "31%"]
    assert row.counted is not None
    assert counted[4] == "50%"
    assert counted[7] == f"{row.counted.passes_per_read:.2f}"
    assert counted[10] == f"{row.counted.passes_per_write:.2f}"
    assert f"cuBLAS {baseline.speed.tflops:.2f}" in " ".join(shown(ladder).split())


def test_wrong_results_are_named(rng: np.random.Generator) -> None:
    ladder = made_up_ladder(rng, sizes=(1024,))
    wrong = (Check("GPU", (1024, 1024, 1024), float("inf")),)
    row = ladder.find(4, 1024)
    assert row is not None
    ladder.put(replace(row, checks=wrong, speed=None))
    text = shown(ladder)
    assert "WRONG results: rungs 4." in text
    assert "wrong" in next(line for line in text.splitlines() if line.startswith("04 made up 4"))
    assert "are right" not in text


def test_predictions_that_failed_and_that_wait_are_counted(rng: np.random.Generator) -> None:
    text = " ".join(shown(made_up_ladder(rng, sizes=(2048,), rungs=2)).split())
    assert "2 of 4 predictions held, 2 could not be judged." in text
    ladder = made_up_ladder(rng, sizes=(64,))
    ladder.rows = judge(ladder.rows)
    assert "More is predicted about N = 2048." in " ".join(shown(ladder).split())


def test_an_empty_ladder_prints_nothing(rng: np.random.Generator) -> None:
    assert shown(Ladder("GB10", True)) == ""
    assert shown(made_up_ladder(rng, rungs=3), rungs=range(7, 9)) == ""
