"""Importing tilewave uses no GPU: no module of it loads the driver's library, so none creates a context."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

IMPORT_ALL = """
import importlib, os, pkgutil, sys, types
from pathlib import Path

WATCHED = ("libcuda.so", "libnvrtc", "libcudart", "libnvidia")
HEAVY = {"numpy", "cuda", "cuda.bindings", "torch", "cupy", "rich"}

def libraries():
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = {os.path.basename(line.split()[-1]) for line in lines if "/" in line}
    return sorted(name for name in names if name.startswith(WATCHED))

import tilewave
print("alone", sorted(HEAVY & set(sys.modules)))
sys.modules["tilewave.torch"] = types.ModuleType("tilewave.torch")  # it would import PyTorch
modules = [module.name for module in pkgutil.walk_packages(tilewave.__path__, "tilewave.")]
modules = [name for name in modules if not name.endswith("__main__")]  # that one runs the command line
for name in modules:
    importlib.import_module(name)
print("modules", len(modules))
print("imported", libraries())
from tilewave.runtime.driver import probe
print("usable", probe().usable)
print("probed", libraries())
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists a process's libraries")
def test_imports_load_neither_driver_nor_compiler(tmp_path: Path) -> None:
    """First half of case H063 of the project's list; the second half is in tests/gpu."""
    # A stand-in that can be loaded everywhere: where there is no driver, an attempt would leave no trace.
    library = re.search(r"(/\S+/libm\.so\.6)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    if library is None:
        pytest.skip("no library to stand in for libcuda")
    shutil.copy(library.group(1), tmp_path / "libcuda.so.1")
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("LD_LIBRARY_PATH")])),
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(IMPORT_ALL)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert said["alone"] == "[]"  # everything heavy waits until it is used
    assert int(said["modules"]) > 60
    assert said["imported"] == "[]"
    assert said["usable"] == "False"  # the stand-in is no driver
    assert "libcuda.so.1" in said["probed"]  # the check sees what it looks for
