"""`import tilewave` costs little and imports nothing heavy; its names appear when they are used."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import tilewave

CHECK = """
import sys, time
begin = time.perf_counter()
import tilewave
seconds = time.perf_counter() - begin
heavy = {"numpy", "cuda", "torch", "cupy", "jax", "rich", "typer", "matplotlib"} & set(sys.modules)
listed = set(dir(tilewave))
tilewave.matmul
late = {"cuda", "torch", "cupy", "jax", "rich", "matplotlib"} & set(sys.modules)
idle = ("emulator", "lab", "bench", "planner.records", "planner.select", "planner.gemm.explain")
late |= {name for name in sys.modules if name.startswith(tuple(f"tilewave.{part}" for part in idle))}
print(seconds, sorted(heavy), {"matmul", "gemm"} <= listed, sorted(late))
"""


def test_import_is_light() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=60, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    seconds, rest = done.stdout.split(" ", 1)
    assert rest.strip() == "[] True []"
    assert float(seconds) < 0.150


def test_what_a_product_needs_is_loaded_with_the_package_where_numpy_is() -> None:
    check = "import numpy, tilewave, sys; print('tilewave.api' in sys.modules, 'cuda' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_every_public_name_is_there() -> None:
    for name in tilewave.__all__:
        assert getattr(tilewave, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'mathmul'"):
        tilewave.mathmul  # noqa: B018
