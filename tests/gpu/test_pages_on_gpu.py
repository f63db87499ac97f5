"""The library's page and the examples on a GPU, with the libraries that are installed there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from snippets import ROOT, blocks, run_in_order
from tilewave.runtime.driver import Device

pytestmark = pytest.mark.gpu


def test_every_block_of_the_page_runs(device: Device) -> None:
    pytest.importorskip("torch")
    codes = blocks("docs/library.md", gpu=True)
    assert run_in_order(codes) == sum(code.count("# -> ") for code in codes) >= 15


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "examples").glob("*.py")))
def test_every_example_runs_on_the_gpu(device: Device, name: str) -> None:
    for library in ("torch", "cupy"):
        if name.startswith(library):
            pytest.importorskip(library)
    script = ROOT / "examples" / f"{name}.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    if name.startswith("torch"):
        assert "on cuda" in done.stdout
    if name == "torch_training":
        assert "ms a step before" in done.stdout
