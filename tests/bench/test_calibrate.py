"""What a calibration draws, keeps and refuses; no GPU is asked."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from numpy.random import Generator
from typer.testing import CliRunner

from tilewave.bench import calibrate
from tilewave.bench.sampling import POPULATIONS, contenders_of, draw_problem
from tilewave.cli import app
from tilewave.device import get_spec
from tilewave.errors import UsageError
from tilewave.kernels.families import FAMILIES
from tilewave.planner.gemm import GemmPlanner
from tilewave.planner.gemm.costs import Calibration
from tilewave.planner.gemm.fit import Reading

H200 = get_spec("H200")


@pytest.fixture
def draw(rng: Generator) -> random.Random:
    return random.Random(int(rng.integers(2**32)))


def test_every_population_is_drawn_and_every_problem_can_be_planned(draw: random.Random) -> None:
    planner, drawn = GemmPlanner(H200, FAMILIES), Counter()
    for _ in range(300):
        population, problem = draw_problem(draw)
        drawn[population] += 1
        assert problem.multiply_adds <= 1e11
        assert planner.plan(problem).blocks > 0
    assert set(drawn) == set(POPULATIONS)
    assert sum(share for share, _ in POPULATIONS.values()) == pytest.approx(1)


def test_contenders_hold_the_choice_its_schedules_and_kernels_seldom_read(draw: random.Random) -> None:
    planner = GemmPlanner(H200, FAMILIES)
    rare = 0
    for _ in range(100):
        _, problem = draw_problem(draw)
        chosen = contenders_of(planner, problem, draw, {})
        plan = planner.plan_in_one(problem)
        names = [candidate.instance.name for candidate in chosen]
        assert (plan.instance.name, plan.schedule) in [(c.instance.name, c.schedule) for c in chosen]
        assert len({str(candidate) for candidate in chosen}) == len(chosen)
        kinds = {c.schedule.kind for c in planner.candidates(problem) if c.instance == plan.instance}
        assert len([c for c in chosen if c.instance == plan.instance]) >= min(len(kinds), 1)
        # An instance without readings goes before those that have many.
        seen = dict.fromkeys(names, 1000)
        again = {c.instance.name for c in contenders_of(planner, problem, random.Random(0), seen)}
        rare += bool(again - set(names))
    assert rare > 20


def readings(draw: random.Random, count: int) -> list[dict[str, object]]:
    """Readings as a file has them: twice what theory predicts, give or take 10 %."""
    planner = GemmPlanner(H200, FAMILIES)
    found: list[dict[str, object]] = []
    while len(found) < count:
        population, problem = draw_problem(draw)
        for one in contenders_of(planner, problem, draw, {}):
            assert one.estimate is not None
            took = one.estimate.total * draw.uniform(1.8, 2.2)
            found.append(
                {**Reading(problem, one.instance.name, one.schedule, took).to_json(), "drawn": population}
            )
    return found


def test_a_record_is_read_as_it_was_written(draw: random.Random, tmp_path: Path) -> None:
    path = tmp_path / "readings.json"
    record = calibrate.read(path)
    record["device"] = "H200"
    record["readings"] = readings(draw, 20)
    calibrate.write(record, path)
    assert calibrate.read(path) == record
    record["held_out"] = {"theory": {}}  # what a fit adds comes before the readings
    calibrate.write(record, path)
    assert calibrate.read(path) == record


def test_readings_of_kernels_that_are_gone_are_left_out(draw: random.Random) -> None:
    record = {"readings": readings(draw, 30)}
    count = len(record["readings"])
    record["readings"].append({**record["readings"][0], "instance": "gone"})
    usable, at_random = calibrate.usable_readings(record)
    assert len(usable) == count
    names = [entry["drawn"] for entry in record["readings"]]
    assert bool(at_random) == ("random" in names)


def test_digests_tell_one_source_from_another() -> None:
    found = calibrate.digests()
    assert set(found) == {family.name for family in FAMILIES}
    assert len(set(found.values())) == len(found)


def test_a_file_is_fitted_without_a_gpu(draw: random.Random, tmp_path: Path) -> None:
    path = tmp_path / "readings.json"
    record = {**calibrate.read(path), "device": "H200", "readings": readings(draw, 90)}
    calibrate.write(record, path)
    done = CliRunner().invoke(app, ["calibrate", "--from", str(path), "--into", str(tmp_path)])
    assert done.exit_code == 0, done.output
    calibration = Calibration.from_json((tmp_path / "H200.json").read_text())
    assert calibration.device == "H200"
    judged = json.loads(path.read_text())["held_out"]
    assert judged["calibrated"]["all"]["median"] >= 1
    assert judged["calibrated"]["error"] < judged["theory"]["error"]


def test_bad_requests_are_refused(draw: random.Random, tmp_path: Path) -> None:
    missing, other, few = (tmp_path / name for name in ("missing.json", "other.json", "few.json"))
    with pytest.raises(UsageError, match="no such file"):
        calibrate.calibrate_command(budget=1, path=missing, saved=missing)
    with pytest.raises(UsageError, match="budget of -3"):
        calibrate.calibrate_command(budget=-3, path=missing)
    other.write_text('{"rows": []}')
    with pytest.raises(UsageError, match="not a file of readings"):
        calibrate.calibrate_command(budget=1, path=other, saved=other)
    calibrate.write({**calibrate.read(few), "device": "H200", "readings": readings(draw, 2)[:2]}, few)
    with pytest.raises(UsageError, match="has 2 readings"):
        calibrate.calibrate_command(budget=1, path=few, saved=few)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, value) for name in ("sizes", "a", "out", "schedule", "us") for value in (None, "x", [], {})),
        ("instance", []),  # other names are those of kernels that are gone
    ],
)
def test_a_damaged_reading_is_one_line(
    draw: random.Random, tmp_path: Path, field: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "readings.json"
    monkeypatch.setattr(calibrate, "LEAST_READINGS", 2)
    record = {**calibrate.read(path), "device": "H200", "readings": readings(draw, 2)}
    draw.choice(record["readings"])[field] = value
    calibrate.write(record, path)
    before = path.read_bytes()
    done = CliRunner().invoke(app, ["calibrate", "--from", str(path), "--into", str(tmp_path)])
    assert done.exit_code == 2, done.output
    assert len(done.output.splitlines()) == 1
    assert path.read_bytes() == before


def test_the_calibration_goes_into_a_folder_that_can_be_written(
    draw: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted = {"device": "H200", "constants": {}, "factors": {}}
    monkeypatch.setattr(calibrate, "fit_all", lambda record, name, say: fitted)
    path, new = tmp_path / "readings.json", tmp_path / "new" / "folder"
    calibrate.write({**calibrate.read(path), "device": "H200", "readings": readings(draw, 60)}, path)
    calibrate.calibrate_command(budget=1, path=path, saved=path, into=new)
    assert (new / "H200.json").is_file()
    blocked = path / "folder"  # inside a file
    with pytest.raises(UsageError, match="cannot write into"):
        calibrate.calibrate_command(budget=1, path=path, saved=path, into=blocked)
    with pytest.raises(UsageError, match="cannot write into"):  # before anything is measured
        calibrate.calibrate_command(budget=1, path=blocked / "readings.json", into=new)
    with pytest.raises(UsageError, match="cannot write into"):
        calibrate.calibrate_command(budget=1, path=tmp_path / "misspelled" / "readings.json", into=new)
    assert not (tmp_path / "misspelled").exists()
