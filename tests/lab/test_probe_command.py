"""`tilewave probe`: what is printed, written and refused, and how it exits."""

from __future__ import annotations

import io
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from probe_helpers import examined, findings
from rich.console import Console
from typer.testing import CliRunner

from tilewave.cli import app
from tilewave.device import get_spec
from tilewave.errors import ToolchainError, UsageError
from tilewave.lab import ncu, probe_command, probe_profile
from tilewave.lab import probe as running
from tilewave.lab.ncu import KernelCounters
from tilewave.lab.probe import judge
from tilewave.lab.probe_catalog import PROBES
from tilewave.lab.probe_command import NOT_A_PRODUCT, hanging, print_findings, to_json, wrong_products
from tilewave.lab.probe_profile import COUNTERS, METRICS, STALLS, Launch, profile_launches, stall_shares
from tilewave.lab.probe_records import Findings, Probe, Timed
from tilewave.lab.probe_results import load_results
from tilewave.lab.probe_words import L2_HIT_RATE
from tilewave.lab.records import Check
from tilewave.lab.workers import Budget
from tilewave.runtime.driver import Probe as FoundGpu

runner = CliRunner()
REASON = "no NVIDIA driver on this machine"


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator's answers are asked for, also on a machine with a GPU."""
    monkeypatch.setattr(probe_command, "probe_gpu", lambda: FoundGpu(0, None, REASON))
    monkeypatch.setenv("COLUMNS", "160")


def run(*arguments: str) -> tuple[int, str, str]:
    result = runner.invoke(app, ["probe", *arguments], prog_name="tilewave")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def shown(probe: Probe, found: Findings, width: int = 160) -> str:
    written = io.StringIO()
    print_findings(probe, found, get_spec("H200"), Console(width=width, highlight=False, file=written))
    return written.getvalue()


def test_without_a_name_probes_are_listed() -> None:
    code, out, _ = run()
    assert code == 0
    for probe in PROBES.values():
        assert re.search(rf"^{re.escape(probe.name)} +{re.escape(probe.question)}", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nothing",), "there is no probe 'nothing'; there are no-loads, stores-only"),
        (("no-loads", "padded"), "there is no probe 'padded'"),
        (("no-loads", "--size", "0"), "size '0': whole numbers from 1"),
        (("no-loads", "--size", "x"), "size 'x': whole numbers from 1"),
        (("no-loads", "--size", "16384"), "the emulator takes sizes up to 8192"),
        (("no-loads", "--device", "TPU"), "unknown device 'TPU'"),
        (("no-loads", "--budget", "-1"), "budget -1: a positive number"),
        (("no-loads", "--jobs", "0"), "jobs 0: 1 or more"),
        (("no-loads", "--json", "/no/such/place.json"), "cannot write /no/such/place.json"),
        (("--json", "x.json"), "name a probe to run, or all; there are no-loads"),
        (("--size", "64"), "name a probe to run, or all"),
        (("no-loads", "--no-such-option"), "--no-such-option"),
    ],
)
def test_bad_input_is_told_and_exit_code_is_2(arguments: tuple[str, ...], said: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert said in err.replace("\n", " ").replace("│", "")
    assert "Traceback" not in err


def test_without_a_gpu_everything_but_times_is_there(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    code, out, _ = run("no-loads", "resident-blocks", "--size", "200", "--json", str(path), "--jobs", "1")
    assert code == 0
    assert f"No GPU was found ({REASON})" in out
    assert "There are no times" in out
    assert "TFLOP/s" not in out.replace("20.2 TFLOP/s", "").replace("15.7 TFLOP/s", "")
    assert f"no copies after the first slice ({NOT_A_PRODUCT})" in out
    assert f"rung 12 as it is ({NOT_A_PRODUCT})" not in out
    assert "only a GPU can tell" in out
    assert "(!)" not in out
    assert f"Results are in {path}" in out
    assert_layout(json.loads(path.read_text()), ["no-loads", "resident-blocks"], emulated=True)


def test_all_runs_every_probe_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def spy(probes: list[Probe], spec: Any, **options: Any) -> list[Findings]:
        asked.extend(probe.name for probe in probes)
        return [findings(probe) for probe in probes]

    monkeypatch.setattr(probe_command, "run_probes", spy)
    for names in (("all",), ("no-loads", "all"), ("all", "all")):
        asked.clear()
        assert run(*names)[0] == 0
        assert asked == [*PROBES]
    asked.clear()
    assert run("padding", "no-loads", "padding")[0] == 0
    assert asked == ["padding", "no-loads"]


def assert_layout(data: dict[str, Any], names: list[str], emulated: bool) -> None:
    """The layout that readers of the file rely on."""
    assert data.keys() == {"format", "device", "emulated", "environment", "probes"}
    assert (data["format"], data["emulated"]) == (1, emulated)
    assert {"date", "command", "python", "compiler", "packages"} <= data["environment"].keys()
    assert [entry["probe"] for entry in data["probes"]] == names
    for entry in data["probes"]:
        probe = PROBES[entry["probe"]]
        assert entry["question"] == probe.question
        assert {"counted_size", "examined", "hardware", "judged", "sizes", "tables", "notes"} <= entry.keys()
        for key, variant in entry["variants"].items():
            assert variant.keys() == {
                "label",
                "rung",
                "edits",
                "product",
                "against",
                "reported",
                "reported_ratio",
            }
            assert variant["product"] is probe.variant(key).rung.product
            assert entry["examined"][key]["build"]["registers"] > 0
        for judged in entry["judged"]:
            assert {
                "variant",
                "figure",
                "expected",
                "is_ratio",
                "emulated",
                "hardware",
                "why",
            } == judged.keys()
        for at in entry["sizes"]:
            assert at.keys() == {"size", "timed", "profiled", "words"}
            assert bool(at["timed"]) is not emulated
            assert at["words"]


TIMES = {"rung-12": 3.5, "no-loads": 2.5}


def test_times_that_are_no_products_are_marked() -> None:
    probe = PROBES["no-loads"]
    out = shown(probe, findings(probe, TIMES, size=4096))
    rung, changed = (next(line for line in out.splitlines() if time in line) for time in ("3.5000", "2.5000"))
    assert re.search(r" 39\.27 ", rung)
    assert re.search(r" 54\.98\* ", changed)
    assert "x 1.400 (rung-12)" in changed
    assert "x 1.287" in changed  # the article's
    assert f"* {NOT_A_PRODUCT}: the rate only says how long the kernel took" in out
    probe = PROBES["padding"]
    out = shown(probe, findings(probe, {"rung-08": 1.2, "padding": 1.1, "splitting": 1.0}))
    assert NOT_A_PRODUCT not in out


def test_a_prediction_that_fails_is_flagged_where_it_fails() -> None:
    probe = PROBES["stores-only"]
    figures = {"global_loads": 100, "shared_stores": 100, "shared_store_passes": 100}
    good = {"rung-12": examined(figures), "stores-only": examined(figures | {"global_loads": 2})}
    found = findings(probe, builds=good)
    found.hardware = {"rung-12": {"shared_stores": 100.0}, "stores-only": {"shared_stores": 120.0}}
    found.judged = [judge(probe, found, expectation) for expectation in probe.expectations]
    assert found.judged[0].emulated == 0.02  # x 0.016 at this size
    lines = shown(probe, found).splitlines()
    loads, stores, passes = (
        next(line for line in lines if f"{figure}  " in line)
        for figure in ("global loads", "shared stores", "shared store passes")
    )
    assert loads.count("(!)") == 1
    assert "x 0.020 (!)" in loads
    assert stores.count("(!)") == 1
    assert re.search(r"x 1\.000 +x 1\.000 +x 1\.200 \(!\)", stores)
    assert "(!)" not in passes


def test_a_wrong_product_is_told_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = PROBES["padding"]
    found = findings(probe, {"rung-08": 1.2, "padding": 1.1, "splitting": 1.0})
    assert wrong_products(found) == []
    found.sizes[0].timed["padding"] = Timed(Check("GPU", (8, 8, 8), 7.0), None)
    assert wrong_products(found) == ["padding"]
    out = shown(probe, found)
    assert "WRONG: rung 08, four floats of padding after every 32 is no correct product." in out
    assert re.search(r"^rung 08, four floats .* -  +WRONG$", out.replace("\r", ""), re.MULTILINE)
    monkeypatch.setattr(probe_command, "run_probes", lambda *_, **__: [found])
    assert run("padding")[0] == 1
    found = findings(probe)
    emulated = Check("emulator, N(0,1)", (8, 8, 8), float("inf"))
    found.examined["splitting"] = replace(examined(), checks=(emulated,))
    assert wrong_products(found) == ["splitting"]


@pytest.mark.parametrize("name", PROBES)
@pytest.mark.parametrize("width", [80, 100, 200])
def test_nothing_is_cut_off(name: str, width: int) -> None:
    probe = PROBES[name]
    times = {variant.key: 1.0 + index / 10 for index, variant in enumerate(probe.variants)}
    found = findings(probe, times)
    found.judged = [judge(probe, found, expectation) for expectation in probe.expectations]
    found.tables = probe.tables() if probe.tables else []
    out = shown(probe, found, width)
    assert "…" not in out
    assert all(len(line.rstrip()) <= width for line in out.splitlines())


def test_indented_lines_stay_indented() -> None:
    assert hanging("one two three", 8) == "one two\nthree"
    assert hanging("  one two three", 9) == "  one two\n    three"


# -- The profiler --------------------------------------------------------------------------------------------


def test_a_launch_travels_as_text() -> None:
    launch = Launch("l2-reuse", "rung-15", 2048)
    assert Launch.parse(str(launch)) == launch
    for text in ("", "a:b", "a:b:", "a:b:x", "a::5", ":b:5", "a:b:-5"):
        with pytest.raises(UsageError, match="PROBE:VARIANT:SIZE"):
            Launch.parse(text)


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A profiler that answers with what a test puts here."""
    state: dict[str, Any] = {"kernels": [], "calls": []}
    known = frozenset(name.split(".")[0] for name in METRICS)

    def profile(tool: str, command: list[str], metrics: list[str], *, timeout: float) -> Any:
        state["calls"].append((command, metrics, timeout))
        if isinstance(state["kernels"], Exception):
            raise state["kernels"]
        return state["kernels"], []

    monkeypatch.setattr(ncu, "find_ncu", lambda: "ncu")
    monkeypatch.setattr(ncu, "available_metrics", lambda tool: known)
    monkeypatch.setattr(ncu, "profile", profile)
    return state


LAUNCHES = [Launch("l2-reuse", "rung-15", 1024), Launch("l2-reuse", "walk", 1024)]


def test_metrics_take_the_emulators_names(profiler: dict[str, Any]) -> None:
    fma = next(name for name, ours in COUNTERS.items() if ours == "thread_fma")
    profiler["kernels"] = [
        KernelCounters("void sgemm_15<true>", {fma: 5.0, L2_HIT_RATE: 80.0}),
        KernelCounters("some memset", {fma: 1.0}),
        KernelCounters("void sgemm_19<true>", {fma: 6.0}),
    ]
    found = profile_launches(LAUNCHES, None)
    assert found == [{"thread_fma": 5.0, L2_HIT_RATE: 80.0}, {"thread_fma": 6.0}]
    (command, metrics, _) = profiler["calls"][0]
    assert command[1:3] == ["-m", "tilewave.lab.probe_profile"]
    assert command[3:] == [str(launch) for launch in LAUNCHES]
    assert set(metrics) == set(METRICS)


def test_what_goes_wrong_with_the_profiler_is_one_error(profiler: dict[str, Any]) -> None:
    profiler["kernels"] = [KernelCounters("sgemm_15", {})]
    with pytest.raises(ToolchainError, match="ncu saw 1 of 2 launches"):
        profile_launches(LAUNCHES, None)
    profiler["kernels"] = subprocess.TimeoutExpired("ncu", 30)
    with pytest.raises(ToolchainError, match="did not finish in 30 seconds"):
        profile_launches(LAUNCHES, 30.0)
    with pytest.raises(ToolchainError, match="needs at least 20 seconds"):
        profile_launches(LAUNCHES, 5.0)


def profiled(probe: Probe, wanted: bool | None) -> Findings:
    found = Findings(probe.name, 1024)
    found.sizes = findings(probe, size=2048).sizes
    running._profile_all([probe], {probe.name: found}, Budget(None), wanted, lambda line: None)
    return found


def test_counters_go_to_the_size_that_they_were_read_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        probe_profile,
        "profile_launches",
        lambda launches, limit: [{"N": float(one.size)} for one in launches],
    )
    found = profiled(PROBES["l2-reuse"], None)
    assert found.hardware == {"rung-15": {"N": 1024.0}, "walk": {"N": 1024.0}}
    assert found.sizes[0].profiled == {"rung-15": {"N": 2048.0}, "walk": {"N": 2048.0}}
    assert profiled(PROBES["padding"], None).hardware == {}
    assert profiled(PROBES["padding"], True).hardware.keys() == {"rung-08", "padding", "splitting"}
    assert profiled(PROBES["l2-reuse"], False).hardware == {}


def test_without_a_profiler_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    monkeypatch.setattr(ncu.Path, "exists", lambda self: False)
    found = profiled(PROBES["l2-reuse"], None)
    assert found.hardware == {}
    (note,) = found.notes
    assert note == "no hardware counters: Nsight Compute's ncu was not found: put it on the PATH"


def test_shares_of_stalls() -> None:
    def metric(stall: str) -> str:
        return f"smsp__average_warps_issue_stalled_{stall}_per_issue_active.ratio"

    shares = stall_shares(
        {metric("barrier"): 1.0, metric("wait"): 3.0, metric("selected"): 9.0, "other": 4.0}
    )
    assert shares == {"barrier": 0.25, "wait": 0.75}
    assert stall_shares({}) == {}
    assert stall_shares({metric("wait"): 0.0}) == {}
    assert {metric(stall) for stall in STALLS} < set(METRICS)
    probe = PROBES["l2-reuse"]
    found = findings(probe, profiled={"walk": {metric("barrier"): 1.0, metric("long_scoreboard"): 3.0}})
    assert (
        "Stalls of rung 19: each SM walks its run at N = 1024: long scoreboard 75 %, barrier 25 %."
        in shown(probe, found)
    )


# -- Results read back ---------------------------------------------------------------------------------------


def test_results_come_back_as_they_were(tmp_path: Path) -> None:
    spec = get_spec("H200")
    probes = [PROBES["no-loads"], PROBES["lane-maps"]]
    found = [
        findings(probe, {variant.key: 1.0 + i for i, variant in enumerate(probe.variants)}, size=2048)
        for probe in probes
    ]
    for probe, one in zip(probes, found, strict=True):
        one.judged = [judge(probe, one, expectation) for expectation in probe.expectations]
        one.notes = ["a note"]
        one.hardware = {probe.variants[0].key: {"shared_loads": 5.0}}
        one.sizes[0].profiled = {probe.variants[0].key: {L2_HIT_RATE: 50.0}}
    path = tmp_path / "found.json"
    path.write_text(json.dumps(to_json(probes, found, spec, None)))
    results = load_results(path)
    assert results.spec == spec
    for (probe, back), original in zip(results.found, found, strict=True):
        assert back.examined == original.examined
        assert back.judged == original.judged
        assert (back.hardware, back.notes) == (original.hardware, original.notes)
        assert back.sizes[0].timed == original.sizes[0].timed
        assert back.sizes[0].profiled == original.sizes[0].profiled
        catalogued = PROBES[probe.name]
        for variant in probe.variants:
            assert probe.against(variant) == catalogued.against(catalogued.variant(variant.key))
    assert "only a GPU can tell" not in results.found[0][1].sizes[0].words[0]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 1}', '{"format": 1, "device": "H200", "emulated": true, "probes": [{}]}'],
)
def test_a_file_that_is_no_result_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"x\.json holds no results of probes"):
        load_results(path)
    path.write_text('{"format": 99}')
    with pytest.raises(UsageError, match="has format 99; this version reads format 1"):
        load_results(path)
    with pytest.raises(UsageError, match="holds no results"):
        load_results(tmp_path / "none.json")
