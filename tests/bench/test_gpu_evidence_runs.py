"""How steps on a GPU are run: limits, what is left by one that is cut off, the archive, failures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import evidence_steps  # noqa: E402
import gpu_evidence  # noqa: E402
from evidence_steps import Step  # noqa: E402


def test_the_plan_has_every_step_once_and_fits() -> None:
    names = [name for planned in evidence_steps.ROUNDS for name, _ in planned]
    assert len(names) == len(set(names))
    known = {step.name: step for step in evidence_steps.steps()}
    assert set(names) <= set(known)
    seconds = [sum(seconds for _, seconds in planned) for planned in evidence_steps.ROUNDS]
    assert sum(seconds) <= gpu_evidence.PLANNED_S
    assert max(seconds) <= 590  # a call ends in less than ten minutes
    assert str(int(sum(seconds))) in gpu_evidence.plan()
    for step in known.values():
        assert step.outcomes or "{seconds}" in step.command, f"{step.name} does not know its budget"


def test_every_script_of_a_step_is_there() -> None:
    for step in evidence_steps.steps():
        for command in (step.command, *step.pages):
            if command[0].endswith(".py"):
                assert (ROOT / command[0]).is_file(), command[0]


SLOW = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(sys.argv[1], "record.json").write_text("[1]")
pathlib.Path(sys.argv[1], "child").write_text(str(child.pid))
print("half way", flush=True)
time.sleep(60)
"""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_step_that_is_stopped_has_left_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Record, output and archive are there, and no process that it started goes on."""
    monkeypatch.setattr(gpu_evidence, "ARCHIVE_S", 0.2)
    out, archive = tmp_path / "out", tmp_path / "back" / "all.tgz"
    out.mkdir()
    archive.parent.mkdir()
    step = Step("slow", ("-c", SLOW, "{out}"), 1.0, "record.json")
    begun = time.monotonic()
    assert not gpu_evidence.measure(step, out, 1.0, 2.0, False, archive)
    assert time.monotonic() - begun < 15
    said = capsys.readouterr().out
    assert "half way" in said
    assert "stopped at its limit" in said
    child = int((out / "child").read_text())
    for _ in range(50):
        if not is_running(child):
            break
        time.sleep(0.1)
    assert not is_running(child)
    with tarfile.open(archive) as packed:
        assert {"record.json", "slow.txt"} <= set(packed.getnames())
    assert os.listdir(archive.parent) == ["all.tgz"]


@pytest.mark.parametrize("outcome", ["passed", "skipped"])
def test_tests_that_were_all_skipped_are_no_success(
    outcome: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show = (
        f"import pathlib, sys; pathlib.Path(sys.argv[1], 'outcomes-it.txt').write_text('{outcome}  0.1 s t')"
    )
    step = Step("it", ("-c", show, "{out}"), 5.0, outcomes=True)
    assert gpu_evidence.measure(step, tmp_path, 5.0, 20.0, False, None) == (outcome == "passed")
    assert ("all of its tests were skipped" in capsys.readouterr().out) == (outcome == "skipped")


def test_old_records_are_gone_on_from_only_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "record.json").write_text("old")
    monkeypatch.setattr(gpu_evidence, "RESULTS", results)
    show = "import pathlib, sys; p = pathlib.Path(sys.argv[1], 'record.json'); print(p.exists())"
    step = Step("one", ("-c", show, "{out}"), 5.0, "record.json")
    for go_on in (False, True):
        out = tmp_path / str(go_on)
        out.mkdir()
        assert gpu_evidence.measure(step, out, 5.0, 20.0, go_on, None)
        assert (out / "one.txt").read_text().strip() == str(go_on)


def test_a_budget_leaves_out_what_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, tuple[float, float]] = {}

    def measured(step: Step, out: Path, seconds: float, limit: float, *rest: object) -> bool:
        given[step.name] = seconds, limit
        return True

    chosen = [Step(name, ("-c", ""), seconds) for name, seconds in (("a", 100.0), ("b", 500.0))]
    monkeypatch.setattr(gpu_evidence, "measure", measured)
    monkeypatch.setattr(gpu_evidence, "steps", lambda: chosen)
    assert gpu_evidence.main(["--out", str(tmp_path), "--budget", "110"]) == 1
    seconds, limit = given.pop("a")
    assert seconds == pytest.approx(90, abs=1)  # what is left, less the time to end
    assert limit == pytest.approx(110, abs=1)
    assert not given
    assert "b: left out" in capsys.readouterr().out
    assert (tmp_path / "summary.txt").read_text() == "a: succeeded\nb: not done\n"


CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests" / "gpu")!r})
import outcome_log
def pytest_addoption(parser):
    outcome_log.add_options(parser)
def pytest_configure(config):
    outcome_log.configure(config)
"""
TESTS = """
import pathlib, pytest
FAILURES = pathlib.Path(__file__).with_name("logs") / "failures-it.txt"
@pytest.fixture
def broken():
    raise RuntimeError("no fixture")
def test_1_good():
    pass
def test_2_bad():
    assert 1 == 2, "an odd sum"
def test_3_sees_the_failure_before_it():
    assert "an odd sum" in FAILURES.read_text()
@pytest.mark.skip
def test_4_skipped():
    pass
def test_5_has_no_fixture(broken):
    pass
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_failures_are_written_as_they_occur(workers: int, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    logs = tmp_path / "logs"
    options = [f"--failures-file={logs}/failures-it.txt", f"--outcomes-file={logs}/outcomes-it.txt"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(workers), *options]
    command.append(str(tmp_path / "test_it.py"))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    outcomes = (logs / "outcomes-it.txt").read_text()
    found = {
        int(name): outcome for outcome, name in re.findall(r"^(\w+) +[\d.]+ s .*test_(\d)", outcomes, re.M)
    }
    if workers == 0:  # reports come from workers a little later than the next test begins
        assert found[3] == "passed"
    found.pop(3)
    assert found == {1: "passed", 2: "failed", 4: "skipped", 5: "failed"}
    failures = (logs / "failures-it.txt").read_text()
    assert re.findall(r"^FAILED \S*test_(\d)\w* \((\w+)\)", failures, re.M)[:1] == [("2", "call")]
    assert "RuntimeError: no fixture" in failures
    assert "ended: " in failures
    step = Step("it", (), 1.0, outcomes=True)
    assert "failed: " in gpu_evidence.told_by_tests(step, logs)


def test_the_gpu_tests_take_the_options(tmp_path: Path) -> None:
    """As the steps call them: where there is no GPU a test is skipped, and told of."""
    step = next(step for step in evidence_steps.steps() if step.name == "lone-tests")
    command = [part.format(out=tmp_path) for part in step.command if not part.startswith("tests/gpu/")]
    command += ["tests/gpu/test_timing_on_gpu.py", "--collect-only"]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "failures-lone-tests.txt").read_text().startswith("ended: ")
