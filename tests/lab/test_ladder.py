"""The ladder's engine: what it runs, keeps, leaves out and says; with a GPU made up where one is needed."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ladders import made_up_ladder

from tilewave.bench.environment import GpuState
from tilewave.bench.timing import Timing
from tilewave.compiler import compile_source
from tilewave.device import get_spec
from tilewave.emulator import Memory, launch
from tilewave.errors import CompileError, MeasurementError
from tilewave.lab import emulate, ladder, measure
from tilewave.lab.judge import judge
from tilewave.lab.ladder import Gpu, run_ladder
from tilewave.lab.launches import launch_of
from tilewave.lab.records import Check, Row, Speed, load_ladder
from tilewave.lab.registry import get_rung, load_rungs

SPEC = get_spec("GB10")


class Recorder:
    """Progress that keeps what it hears."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int]] = []
        self.steps: list[str] = []

    def start(self, what: str, steps: int) -> None:
        self.stages.append((what, steps))

    def step(self, done: str) -> None:
        self.steps.append(done)


class FakeDevice:
    name = "NVIDIA Example"
    pci_bus_id = "0000:01:00.0"
    ordinal = 0


class FakeBaseline:
    name = "cuBLAS of the tests"


class FakeMeasurer:
    """Rates that grow with the rung's number; ``wrong`` rungs fail their check, ``broken`` sizes raise."""

    calls: list[tuple[int, tuple[int, ...], float | None]]
    wrong: frozenset[int] = frozenset()
    broken: frozenset[int] = frozenset()

    def __init__(self, device: Any, spec: Any, baseline: Any) -> None:
        self.baseline = baseline

    def measure(self, size: int, candidates: Any, rng: Any, budget_s: float | None) -> measure.MeasuredSize:
        numbers = tuple(candidate.rung.number for candidate in candidates)
        type(self).calls.append((size, numbers, budget_s))
        if size in self.broken:
            raise MeasurementError("above the peak")
        rungs = {}
        for number in numbers:
            right = number not in self.wrong
            check = Check("GPU", (size, size, size), 0.25 if right else float("inf"))
            speed = Speed((1.0, 1.1), 2, float(number), 0.1, number / 50)
            rungs[number] = measure.Measured(check, 1e-4, speed if right else None)
        base = None if self.baseline is None else Speed((1.0,), 2, 50.0, 0.0)
        return measure.MeasuredSize(rungs, base, 0.01, GpuState(1980.0), GpuState(1950.0), True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.setattr(measure, "Measurer", FakeMeasurer)
    monkeypatch.setattr(FakeMeasurer, "calls", [], raising=False)
    return Gpu(FakeDevice(), FakeBaseline())  # type: ignore[arg-type]


RUNGS = [get_rung(1), get_rung(3)]


def test_times_come_with_baseline_checks_counters_and_session(gpu: Gpu, tmp_path: Path) -> None:
    path = tmp_path / "l.json"
    progress = Recorder()
    found = run_ladder([33, 64], RUNGS, SPEC, gpu=gpu, path=path, progress=progress, command=["tilewave"])
    assert load_ladder(path) == found
    assert [stage for stage, _ in progress.stages] == ["compiling", "timing", "counting"]
    assert len(progress.steps) == sum(steps for _, steps in progress.stages)
    assert [(row.rung, row.size) for row in found.rows] == [(1, 33), (3, 33), (1, 64), (3, 64)]
    for row in found.rows:
        assert row.speed is not None
        assert row.speed.tflops == row.rung
        assert row.difference == 1e-4
        assert [check.where for check in row.checks] == ["GPU"]
        assert row.counted is not None
    assert [base.size for base in found.baselines] == [33, 64]
    assert found.baselines[0].name == "cuBLAS of the tests"
    (session,) = found.sessions
    assert session["gpu"] == "NVIDIA Example"
    assert [state["size"] for state in session["states"]] == [33, 64]
    assert session["states"][0]["before"]["sm_clock_mhz"] == 1980.0


def test_what_was_timed_is_not_timed_again(gpu: Gpu, tmp_path: Path) -> None:
    path = tmp_path / "l.json"
    run_ladder([33], RUNGS[:1], SPEC, gpu=gpu, path=path)
    found = run_ladder([33, 64], RUNGS, SPEC, gpu=gpu, path=path)
    assert [(size, numbers) for size, numbers, _ in FakeMeasurer.calls] == [
        (33, (1,)),
        (33, (3,)),
        (64, (1, 3)),
    ]
    assert [(row.rung, row.session) for row in found.rows if row.size == 33] == [(1, 0), (3, 1)]
    other = replace_baseline(gpu)
    run_ladder([33], RUNGS, SPEC, gpu=other, path=path)
    assert FakeMeasurer.calls[-1][:2] == (33, (1, 3))  # compared with another library: all again


def replace_baseline(gpu: Gpu) -> Gpu:
    class Other:
        name = "cuBLAS of another version"

    return replace(gpu, baseline=Other())  # type: ignore[arg-type]


def test_a_wrong_rung_has_no_speed_and_is_named(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeMeasurer, "wrong", frozenset({3}))
    found = run_ladder([33], RUNGS, SPEC, gpu=gpu)
    row = found.find(3, 33)
    assert row is not None
    assert row.speed is None
    assert not row.checks[0].holds
    assert any("rung 03 is WRONG at N = 33" in note for note in found.notes)


def test_what_was_measured_before_a_failure_is_kept(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeMeasurer, "broken", frozenset({64}))
    path = tmp_path / "l.json"
    with pytest.raises(MeasurementError):
        run_ladder([33, 64], RUNGS, SPEC, gpu=gpu, path=path)
    kept = load_ladder(path)
    assert all(kept.find(rung.number, 33).speed for rung in RUNGS)  # type: ignore[union-attr]
    monkeypatch.setattr(FakeMeasurer, "broken", frozenset())
    run_ladder([33, 64], RUNGS, SPEC, gpu=gpu, path=path)
    assert FakeMeasurer.calls[-1][:2] == (64, (1, 3))


def test_the_budget_is_shared_out_and_what_it_leaves_out_is_said(gpu: Gpu) -> None:
    found = run_ladder([32, 64, 4096], RUNGS, SPEC, gpu=gpu, budget_s=1000.0)
    budgets = [budget for _, _, budget in FakeMeasurer.calls]
    # Small sizes take as long as each other, 4096 twice as long; what one leaves goes to the later ones.
    assert budgets == pytest.approx([1000 / 4, 1000 / 3, 1000], rel=0.1)
    assert found.notes == []


def test_a_budget_that_is_used_up_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(ladder, "_examine", lambda task: ran.append(task) or slow_examine(task))
    found = run_ladder([8], load_rungs(), SPEC, budget_s=0.5)
    assert 0 < len(ran) < len(load_rungs())
    assert len(found.rows) == len(ran)
    assert any(f"{len(load_rungs()) - len(ran)} of {len(load_rungs())} rows" in note for note in found.notes)


def slow_examine(task: Any) -> Any:
    import time

    time.sleep(0.2)
    program, kernel, build = emulate.build(get_rung(1), SPEC, task.arch, 8)
    return ladder._Examined(build, (), emulate.count(get_rung(1), program, kernel, 8))


def test_worker_processes_find_the_same(tmp_path: Path) -> None:
    alone = run_ladder([65], RUNGS, SPEC, jobs=1)
    shared = run_ladder([65], RUNGS, SPEC, jobs=2, path=tmp_path / "l.json")
    assert [(row.build, row.counted) for row in shared.rows] == [
        (row.build, row.counted) for row in alone.rows
    ]
    assert all(check.holds for row in shared.rows for check in row.checks)


def test_every_size_of_a_rung_shows_its_checks() -> None:
    found = run_ladder([8, 16], RUNGS[:1], SPEC)
    assert found.rows[0].checks
    assert found.rows[0].checks == found.rows[1].checks


@pytest.mark.parametrize(("number", "beyond"), [(2, 7), (4, 5), (5, 8), (8, 7), (8, 8)])
def test_sampled_counters_equal_those_of_every_block(
    number: int, beyond: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulate, "FULL_THREADS", 0)
    rung = get_rung(number)
    size = 3 * max(rung.tile.bm, rung.tile.bn) + beyond
    program, kernel, _ = emulate.build(rung, SPEC, "sm_121", size)
    sampled = emulate.count(rung, program, kernel, size)
    memory = Memory()
    matrix = np.zeros((size, size), np.float32)
    arguments = [memory.put(matrix), memory.put(matrix), memory.empty((size, size), np.float32)]
    whole = launch(
        program.ptx, kernel.symbol, rung.grid(size, size), rung.block, [*arguments, size, size, size], memory
    )
    assert sampled.blocks_run < sampled.blocks_total == whole.blocks_total
    for name, value in emulate._flat(whole.counters).items():
        assert getattr(sampled, name) == value, name


def test_block_kinds_cover_the_grid_once(rng: np.random.Generator) -> None:
    for _ in range(50):
        grid = (int(rng.integers(1, 9)), int(rng.integers(1, 9)), int(rng.integers(1, 3)))
        kinds = emulate.block_kinds(grid)
        assert sum(kind.number for kind in kinds) == grid[0] * grid[1] * grid[2]
        picked = [index for kind in kinds for index in kind.representatives]
        assert len(set(picked)) == len(picked)
        assert all(0 <= index < grid[0] * grid[1] * grid[2] for index in picked)
        for kind in kinds:
            edges = {
                (index % grid[0] == grid[0] - 1, index // grid[0] % grid[1] == grid[1] - 1)
                for index in kind.representatives
            }
            assert len(edges) == 1


def test_predictions_are_judged_at_their_size_only() -> None:
    found = run_ladder([64], [get_rung(6)], SPEC)
    (outcome,) = found.rows[0].outcomes  # blocks per SM: a figure of the compiler, not of the size
    assert outcome.what == "blocks per sm"
    assert outcome.holds is True
    row = found.rows[0]
    wrong = judge([replace(row, build=replace(row.build, blocks_per_sm=1))])[0].outcomes[0]
    assert wrong.holds is False
    assert (wrong.predicted, wrong.found) == ("2", "1")


def test_predictions_for_a_number_of_sms_are_judged_there_only() -> None:
    rows = [
        replace(at_2048(8, global_stores=stores), rung=number) for number, stores in ((22, 100), (23, 175))
    ]
    for sms, predicted, holds in ((48, "x 1.750", True), (132, "x 1.000", False)):
        (outcome,) = (o for o in judge(rows, sms)[1].outcomes if o.what == "global stores")
        assert (outcome.predicted, outcome.found, outcome.holds) == (predicted, "x 1.750", holds)
    for unknown in (None, 40):
        assert not [o for o in judge(rows, unknown)[1].outcomes if o.what == "global stores"]


def test_the_ladder_judges_by_the_sms_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(ladder, "judge", lambda rows, sms: asked.append(sms) or rows)
    run_ladder([64], [get_rung(6)], get_spec("H200"))
    assert asked == [132]


def test_a_ratio_needs_the_rung_it_builds_on() -> None:
    rows = [at_2048(8, shared_loads=100), at_2048(7, shared_loads=50)]
    judged = {row.rung: row for row in judge(rows)}
    by_name = {outcome.what: outcome for outcome in judged[8].outcomes}
    assert by_name["shared loads"].found == "x 2.000"
    assert by_name["shared loads"].holds is False
    alone = judge(rows[:1])[0].outcomes
    assert {outcome.holds for outcome in alone} == {None}


def at_2048(number: int, **counters: int) -> Row:
    row = made_up_ladder(np.random.default_rng(), sizes=(2048,)).find(number, 2048)
    assert row is not None
    assert row.counted is not None
    return replace(row, counted=replace(row.counted, **counters))


def test_a_compile_error_comes_back_from_a_worker_with_its_log() -> None:
    error = pickle.loads(pickle.dumps(CompileError("a.cu does not compile", "a.cu(3): error")))
    assert (str(error), error.log) == ("a.cu does not compile", "a.cu(3): error")


def test_ragged_shapes_reach_every_kernel_of_a_rung() -> None:
    for rung in load_rungs():
        reached = {launch_of(rung, *shape, SPEC).entry for shape in emulate.ragged_shapes(rung)}
        assert reached == set(rung.entries)
        for m, n, k in emulate.ragged_shapes(rung):
            assert m % rung.tile.bm
            assert n % rung.tile.bn
            assert k % rung.tile.bk or rung.tile.bk == 1


def test_a_kernel_that_writes_nothing_fails_its_check(rng: np.random.Generator) -> None:
    rung = get_rung(1)
    source = rung.source()
    idle = source.text.replace("C[", "if (K < 0) C[")
    assert idle != source.text
    program = compile_source(replace(source, text=idle), rung.entries, "sm_121")
    checks = emulate.check(rung, program, rng)
    assert all(check.error_in_bounds == float("inf") and not check.holds for check in checks)


def test_speed_is_the_ratio_within_rounds() -> None:
    ours, theirs = Timing("a", 1, (1.0, 2.0)), Timing("b", 1, (3.0, 6.0))
    assert ours.speed_over(theirs) == 3.0
