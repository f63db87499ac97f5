"""Exported programs: complete, buildable, and with the launches that the ladder uses."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilewave.cli import app
from tilewave.compiler import Source
from tilewave.device import get_spec
from tilewave.errors import UsageError
from tilewave.lab import export
from tilewave.lab.export import DEFAULT_SIZES, inlined, standalone
from tilewave.lab.launches import launch_of
from tilewave.lab.registry import Rung, get_rung, load_rungs
from tilewave.runtime.driver import Probe

STUB = Path(__file__).parent / "cublas_stub"
NVCC = shutil.which("nvcc")
H200 = get_spec("H200")
RUNGS = pytest.mark.parametrize("rung", load_rungs(), ids=lambda rung: rung.title.replace(" ", "_"))
runner = CliRunner()


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "probe", lambda: Probe(0, None, "no NVIDIA driver on this machine"))


@RUNGS
def test_every_rung_is_complete_in_one_file(rung: Rung) -> None:
    text = standalone(rung, H200)
    assert rung.source().text in text
    assert set(re.findall(r'#\s*include\s*(\S+)', text)) == {
        "<cublas_v2.h>", "<cuda_runtime.h>", "<algorithm>", "<cmath>", "<cstdio>", "<cstdlib>",
        "<cstring>", "<functional>", "<random>", "<vector>",
    }  # fmt: skip
    for entry in rung.entries:
        assert f"{entry}<<<" in text
    assert not re.search(r"\{[{%]", text), "a piece of the template is left"


@pytest.mark.skipif(NVCC is None, reason="nvcc is not on the PATH: the CUDA toolkit is not installed")
@pytest.mark.parametrize("number", [1, 12, pytest.param(17, marks=pytest.mark.long), 19, 23])
def test_nvcc_builds_it_without_a_warning(number: int, tmp_path: Path) -> None:
    program = tmp_path / "program.cu"
    program.write_text(standalone(get_rung(number), H200))
    command = [str(NVCC), "-O3", "-arch=sm_90", "-Xcompiler", "-Wall", f"-I{STUB}", "-c", program.name]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stderr
    assert "warning" not in built.stderr + built.stdout


@pytest.mark.parametrize("number", [18, 19, 20, 21, 22, 23])
def test_launches_are_those_of_the_ladder(number: int) -> None:
    rung = get_rung(number)
    text = standalone(rung, H200)
    lines = re.findall(
        r"^    \{ \{(\d+), (\d+), (\d+)\}, (\d+), (\d+), (\d+), \{(\d+), (\d+)\}, (\d+), (\d+) \},$",
        text,
        re.MULTILINE,
    )
    assert len(lines) == len(DEFAULT_SIZES) + 1
    for line in lines:
        m, n, k, kernel, blocks, threads, first, second, floats, tickets = map(int, line)
        planned = launch_of(rung, m, n, k, H200)
        assert rung.entries[kernel] == planned.entry
        assert (blocks, threads) == (planned.blocks, rung.threads_of(planned.entry))
        assert (first, second)[: len(planned.integers)] == planned.integers
        assert (floats, tickets) == (planned.partial_floats, planned.tickets)
    passed = text.count("it.integers[") // len(rung.entries)
    assert passed == len(planned.integers)


def test_a_schedule_needs_a_gpu_to_be_made_for() -> None:
    with pytest.raises(UsageError, match="rung 21 stream k deals its tiles by the number of SMs"):
        standalone(get_rung(21))
    assert "132 SMs" in standalone(get_rung(21), H200)
    assert "SMs (" not in standalone(get_rung(15))


def test_sizes_that_the_rung_does_not_take_are_refused() -> None:
    with pytest.raises(UsageError, match="too large for rung 01"):
        standalone(get_rung(1), sizes=[(65_535 * 32 + 1, 4, 4)])
    with pytest.raises(UsageError, match="K = 0"):
        standalone(get_rung(12), sizes=[(4, 4, 0)])


def test_own_headers_are_inlined_once() -> None:
    source = Source.from_text(
        "kernel.cu",
        '#include "a.cuh"\n#include "b.cuh"\nkernel\n',
        {"a.cuh": '#pragma once\n#include "b.cuh"\na\n', "b.cuh": "#pragma once\nb\n"},
    )
    assert inlined(source) == "b\na\nkernel\n"


def test_the_command_writes_one_file_and_says_how_to_build_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["export", "large_patch"])
    assert result.exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["sgemm_15_large_patch.cu"]
    assert "nvcc -O3 -arch=native sgemm_15_large_patch.cu -lcublas" in result.stdout
    again = runner.invoke(app, ["export", "15"])
    assert (again.exit_code, again.stdout) == (2, "")
    assert "sgemm_15_large_patch.cu exists" in again.stderr
    assert runner.invoke(app, ["export", "15", "--force", "--sizes", "96,64"]).exit_code == 0
    assert "{64, 64, 64}, {96, 96, 96}" in Path("sgemm_15_large_patch.cu").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("99",), "there is no rung '99'"),
        (("21",), "name one with --device"),
        (("21", "--device", "TPU"), "unknown device 'TPU'"),
        (("12", "--sizes", "0"), "size '0'"),
        (("12", "--out", "/"), "is a directory"),
        (("12", "--out", "/proc/no/such.cu"), "cannot write"),
    ],
)
def test_bad_requests_are_one_line(arguments: tuple[str, ...], said: str) -> None:
    result = runner.invoke(app, ["export", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_it_prints_to_the_standard_output() -> None:
    result = runner.invoke(app, ["export", "12", "--out", "-"])
    assert result.exit_code == 0
    assert result.stdout == standalone(get_rung(12))
