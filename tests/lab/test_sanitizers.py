"""Running compute-sanitizer: what is launched, how its words are read, and when a result counts as clean."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

import tilewave.compiler
import tilewave.device
import tilewave.runtime.driver
from tilewave.compiler import compile_source
from tilewave.device import get_spec
from tilewave.emulator import parse_ptx
from tilewave.errors import ToolchainError
from tilewave.lab.faults import FAULTS
from tilewave.lab.registry import get_rung, load_rungs
from tilewave.lab.sanitizers import (
    TOOLS,
    Report,
    Sanitizer,
    Target,
    Targets,
    ToolRun,
    judge_fault,
    judge_rungs,
    parse_log,
    prepare,
)

MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at sgemm_05_course+0x4a30
=========     by thread (0,1,0) in block (0,1,0)
=========     Access at 0x7f2ad7411054 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f2ad7400000 of size 69,692 bytes
=========
========= Invalid __global__ write of size 4 bytes
=========     at void sgemm_13_async_copies<(bool)0>(const float *, const float *, float *, int)+0x10
=========     by thread (1,1,0) in block (0,1,0)
=========
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at sgemm_05_course+0x210
=========     and Read access at sgemm_05_course+0x430 [17152 hazards]
=========     and Read access at sgemm_05_course+0x450 [17152 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
SYNCCHECK = """\
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block.
=========     at sgemm_03_shared_tile+0x3a0
=========     by thread (0,0,0) in block (0,1,0)
=========
========= ERROR SUMMARY: 1 error
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
CLEAN_RACECHECK = (
    "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
)
UNSUPPORTED = (
    "========= COMPUTE-SANITIZER\n========= Error: Device not supported.\n========= ERROR SUMMARY: 0 errors\n"
)


def test_reports_are_read_with_their_kernels() -> None:
    report = parse_log(MEMCHECK)
    assert report.total == 2
    assert report.by_kernel() == {"sgemm_05_course": 1, "sgemm_13_async_copies": 1}
    first = report.says(r"Invalid __global__ write of size \d+")
    assert first is not None
    assert first.splitlines()[1] == "at sgemm_05_course+0x4a30"
    race = parse_log(RACECHECK)
    assert (race.total, race.by_kernel()) == (1, {"sgemm_05_course": 1})
    assert race.says("Race reported between Write access")
    assert parse_log(SYNCCHECK).by_kernel() == {"sgemm_03_shared_tile": 1}
    assert parse_log(CLEAN) == parse_log(CLEAN_RACECHECK) == Report(0, ())
    assert parse_log("") == Report(None, ())
    assert parse_log(UNSUPPORTED).by_kernel() == {"": 1}


def target(number: int, fault: str | None = None) -> Target:
    rung = get_rung(number)
    return Target(rung.title, rung.entry, rung.entry, "x.cubin", (3, 4, 5), (1, 1, 1), rung.block, 1.0, fault)


def targets() -> Targets:
    launches = (target(3), target(5), target(5), *(target(fault.rung, fault.name) for fault in FAULTS))
    return Targets("sm_90a", "NVRTC 13.0.88", "digest", launches)


def tool_run(
    log: str, finished: Sequence[int] = (0, 1, 2), error: float = 0.5, code: int | None = 0
) -> ToolRun:
    return ToolRun(
        "memcheck", (), 1.5, code, parse_log(log), dict.fromkeys(finished, error), "said by the program"
    )


def test_a_rung_is_clean_only_if_everything_ran_and_nothing_was_reported() -> None:
    for log in (CLEAN, CLEAN_RACECHECK):
        result = judge_rungs(targets(), tool_run(log))
        assert result["clean"]
        assert result["errors_by_rung"] == {"03 shared tile": 0, "05 course": 0}
        assert (result["errors"], result["launches"], result["largest_error_in_bounds"]) == (0, 3, 0.5)
    dirty = judge_rungs(targets(), tool_run(MEMCHECK))
    assert not dirty["clean"]
    assert dirty["errors_by_rung"] == {"03 shared tile": 0, "05 course": 1}
    assert dirty["reports_of_no_rung"] == 1
    for run in (
        tool_run(""),
        tool_run(UNSUPPORTED),
        tool_run(CLEAN, finished=(0, 2)),
        tool_run(CLEAN, error=1.01),
        tool_run(CLEAN, error=float("nan")),
        tool_run(CLEAN, code=1),
        tool_run(CLEAN, code=None),
    ):
        assert not judge_rungs(targets(), run)["clean"], run
    assert judge_rungs(targets(), tool_run(CLEAN, finished=(0, 2)))["unfinished"] == [
        "05 course, sgemm_05_course, M N K = 3 4 5"
    ]


def test_a_fault_is_found_only_by_the_right_words_about_its_kernel() -> None:
    store = next(fault for fault in FAULTS if fault.rung == 5 and fault.tool == "memcheck")
    found = judge_fault(targets(), store.name, store.says, tool_run(MEMCHECK, finished=()))
    assert found["found"]
    assert found["report"].startswith("Invalid __global__ write of size 4 bytes\nat sgemm_05_course")
    assert found["result_was_right"] is None
    others = (
        CLEAN,
        "",
        RACECHECK,
        MEMCHECK.replace("05_course", "04_thread_column"),
        MEMCHECK.replace("write", "read"),
    )
    for log in others:
        assert not judge_fault(targets(), store.name, store.says, tool_run(log))["found"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Targets]:
    folder = tmp_path_factory.mktemp("sanitizers")
    return folder, prepare(folder, get_spec("GB10"), "sm_121")


def test_every_kernel_and_every_fault_is_launched(prepared: tuple[Path, Targets]) -> None:
    folder, made = prepared
    assert Targets.load(folder) == made
    of_rungs = [made.launches[index] for index in made.of_rungs()]
    for rung in load_rungs():
        mine = [target for target in of_rungs if target.title == rung.title]
        assert {target.kernel for target in mine} == set(rung.entries)
        assert len({target.shape for target in mine}) >= 3
        program = compile_source(rung.source(), rung.entries, "sm_121")
        module = parse_ptx(program.ptx)
        for target in mine:
            assert (folder / target.cubin).read_bytes() == program.cubin
            taken = 6 + (2 + len(target.integers) if target.scheduled else 0)
            assert taken == len(module.entries[target.symbol].params)
    for fault in FAULTS:
        (index,) = made.of_fault(fault.name)
        assert made.launches[index].shape == fault.shape
        clean = next(target for target in of_rungs if target.title == get_rung(fault.rung).title)
        assert (folder / made.launches[index].cubin).read_bytes() != (folder / clean.cubin).read_bytes()


def test_the_digest_follows_what_is_launched(prepared: tuple[Path, Targets], tmp_path: Path) -> None:
    again = prepare(tmp_path, get_spec("GB10"), "sm_121")
    assert again.digest == prepared[1].digest
    other = prepare(tmp_path, replace(get_spec("GB10"), sms=20), "sm_121")
    assert other.digest != again.digest


FAKE = """#!{python}
import json, pathlib, subprocess, sys
if "--version" in sys.argv:
    print("NVIDIA (R) Compute Sanitizer\\nVersion 2025.3.1.0 (build 1)")
    sys.exit()
options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if word.startswith("--") and "=" in word)
rest = sys.argv[sys.argv.index("program"):]
pathlib.Path(options["log-file"]).write_text({log!r})
with open(rest[rest.index("--results") + 1], "w") as results:
    for index in rest[rest.index("--targets") + 1].split(","):
        print(json.dumps({{"index": int(index), "error_in_bounds": 0.25}}), file=results)
print("tool", options["tool"], "poison", "--poison" in rest, options.get("racecheck-report"), flush=True)
if {sleep}:  # as the real tool does, in a process of its own
    subprocess.run([sys.executable, "-c", "import time; time.sleep({sleep})"])
sys.exit({code})
"""


def fake(tmp_path: Path, log: str = CLEAN, sleep: int = 0, code: int = 0) -> Sanitizer:
    executable = tmp_path / "compute-sanitizer"
    executable.write_text(FAKE.format(python=sys.executable, log=log, sleep=sleep, code=code))
    executable.chmod(0o755)
    return Sanitizer(str(executable), ("program",), tmp_path)


def test_the_tool_is_started_with_its_options(tmp_path: Path) -> None:
    sanitizer = fake(tmp_path)
    assert sanitizer.version() == "2025.3.1.0"
    for tool in TOOLS:
        run = sanitizer.run(tool, [0, 1, 2], limit_s=60)
        # initcheck must see what was never written, so nothing may be filled before.
        report = "analysis" if tool == "racecheck" else None
        assert run.output == f"tool {tool} poison {tool != 'initcheck'} {report}\n"
        assert (run.exit_code, run.report, run.errors_in_bounds) == (
            0,
            Report(0, ()),
            {0: 0.25, 1: 0.25, 2: 0.25},
        )
        assert judge_rungs(targets(), run)["clean"]


def test_what_a_tool_said_before_it_was_stopped_counts(tmp_path: Path) -> None:
    started = time.monotonic()
    run = fake(tmp_path, SYNCCHECK, sleep=60).run("synccheck", [0], limit_s=3)
    assert time.monotonic() - started < 30
    assert run.exit_code is None
    assert run.report.total == 1
    assert not judge_rungs(targets(), run)["clean"]
    fault = next(fault for fault in FAULTS if fault.tool == "synccheck")
    assert judge_fault(targets(), fault.name, fault.says, run)["found"]


def test_a_miss_of_a_tool_that_is_known_to_be_blind_is_no_failure(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blind = {fault.name for fault in FAULTS if fault.tool_is_blind}
    assert blind
    monkeypatch.setattr(script, "Sanitizer", MadeUp)
    monkeypatch.setattr(MadeUp, "started", [])
    monkeypatch.setattr(MadeUp, "missed", blind)
    out = tmp_path / "sanitizers.json"
    assert script.check(out, tmp_path, budget=60)
    said = capsys.readouterr().out
    assert all(f"blind to: {name}" in said for name in blind)
    assert "MISSED" not in said
    assert set(json.loads(out.read_text())["tool_is_blind_to"]) == blind


def test_a_missing_tool_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(Path, "exists", lambda _: False)
    monkeypatch.setattr(Path, "glob", lambda *_: [])
    with pytest.raises(ToolchainError, match="CUDA toolkit"):
        Sanitizer.find()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/sanitizers.py on a machine whose GPU and tool are made up."""
    path = Path(__file__).parents[2] / "benchmarks" / "sanitizers.py"
    spec = importlib.util.spec_from_file_location("benchmark_sanitizers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(tilewave.runtime.driver, "require_gpu", lambda: None)
    monkeypatch.setattr(tilewave.runtime.driver, "Device", lambda: SimpleNamespace(name="NVIDIA H200"))
    monkeypatch.setattr(tilewave.device, "query_device", lambda: get_spec("H200"))
    monkeypatch.setattr(tilewave.compiler, "choose_arch", lambda _: SimpleNamespace(arch="sm_90a"))
    monkeypatch.setattr(module, "prepare", lambda *_: targets())
    return module


class MadeUp:
    """A tool that finds nothing in rungs and every fault but those in `missed`."""

    started: ClassVar[list[tuple[str, tuple[int, ...]]]] = []
    missed: ClassVar[set[str]] = set()

    def __init__(self, *_: Any) -> None:
        pass

    @staticmethod
    def find() -> str:
        return "compute-sanitizer"

    def version(self) -> str:
        return "2025.3.1.0"

    def run(self, tool: str, indices: Sequence[int], limit_s: float) -> ToolRun:
        self.started.append((tool, tuple(indices)))
        launched = targets().launches[indices[0]]
        if launched.fault is None or launched.fault in self.missed:
            return tool_run(CLEAN, indices)
        log = {"memcheck": MEMCHECK, "racecheck": RACECHECK, "synccheck": SYNCCHECK}.get(
            tool, MEMCHECK.replace("Invalid __global__ write", "Uninitialized __global__ memory read")
        )
        log = log.replace("sgemm_05_course", launched.kernel).replace("sgemm_03_shared_tile", launched.kernel)
        fault = next(fault for fault in FAULTS if fault.name == launched.fault)
        return tool_run(log.replace("write", "read") if "read" in fault.says else log, indices)


def test_the_benchmark_goes_on_where_it_was(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "Sanitizer", MadeUp)
    monkeypatch.setattr(MadeUp, "started", started := [])
    monkeypatch.setattr(MadeUp, "missed", {FAULTS[1].name})
    out = tmp_path / "sanitizers.json"
    assert not script.check(out, tmp_path, budget=60)
    assert len(started) == len(TOOLS) + len(FAULTS)
    assert f"MISSED: {FAULTS[1].name}" in capsys.readouterr().out
    record = json.loads(out.read_text())
    assert (record["complete"], record["clean"], record["all_faults_found"]) == (True, True, False)
    assert record["sizes"]["05 course"] == ["sgemm_05_course 3 4 5"] * 2

    started.clear()
    monkeypatch.setattr(MadeUp, "missed", set())
    assert script.check(out, tmp_path, budget=60)
    assert started == [(FAULTS[1].tool, (3 + 1,))]
    started.clear()
    assert script.check(out, tmp_path, budget=60)
    assert not started
    monkeypatch.setattr(script, "prepare", lambda *_: replace(targets(), digest="another"))
    assert script.check(out, tmp_path, budget=60)
    assert len(started) == len(TOOLS) + len(FAULTS)


def test_the_budget_ends_the_benchmark_and_says_that_it_is_not_complete(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(script, "Sanitizer", MadeUp)
    out = tmp_path / "sanitizers.json"
    assert not script.check(out, tmp_path, budget=0)
    record = json.loads(out.read_text())
    assert not record["complete"]
    assert not record["tools"]
