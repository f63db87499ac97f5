"""Exported programs, built by nvcc and run."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tilewave.device import DeviceSpec
from tilewave.lab.export import standalone
from tilewave.lab.registry import get_rung

SIZES = ((512, 512, 512), (1, 1, 1), (131, 261, 67))
NVCC = shutil.which("nvcc")


@pytest.mark.gpu
@pytest.mark.skipif(NVCC is None, reason="nvcc is not on the PATH: the CUDA toolkit is not installed")
@pytest.mark.parametrize("number", [1, 12, 15, 18, 21, 23])
def test_it_builds_runs_and_is_right(number: int, spec: DeviceSpec, tmp_path: Path) -> None:
    (tmp_path / "rung.cu").write_text(standalone(get_rung(number), spec, SIZES))
    build = [str(NVCC), "-O3", "-arch=native", "rung.cu", "-lcublas", "-o", "rung"]
    built = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run(["./rung"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"131\s+261\s+67\s", ran.stdout)
