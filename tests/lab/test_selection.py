"""The selection suite with made-up times: what is drawn, what is kept, and how choices are judged."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tilewave.bench.environment import GpuState
from tilewave.device import get_spec
from tilewave.errors import MeasurementError, UsageError
from tilewave.lab import selection
from tilewave.lab.launches import launch_of
from tilewave.lab.measure import Measured, MeasuredSize
from tilewave.lab.records import Check, Speed
from tilewave.lab.registry import Rung, get_rung
from tilewave.lab.selection import CONTENDERS, SELECTORS, VARIANTS, Place, Selection, draw_places
from tilewave.lab.workers import Budget
from tilewave.planner import LARGE, SMALL

H200 = get_spec("H200")
ARCH = "sm_90a"


class Clock:
    """Seconds that pass only when a product is measured."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeMeasure:
    """Every rung takes the milliseconds that ``times`` says, twice over in the second round."""

    def __init__(self, clock: Clock, seconds: float = 4.0) -> None:
        self.clock, self.seconds = clock, seconds
        self.times = dict.fromkeys(CONTENDERS, 1.0)
        self.wrong: frozenset[int] = frozenset()
        self.calls: list[tuple[tuple[int, int, int], float | None]] = []

    def __call__(
        self, shape: tuple[int, int, int], rungs: Sequence[Rung], budget_s: float | None
    ) -> MeasuredSize:
        self.calls.append((shape, budget_s))
        self.clock.now += self.seconds
        state = GpuState(sm_clock_mhz=1980.0)
        found = {}
        for rung in rungs:
            first = self.times[rung.number]
            error = 2.0 if rung.number in self.wrong else 0.1
            speed = Speed((first, 2 * first), 1, 1.0, 0.0, 1.0)
            found[rung.number] = Measured(Check("GPU", shape, error), 0.0, speed)
        return MeasuredSize(found, Speed((1.0, 2.0), 1, 1.0, 0.0), 0.1, state, state, True)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def measure(clock: Clock) -> FakeMeasure:
    return FakeMeasure(clock)


def opened(path: Path | None, seed: int = 1, baseline: str = "a library") -> Selection:
    return Selection(path, H200, ARCH, baseline, seed, {"date": "today"})


def quiet(line: str) -> None:
    assert line


@pytest.mark.parametrize("seed", range(5))
def test_40_different_products_of_all_kinds(seed: int) -> None:
    places = draw_places(seed)
    assert len(places) == len({place.shape for place in places}) == 40
    squares = [place for place in places if place.m == place.n == place.k]
    assert {place.m for place in squares} >= {1024, 1025, 2048, 2049, 4096}
    assert 15 <= len(squares) <= 25
    assert 15 <= sum(place.wide for place in places) <= 25
    for place in places:
        assert 1e9 <= 2.0 * math.prod(place.shape) <= 2e11
        assert place.kind == "article" or place.kind.startswith("ragged") != place.wide
    assert min(place.k for place in places) <= 256
    assert max(place.k for place in places) >= 4096


def test_a_seed_draws_the_same_products_and_another_one_others() -> None:
    assert draw_places(3) == draw_places(3)
    assert set(draw_places(3)) & set(draw_places(4)) == {
        place for place in draw_places(3) if place.kind == "article"
    }


@pytest.mark.parametrize("selector", SELECTORS)
def test_the_recorded_choice_is_what_the_selecting_rung_launches(
    selector: int, rng: np.random.Generator
) -> None:
    """The rung named as the choice deals the same tiles to the same blocks as the selector does."""
    chosen = set()
    for place in draw_places(int(rng.integers(1 << 32))):
        decided = selection.choice(selector, place, H200)
        chosen.add(decided["rung"])
        assert decided["rung"] in SELECTORS[selector]
        ours = launch_of(get_rung(selector), *place.shape, H200)
        theirs = launch_of(get_rung(decided["rung"]), *place.shape, H200)
        blocks = ours.blocks, ours.block
        assert blocks == (theirs.blocks, theirs.block)
        if theirs.cut is not None:
            assert ours.cut == theirs.cut
    assert len(chosen) >= 3


@pytest.mark.parametrize("selector", SELECTORS)
def test_every_rung_that_a_selector_may_choose_is_weighed(selector: int) -> None:
    decided = selection.choice(selector, Place("square", 2049, 2049, 2049), H200)
    assert {int(rung) for rung in decided["weighed"]} == set(SELECTORS[selector])
    costs = {int(rung): entry["cost"] for rung, entry in decided["weighed"].items()}
    assert min(costs, key=lambda rung: costs[rung]) == decided["rung"]
    assert costs[decided["rung"]] == 1.0
    assert decided["weighed"][str(decided["rung"])]["rejected"] is None


def test_what_cannot_run_has_a_reason_instead_of_a_cost() -> None:
    # 12 x 11 tiles fill 132 SMs: there is no incomplete wave to cut.
    decided = selection.choice(23, Place("rectangle", 12 * 128, 11 * 256, 1024), H200)
    entry = decided["weighed"]["21"]
    assert entry["cost"] is None
    assert "no incomplete wave" in entry["rejected"]


def test_a_gpu_without_asynchronous_copies_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cp\.async"):
        selection.choice(22, Place("square", 1024, 1024, 1024), get_spec("T4"))


def test_all_products_are_measured_and_the_time_is_shared_out(
    tmp_path: Path, clock: Clock, measure: FakeMeasure
) -> None:
    path = tmp_path / "selection.json"
    suite = opened(path)
    assert suite.run(measure, Budget(200.0, clock), quiet)
    assert [shape for shape, _ in measure.calls] == [place.shape for place in suite.places]
    assert [budget for _, budget in measure.calls] == pytest.approx(
        [(200 - 4 * done) / (40 - done) for done in range(40)]
    )
    held = json.loads(path.read_text())
    assert len(held["rows"]) == 40
    assert held["seed"] == 1
    assert set(held["rows"][0]["rungs"]) == {str(number) for number in (*VARIANTS, *SELECTORS)}


def test_a_later_call_takes_up_where_the_budget_ended(
    tmp_path: Path, clock: Clock, measure: FakeMeasure
) -> None:
    path = tmp_path / "selection.json"
    assert not opened(path).run(measure, Budget(30.0, clock), quiet)
    assert 4 * len(measure.calls) <= 30  # none was started that would have ended later
    assert len(measure.calls) == 7
    places = opened(path).places
    again = opened(path, seed=99)  # the file's products are kept, not drawn anew
    assert again.places == places
    assert again.run(measure, Budget(None, clock), quiet)
    assert [shape for shape, _ in measure.calls] == [place.shape for place in places]
    assert again.left() == []
    assert [row["session"] for row in again.data["rows"]] == [0] * 7 + [1] * 33


def test_rows_of_other_kernels_or_another_choice_are_measured_again(
    tmp_path: Path, clock: Clock, measure: FakeMeasure, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "selection.json"
    opened(path).run(measure, Budget(None, clock), quiet)
    assert opened(path).left() == []
    assert len(opened(path, baseline="another library").left()) == 40
    moved = opened(path).places[3]
    original = selection.choice

    def otherwise(selector: int, place: Place, spec: Any) -> dict[str, Any]:
        decided = original(selector, place, spec)
        return {**decided, "plan": "another"} if place == moved else decided

    monkeypatch.setattr(selection, "choice", otherwise)
    assert opened(path).left() == [moved]


def test_a_file_of_another_gpu_is_refused(tmp_path: Path, clock: Clock, measure: FakeMeasure) -> None:
    path = tmp_path / "selection.json"
    opened(path).run(measure, Budget(None, clock), quiet)
    with pytest.raises(UsageError, match="give another file"):
        Selection(path, get_spec("GB10"), ARCH, "a library", 1)


def test_a_wrong_kernel_stops_the_suite(clock: Clock, measure: FakeMeasure) -> None:
    measure.wrong = frozenset({18})
    with pytest.raises(MeasurementError, match="rungs 18 are WRONG"):
        opened(None).run(measure, Budget(None, clock), quiet)


def test_the_loss_is_against_the_best_that_the_selector_may_choose(
    clock: Clock, measure: FakeMeasure
) -> None:
    suite = opened(None)
    # Stream-K is the fastest, but rung 22 may not choose it.
    measure.times = {15: 3.0, 17: 2.0, 18: 2.5, 21: 1.0, 22: 3.3, 23: 1.1}
    suite.run(measure, Budget(None, clock), quiet)
    for selector, best, best_ms in ((22, 17, 2.0), (23, 21, 1.0)):
        found = list(selection.verdicts(suite.data, selector))
        assert len(found) == 40
        for verdict in found:
            assert verdict.best == best
            assert verdict.loss == pytest.approx(measure.times[verdict.chosen] / best_ms)
            assert verdict.own_loss == pytest.approx(measure.times[selector] / best_ms)
            assert (verdict.chosen == best) == (verdict.loss == 1.0)
            if verdict.expected is None:
                assert verdict.ruled_out
            else:
                assert verdict.expected >= 1.0
    lines = selection.summary(suite.data)
    assert len(lines) == 2
    assert "rung 22 at 40 of 40 products" in lines[0]


def test_the_summary_says_when_there_is_nothing_and_which_was_the_worst(
    clock: Clock, measure: FakeMeasure
) -> None:
    suite = opened(None)
    assert selection.summary(suite.data) == ["nothing has been measured yet"]
    slow = suite.places[5]
    decided = selection.choice(23, slow, H200)["rung"]

    def uneven(shape: Any, rungs: Any, budget_s: float | None) -> MeasuredSize:
        measure.times = {
            number: 7.0 if shape == slow.shape and number == decided else 1.0 for number in CONTENDERS
        }
        return measure(shape, rungs, budget_s)

    suite.run(uneven, Budget(None, clock), quiet)
    worst = selection.summary(suite.data)[-1]
    assert f"at worst x 7.000 at {' x '.join(map(str, slow.shape))} (took {decided}" in worst
    assert "39 times within 2 % of it" in worst


def test_another_estimate_gives_the_losses_of_its_own_choices(clock: Clock, measure: FakeMeasure) -> None:
    suite = opened(None)
    measure.times = {15: 3.0, 17: 2.0, 18: 2.5, 21: 1.0, 22: 3.3, 23: 1.1}
    suite.run(measure, Budget(None, clock), quiet)
    as_it_is = selection.losses_if(suite.data, H200, 1.0, 0.5)
    assert as_it_is == [verdict.loss for verdict in selection.verdicts(suite.data, 23)]
    dear = selection.losses_if(suite.data, H200, 1e6, 0.5)
    assert set(dear) <= {3.0, 2.0}  # nothing is cut: rungs 15 and 17
    free = selection.losses_if(suite.data, H200, 0.0, 0.5)
    assert sum(loss == 1.0 for loss in free) > sum(loss == 1.0 for loss in as_it_is)
    # Small tiles that gain nothing by sharing an SM are chosen less often.
    alone = selection.losses_if(suite.data, H200, 1e6, 1.0)
    assert alone.count(2.0) < dear.count(2.0)


def test_rounds_are_compared_one_by_one() -> None:
    row = {
        "rungs": {
            "15": {"speed": {"milliseconds": [1.0, 20.0, 3.0]}},
            "17": {"speed": {"milliseconds": [2.0, 30.0, 4.0]}},
        }
    }
    assert selection.times_as_slow(row, 17, 15) == 1.5  # of the ratios 2, 1.5 and 1.33
    assert selection.best_of(row, (17, 15)) == 15


def test_rungs_of_variants() -> None:
    assert {get_rung(number).schedule is None for number in (15, 17)} == {True}
    for number in VARIANTS:
        tile = get_rung(number).tile
        variant = {(128, 256): LARGE, (128, 128): SMALL}[tile.bm, tile.bn]
        assert (variant.tile.tm, variant.tile.tn) == (tile.tm, tile.tn)


def test_the_script_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], measure: FakeMeasure
) -> None:
    """benchmarks/selection.py on a machine whose GPU is made up."""
    path = Path(__file__).parents[2] / "benchmarks" / "selection.py"
    described = importlib.util.spec_from_file_location("selection_script", path)
    assert described is not None
    assert described.loader is not None
    script = importlib.util.module_from_spec(described)
    described.loader.exec_module(script)

    class FakeMeasurer:
        def __init__(self, *_: object) -> None:
            pass

        def measure_shape(self, shape: Any, candidates: Any, rng: Any, budget_s: float) -> MeasuredSize:
            assert [candidate.rung.number for candidate in candidates] == list(CONTENDERS)
            return measure(shape, [candidate.rung for candidate in candidates], budget_s)

    gpu = SimpleNamespace(device=None, baseline=SimpleNamespace(name="a library"))
    program = SimpleNamespace(kernels={get_rung(n).entry: None for n in CONTENDERS})
    monkeypatch.setattr(script, "require_gpu", lambda: None)
    monkeypatch.setattr(script, "open_gpu", lambda: (gpu, H200, "a made-up GPU"))
    monkeypatch.setattr(script, "compile_contenders", lambda *_: dict.fromkeys(CONTENDERS, program))
    monkeypatch.setattr(script, "Measurer", FakeMeasurer)
    out = tmp_path / "selection.json"
    assert script.select(out, 100.0, 5)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "a made-up GPU"
    assert printed[-1] == f"complete: {out}"
    assert sum(line.startswith("rung 2") for line in printed) == 2
    assert json.loads(out.read_text())["seed"] == 5
