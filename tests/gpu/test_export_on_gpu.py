"""Exported programs, built with nvcc and run: right, timed against cuBLAS, and able to see a wrong kernel."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tilewave.device import DeviceSpec
from tilewave.lab.export import standalone
from tilewave.lab.registry import get_rung

pytestmark = pytest.mark.gpu

NVCC = shutil.which("nvcc") or next(
    (str(path) for path in (Path("/usr/local/cuda/bin/nvcc"),) if path.exists()), None
)
SIZES = [(256, 256, 256), (257, 131, 77), (1024, 1024, 1024)]
LINE = re.compile(
    r"^ +(\d+) +(\d+) +(\d+) +(\S+) +(\S+) ms +(\S+) TFLOP/s +cuBLAS +(\S+) ms +(\S+) TFLOP/s +x (\S+)$"
)


def cublas_options() -> list[str]:
    """How to find cuBLAS: nothing to add with a whole toolkit, else the wheel that frameworks bring along."""
    assert NVCC is not None
    toolkit = Path(NVCC).resolve().parents[1]
    if any(toolkit.glob("**/cublas_v2.h")) or Path("/usr/include/cublas_v2.h").exists():
        return ["-lcublas"]
    found = importlib.util.find_spec("nvidia")
    for root in (found.submodule_search_locations or ()) if found is not None else ():
        for header in Path(root).glob("**/include/cublas_v2.h"):
            wheel = header.parents[1]
            library = next((wheel / "lib").glob("libcublas.so*"), None)
            if library is not None:
                where = [f"-L{library.parent}", f"-l:{library.name}", f"-Xlinker=-rpath={library.parent}"]
                return [f"-I{header.parent}", *where]
    pytest.skip("no cublas_v2.h: neither the toolkit nor an nvidia-cublas wheel has cuBLAS's headers")


def build(text: str, folder: Path) -> Path:
    """Build a program as its first lines say."""
    if NVCC is None:
        pytest.skip("nvcc was not found: the CUDA toolkit is not installed")
    source, program = folder / "program.cu", folder / "program"
    source.write_text(text)
    command = [NVCC, "-O3", "-arch=native", str(source), *cublas_options(), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stderr
    return program


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("number", [1, 12, 15, 18, 19, 21, 23])
def test_it_builds_checks_itself_and_prints_a_line_a_size(
    number: int, tmp_path: Path, spec: DeviceSpec
) -> None:
    done = run(build(standalone(get_rung(number), spec, SIZES), tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{spec.sms} SMs" in done.stdout
    assert "note:" not in done.stdout
    lines = [LINE.match(line) for line in done.stdout.splitlines()]
    found = [line.groups() for line in lines if line is not None]
    assert [tuple(map(int, line[:3])) for line in found] == SIZES
    for line in found:
        error, ours, _, theirs, _, ratio = map(float, line[3:])
        assert 0 < error < 1
        assert ratio == pytest.approx(theirs / ours, rel=0.3)


def test_a_wrong_kernel_is_found(tmp_path: Path, spec: DeviceSpec) -> None:
    text = standalone(get_rung(12), spec, SIZES)
    right = "if (col < N) C[(size_t)row * N + col] = sum[i][j];"
    assert text.count(right) == 1
    wrong = right.replace("sum[i][j]", "sum[i][j] * (row == M - 1 && col == 5 ? 1.01f : 1.0f)")
    done = run(build(text.replace(right, wrong), tmp_path))
    assert done.returncode == 1
    assert done.stdout.count("WRONG") == len(SIZES)


def test_an_element_that_is_never_written_is_found(tmp_path: Path, spec: DeviceSpec) -> None:
    text = standalone(get_rung(12), spec, SIZES)
    done = run(build(text.replace("if (col < N) C[", "if (col < N && col != 7) C["), tmp_path))
    assert done.returncode == 1
    assert done.stdout.count("WRONG: off by inf bounds") == len(SIZES)


def test_sizes_on_its_command_line(tmp_path: Path, spec: DeviceSpec) -> None:
    plain = build(standalone(get_rung(12), spec, SIZES), tmp_path)
    done = run(plain, "100", "33x65x17")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in done.stdout.splitlines() if LINE.match(line)]) == 2
    for bad in ("0", "1x2", "-5", "1x2x3x4", "70000", "big"):
        refused = run(plain, bad)
        assert refused.returncode == 2
        assert "is no size" in refused.stderr


def test_a_scheduled_program_knows_its_sizes_only(tmp_path: Path, spec: DeviceSpec) -> None:
    program = build(standalone(get_rung(21), spec, SIZES), tmp_path)
    refused = run(program, "512")
    assert refused.returncode == 2
    assert "512 x 512 x 512 was not exported: this file has 256x256x256 257x131x77" in refused.stderr
