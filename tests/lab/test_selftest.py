"""`tilewave selftest`: it reaches every kernel, and a fault of any kind is found, told and repeatable."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rung_helpers import Float32, changed
from typer.testing import CliRunner

from tilewave.cli import app
from tilewave.compiler import Program, Source
from tilewave.device import get_spec
from tilewave.errors import DeviceError
from tilewave.lab import emulate, selftest_command
from tilewave.lab.launches import launch_of
from tilewave.lab.registry import Rung, get_rung, load_rungs
from tilewave.lab.selftest import (
    DATA,
    NORMAL,
    SPECIAL,
    SPECIAL_VALUES,
    Case,
    cases,
    run_selftest,
)
from tilewave.runtime.driver import Probe

SPEC = get_spec("GB10")
cli = CliRunner()


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest_command, "probe", lambda: Probe(0, None, "no NVIDIA driver here"))


@pytest.fixture
def seed(rng: np.random.Generator) -> int:
    return int(rng.integers(2**32))


def run(*arguments: str) -> tuple[int, str, str]:
    result = cli.invoke(app, ["selftest", "--jobs", "1", *arguments], prog_name="tilewave")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def with_source(rung: Rung, source: Source) -> Rung:
    """The rung, compiled from another source."""

    class Copy(Rung):
        def source(self) -> Source:
            return source

    return Copy(**{field.name: getattr(rung, field.name) for field in fields(Rung)})


def broken(number: int, *changes: tuple[str, str]) -> Rung:
    rung = get_rung(number)
    return with_source(rung, changed(rung, *changes))


LAST_STEP_MISSING = ("k < TILE; ++k) sum", "k < TILE - 1; ++k) sum")


class Gpu:
    """A GPU made of the emulator, which rounds like one; `spoil` may change what it answers."""

    def __init__(self, *_: object) -> None:
        self.products = 0

    def product(
        self, rung: Rung, program: Program, a: Float32, b: Float32
    ) -> tuple[Float32, tuple[str, ...]]:
        self.products += 1
        return self.spoil(rung, emulate.product(rung, program, a, b, SPEC, exact_fma=True))

    def spoil(self, rung: Rung, c: Float32) -> tuple[Float32, tuple[str, ...]]:
        return c, ()


@pytest.mark.parametrize("name", ["GB10", "H200", "T4"])
@pytest.mark.parametrize("thorough", [False, True])
def test_every_kernel_of_every_rung_has_a_ragged_case(name: str, thorough: bool, seed: int) -> None:
    spec = get_spec(name)
    for rung in load_rungs():
        chosen, missing = cases(rung, spec, seed, thorough=thorough)
        leading = [case.shape for case in chosen[: [case.data for case in chosen].index(DATA[1])]]
        reached = {launch_of(rung, *shape, spec).entry for shape in leading}
        assert reached | set(missing) == set(rung.entries), rung.title
        assert not reached & set(missing)
        if rung.alternative is None or spec.name == "GB10":
            assert not missing
        for m, n, _ in leading:
            assert m % rung.tile.bm or n % rung.tile.bn
        by_data = {data: {case.shape for case in chosen if case.data == data} for data in DATA}
        for data in DATA:  # whatever the data, sizes that suit wide loads and others
            entries = {rung.entry_for(*shape) for shape in by_data[data]}
            assert len(entries) == (1 if rung.needs is None else 2)
        assert len(chosen) == len(set(chosen))


def test_operands_follow_from_seed_rung_and_case(seed: int) -> None:
    rung, other = get_rung(1), get_rung(2)
    for data in DATA:
        case = Case((13, 11, 17), data)
        a, b = case.operands(rung, seed)
        assert (a.shape, b.shape, a.dtype, b.dtype) == ((13, 17), (17, 11), np.float32, np.float32)
        np.testing.assert_array_equal(a, case.operands(rung, seed)[0])
        for different in (case.operands(rung, seed + 1), case.operands(other, seed)):
            assert not np.array_equal(a, different[0], equal_nan=True)
    kinds = {data: Case((40, 40, 40), data).operands(rung, seed)[0] for data in DATA}
    assert kinds[NORMAL].min() < 0 < kinds[NORMAL].max()
    assert kinds[DATA[1]].min() >= 0
    for value in SPECIAL_VALUES:
        bits = np.float32(value).view(np.uint32)
        assert (kinds[SPECIAL].view(np.uint32) == bits).any() or np.isnan(value), value
    assert np.isnan(kinds[SPECIAL]).any()


def test_right_rungs_pass_and_say_so(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "selftest.json"
    code, out, err = run("--rungs", "3-4", "--seed", str(seed), "--json", str(path))
    assert (code, err) == (0, "")
    assert "No GPU was found (no NVIDIA driver here): the kernels run in the emulator" in out
    assert f"seed {seed}" in out
    assert re.search(r"^03 shared tile +\d+ products, +1 kernel, .*: right$", out, re.MULTILINE)
    assert all(len(line) <= 80 for line in out.splitlines() if line.startswith(("03", "04")))
    assert "2 rungs and" in out
    assert "are right on the emulator of GB10" in out
    assert "report" not in out
    data = json.loads(path.read_text())
    assert (data["passed"], data["seed"], data["device"], data["emulated"]) == (True, seed, "GB10", True)
    assert {outcome["rung"] for outcome in data["outcomes"]} == {3, 4}
    assert all(
        0 < outcome["error_in_bounds"] <= 1
        for outcome in data["outcomes"]
        if outcome["case"]["data"] == NORMAL
    )
    assert data["environment"]["compiler"].startswith("NVRTC 13.")


def test_seeds_are_fresh() -> None:
    first, second = (re.search(r"seed (\d+)", run("--rungs", "1")[1]) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first[1] != second[1]


def test_a_planted_fault_is_reported_with_all_that_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rung = broken(3, LAST_STEP_MISSING)
    monkeypatch.setattr(selftest_command, "load_rungs", lambda: [get_rung(1), get_rung(2), rung])
    path = tmp_path / "selftest.json"
    code, out, err = run("--seed", str(seed), "--json", str(path))
    assert (code, err) == (1, "")
    assert "WRONG on the emulator of GB10: rungs 3." in out
    assert re.search(r"^02 coalesced .*: right$", out, re.MULTILINE)
    report = out.split("-" * 72)[1]
    for said in (
        r"^tilewave +\d\S* \(commit \S+\)$",
        r"^GPU +emulator of GB10 \(sm_121\)$",
        r"^compiler +NVRTC 13\.",
        r"^packages +Python 3\.\d+.*numpy \d.*cuda-bindings 1\d",
        rf"^seed +{seed}$",
        r"^rung 03 shared tile, kernel sgemm_03_shared_tile, M N K = \d+ \d+ \d+, N\(0,1\)$",
        r"^  wrong value: [\d,]+ of [\d,]+ elements are wrong; worst C\[\d+, \d+\] = .*float64 says",
        r"^  largest error \S+ bounds, allowed 1$",
        rf"^  reproduce: tilewave selftest --rungs 3 --seed {seed} --device GB10$",
    ):
        assert re.search(said, report, re.MULTILINE), (said, report)
    worst = [outcome for outcome in json.loads(path.read_text())["outcomes"] if outcome["findings"]]
    assert {outcome["rung"] for outcome in worst} == {3}

    # The command in the report finds the same elements again, and nothing else runs.
    command = re.search(r"reproduce: tilewave selftest (.*)$", report, re.MULTILINE)
    assert command is not None
    code, _, _ = run(*shlex.split(command[1]), "--json", str(path))
    assert code == 1
    again = json.loads(path.read_text())
    assert [outcome for outcome in again["outcomes"] if outcome["findings"]] == worst
    assert again["rungs"] == [3]


def test_the_worst_element_is_the_one_that_is_wrong(seed: int) -> None:
    class OneWrong(Gpu):
        def spoil(self, rung: Rung, c: Float32) -> tuple[Float32, tuple[str, ...]]:
            c[-1, c.shape[1] // 2] += 1000
            return c, ()

    result = run_selftest([get_rung(2)], SPEC, seed=seed, gpu=OneWrong())
    assert len(result.failures) >= len(result.outcomes) - 2  # where NaN or Inf covers it, nothing is wrong
    for outcome in result.failures:
        m, n, _ = outcome.case.shape
        (finding,) = outcome.findings
        assert (finding.what, finding.wrong_elements, finding.worst) == ("wrong value", 1, (m - 1, n // 2))
        assert finding.got is not None
        assert finding.expected is not None
        assert finding.got == pytest.approx(finding.expected + 1000, abs=0.01)


def test_an_access_outside_is_found_in_the_emulator(seed: int) -> None:
    rung = broken(3, ("k0 + ty < K &&", "k0 + ty <= K &&"))
    result = run_selftest([rung], SPEC, seed=seed)
    assert not result.passed
    finding = result.failures[0].findings[0]
    assert finding.what == "failed"
    assert "outside" in finding.detail
    assert "thread" in finding.detail


def test_a_source_that_does_not_compile_is_a_finding(seed: int) -> None:
    rung = broken(3, ("float sum = 0.0f;", "float sum = oops;"))
    for gpu in (None, Gpu()):
        result = run_selftest([rung, get_rung(1)], SPEC, seed=seed, gpu=gpu)
        assert [(outcome.rung, outcome.findings[0].what) for outcome in result.failures][:1] == [
            (3, "does not compile")
        ]
        assert "oops" in result.failures[0].findings[0].detail
        assert {outcome.rung for outcome in result.outcomes} == {1, 3}


def test_on_a_gpu_everything_is_compared_with_the_emulators_bits(seed: int) -> None:
    gpu = Gpu()
    result = run_selftest([get_rung(2), get_rung(4)], SPEC, seed=seed, gpu=gpu)
    assert result.passed
    assert result.compared_bits == [2, 4]
    assert len(result.outcomes) == gpu.products
    emulated = run_selftest([get_rung(2), get_rung(4)], SPEC, seed=seed)
    assert len(result.outcomes) > len(emulated.outcomes)


def test_one_bit_that_is_not_the_emulators_is_found(seed: int) -> None:
    class OtherRounding(Gpu):
        def spoil(self, rung: Rung, c: Float32) -> tuple[Float32, tuple[str, ...]]:
            largest = np.unravel_index(np.argmax(np.where(np.isfinite(c), np.abs(c), 0)), c.shape)
            c[largest] = np.nextafter(c[largest], np.float32(0))
            return c, ()

    result = run_selftest([get_rung(4)], SPEC, seed=seed, gpu=OtherRounding())
    found = [outcome for outcome in result.failures if outcome.findings[0].what == "other bits"]
    assert [outcome.case for outcome in found] == [Case(emulate.ragged_shapes(get_rung(4))[0], NORMAL)]
    assert found[0].findings[0].wrong_elements == 1


def test_a_fault_that_only_the_emulator_sees_is_told_beside_a_right_result(seed: int) -> None:
    class Lucky(Gpu):
        """Where the kernel reads past B, there happen to be zeros."""

        def product(
            self, rung: Rung, program: Program, a: Float32, b: Float32
        ) -> tuple[Float32, tuple[str, ...]]:
            with np.errstate(invalid="ignore"):
                return a @ b, ()

    rung = broken(3, ("k0 + ty < K &&", "k0 + ty <= K &&"))
    result = run_selftest([rung], SPEC, seed=seed, gpu=Lucky())
    (outcome,) = result.failures
    assert outcome.findings[0].what == "failed in the emulator"
    assert "outside" in outcome.findings[0].detail


def test_what_a_kernel_did_beside_its_result_is_told(seed: int) -> None:
    class Careless(Gpu):
        def spoil(self, rung: Rung, c: Float32) -> tuple[Float32, tuple[str, ...]]:
            return c, ("wrote outside C",) if rung.number == 4 else ()

    result = run_selftest([get_rung(2), get_rung(4)], SPEC, seed=seed, gpu=Careless())
    assert {outcome.rung for outcome in result.failures} == {4}
    assert result.failures[0].findings[0].what == "wrote outside C"
    assert "kernel wrote outside C" in selftest_command.report(result, environment())


def environment() -> dict[str, object]:
    keys = ("tilewave", "commit", "driver", "driver_cuda", "compiler", "python", "platform")
    return {**dict.fromkeys(keys), "packages": {}}


def test_a_lost_gpu_ends_the_test_and_names_what_was_not_run(seed: int) -> None:
    class Dying(Gpu):
        def spoil(self, rung: Rung, c: Float32) -> tuple[Float32, tuple[str, ...]]:
            if rung.number == 2:
                raise DeviceError("cuCtxSynchronize failed with CUDA_ERROR_ILLEGAL_ADDRESS (700)")
            return c, ()

    result = run_selftest([get_rung(1), get_rung(2), get_rung(3)], SPEC, seed=seed, gpu=Dying())
    assert [(outcome.rung, outcome.findings[0].what) for outcome in result.failures] == [(2, "failed")]
    assert "ILLEGAL_ADDRESS" in result.failures[0].findings[0].detail
    assert result.not_run == [3]
    assert "NOT RUN: rungs 3" in selftest_command.verdict(result)


def test_what_the_budget_leaves_out_is_no_success() -> None:
    code, out, _ = run("--rungs", "1-2", "--budget", "1e-9")
    assert code == 1
    assert "NOT RUN: rungs 1, 2" in out


def test_the_command_uses_the_gpu_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(selftest_command, "probe", lambda: Probe(1, (13, 0), None))
    monkeypatch.setattr(selftest_command, "query_device", lambda: SPEC)
    monkeypatch.setattr(selftest_command, "Device", lambda: SimpleNamespace(name="NVIDIA GB10"))
    monkeypatch.setattr(selftest_command, "GpuRunner", Gpu)
    path = tmp_path / "selftest.json"
    code, out, _ = run("--rungs", "2", "--seed", str(seed), "--json", str(path))
    assert code == 0
    assert "The kernels run on GB10 (sm_121)." in out
    assert "right, bits as in the emulator" in out
    data = json.loads(path.read_text())
    assert (data["emulated"], data["compared_bits"], data["environment"]["gpu"]) == (
        False,
        [2],
        "NVIDIA GB10",
    )
    for arguments in (("--emulate",), ("--device", "GB10")):
        out = run("--rungs", "2", *arguments)[1]
        assert "As asked: the kernels run in the emulator" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rungs", "99"), "rung 99 is unknown"),
        (("--device", "TPU"), "unknown device 'TPU'"),
        (("--seed", "-1"), "seed -1: whole numbers from 0"),
        (("--seed", str(2**63)), "whole numbers from 0"),
        (("--seed", "x"), "--seed"),
        (("--budget", "0"), "budget 0: a positive number"),
        (("--jobs", "0"), "jobs 0"),
        (("--json", "/proc/no/such/place.json"), "cannot write /proc/no/such/place.json"),
        (("extra",), "extra"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], said: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("tilewave: ")
    assert said in err


def test_worker_processes_find_the_same(seed: int) -> None:
    rungs = [get_rung(1), get_rung(2)]
    alone, together = (run_selftest(rungs, SPEC, seed=seed, jobs=jobs) for jobs in (1, 2))
    assert sorted(map(str, alone.outcomes)) == sorted(map(str, together.outcomes))
