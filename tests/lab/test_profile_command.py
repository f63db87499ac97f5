"""The command `tilewave profile`: emulated, from saved reports, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from profile_fakes import CUBLAS_KERNEL, metrics_like, pretend_csv, pretend_ncu
from typer.testing import CliRunner

from tilewave.cli import app
from tilewave.device import get_spec
from tilewave.lab.profile import command
from tilewave.lab.profile.command import choose_rungs
from tilewave.lab.profile.records import EMULATOR, HARDWARE, SAVED, Reading, load_profile
from tilewave.lab.profile.run import profile_rungs
from tilewave.lab.registry import get_rung, load_rungs
from tilewave.runtime.driver import Probe

__all__ = ["pretend_ncu"]
runner = CliRunner()
H200 = {
    "device__attribute_compute_capability_major": 9.0,
    "device__attribute_compute_capability_minor": 0.0,
    "device__attribute_multiprocessor_count": 132.0,
    "device__attribute_memory_clock_rate": 3_201_000.0,
    "device__attribute_global_memory_bus_width": 6016.0,
}
"""As ncu wrote them of an H200 (benchmarks/results/probes_h200.json)."""


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests never use a GPU, also on a machine that has one."""
    monkeypatch.setattr(command, "probe", lambda: Probe(0, None, "no NVIDIA driver on this machine"))
    monkeypatch.setenv("COLUMNS", "200")


def run(*arguments: object) -> tuple[int, str, str]:
    result = runner.invoke(app, ["profile", *map(str, arguments)], prog_name="tilewave")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def emulated() -> dict[int, Reading]:
    made = profile_rungs([get_rung(6), get_rung(15)], 256, get_spec("H200"))
    return {kernel.rung: kernel.readings[EMULATOR] for kernel in made.kernels}


@pytest.fixture
def report(emulated: dict[int, Reading]) -> str:
    """The CSV of a report of rungs 6 and 15 at N = 256 on an H200, and of cuBLAS."""
    library = {"launch__block_size": 256.0, "launch__grid_size": 2.0, "gpu__time_duration.sum": 343_000.0}
    grids = {6: 4.0, 15: 2.0}
    ours = [
        (
            f"sgemm_{number:02d}_name",
            metrics_like(reading) | {"launch__grid_size": grids[number]} | H200,
        )
        for number, reading in emulated.items()
    ]
    return pretend_csv([*ours, (CUBLAS_KERNEL, library)])


def test_the_emulator_stands_in_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    code, out, err = run("6", "--size", 256, "--json", path, "--jobs", 1)
    assert (code, err) == (0, "")
    assert "No GPU was found (no NVIDIA driver on this machine)" in out
    assert "Hardware and cuBLAS have no columns." in " ".join(out.split())
    heading = next(line for line in out.splitlines() if line.startswith("06 two blocks, N = 256"))
    assert "emulator" in heading
    assert "hardware" not in heading
    assert load_profile(path).kernels[0].readings[EMULATOR].figures["thread_fma"] == 256**3
    # A profile that was kept is shown the same way again.
    code, again, _ = run("--from", path)
    assert code == 0
    assert again.strip()
    assert again.strip() in out


def test_a_report_in_csv_brings_the_other_columns(report: str, tmp_path: Path) -> None:
    file, path = tmp_path / "report.csv", tmp_path / "profile.json"
    file.write_text(report)
    code, out, err = run("--from", file, "--size", 256, "--json", path, "--jobs", 1)
    assert (code, err) == (0, "")
    assert [line.split()[-2:] for line in out.splitlines() if ", N = 256" in line] == [
        ["hardware", "cuBLAS"]
    ] * 2
    assert "cuBLAS chose" in out
    assert "128 outputs a thread" in " ".join(out.split())
    assert "Emulator and GPU agree in all that both count" in out
    made = load_profile(path)
    assert (made.device, made.how, made.profiler) == ("H200", SAVED, "report report.csv")
    assert [kernel.rung for kernel in made.kernels] == [6, 15]
    assert all(HARDWARE in kernel.readings for kernel in made.kernels)


def test_a_report_of_ncu_is_read_by_ncu(
    report: str, tmp_path: Path, pretend_ncu: Callable[..., Path]
) -> None:
    calls = pretend_ncu(report)
    file = tmp_path / "report.ncu-rep"
    file.write_bytes(b"\x00")
    code, out, _ = run("15", "--from", file, "--size", 256, "--jobs", 1)
    assert code == 0
    assert "15 large patch, N = 256" in out
    assert "06 two blocks" not in out
    assert calls.read_text().strip() == f"--import {file} --csv --page raw --print-units base"


def test_a_report_that_does_not_fit_is_refused(report: str, tmp_path: Path) -> None:
    file = tmp_path / "report.csv"
    file.write_text(report)
    cases = [
        (
            ("--size", 2048),
            "holds sgemm_06_name with 4 blocks; at N = 2048 on H200 it has 256: name the size",
        ),
        (("5", "--size", 256), "holds no launch of 05 course"),
    ]
    for arguments, said in cases:
        code, _, err = run("--from", file, *arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert said in err
    for text, said in (
        ("", "holds no launch"),
        ("nothing of the kind", "holds no launch"),
        ('"ID","Kernel"\n"0","k"\n', "is no CSV of Nsight Compute"),
        (pretend_csv([("sgemm_06_name", {"other__metric.sum": 1.0})]), "none of the metrics"),
        (pretend_csv([("sgemm_99_name", {"smsp__inst_executed.sum": 1.0})]), "is no rung of this version"),
        (pretend_csv([("gemm", {"smsp__inst_executed.sum": 1.0})]), "no launch of a rung"),
    ):
        file.write_text(text)
        code, _, err = run("--from", file, "--size", 256)
        assert (code, err.count("\n")) == (2, 1), err
        assert said in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name the rungs to profile, such as 15 or 1-5,12; there are 1, 2"),
        (("99",), "rung 99 is unknown"),
        (("nonsense",), "there is no rung 'nonsense'"),
        (("6", "--size", "0"), "size '0'"),
        (("6", "--size", "64,128"), "size '64,128': one size is accepted"),
        (("6", "--size", "16384"), "the emulator takes sizes up to 8192"),
        (("6", "--device", "TPU"), "unknown device 'TPU'"),
        (("6", "--budget", "0"), "budget 0"),
        (("6", "--jobs", "0"), "jobs 0"),
        (("6", "--json", "/no/such/place.json"), "cannot write"),
        (("--from", "/no/such/report.csv"), "there is no such file"),
        (("--from", "/no/such/profile.json"), "cannot read"),
        (("6", "--from", "profile.json"), "is shown as it is"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], said: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_rungs_are_named_in_any_way() -> None:
    assert [rung.number for rung in choose_rungs(["12", "1-3,15", "course", "06_two_blocks"])] == [
        1,
        2,
        3,
        5,
        6,
        12,
        15,
    ]
    assert len(choose_rungs([f"1-{load_rungs()[-1].number}"])) == len(load_rungs())
