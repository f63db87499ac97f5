"""The steps that run on a GPU: every file of GPU tests is in one; a lost context fails one test alone."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_evidence  # noqa: E402


def test_every_file_of_gpu_tests_is_in_one_step() -> None:
    named = Counter(
        part for step in gpu_evidence.steps() for part in step.command if re.match(r"tests/gpu/test_", part)
    )
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert set(named) == files
    assert set(named.values()) == {1}


def test_hand_written_instructions_run_apart() -> None:
    for step in gpu_evidence.steps():
        paths = [part for part in step.command if part.startswith("tests/gpu/")]
        assert ("tests/gpu/test_hopper_instructions_on_gpu.py" in paths) == (step.name == "hopper-tests")


CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests" / "gpu")!r})
from lost_context import ContextGuard
faults = []
def pytest_configure(config):
    config.pluginmanager.register(ContextGuard(config, lambda: faults[-1] if faults else None))
"""
TESTS = """
import pytest
from conftest import faults
@pytest.mark.parametrize("number", range(9))
def test_one(number):
    assert not faults, "the context is lost"
    if number in (2, 5):
        faults.append("an illegal instruction was encountered")
    assert number not in (2, 5, 7)
"""


def run_without_a_gpu(folder: Path, *options: str) -> str:
    """Nine tests, of which two lose their process's context and another one only fails."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    return done.stdout + done.stderr


def outcomes(text: str, outcome: str) -> set[int]:
    return {int(x) for x in re.findall(rf"^{outcome} \S*test_one\[(\d)\]", text, re.MULTILINE)}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_lost_context_fails_one_test_alone(workers: int, tmp_path: Path) -> None:
    text = run_without_a_gpu(tmp_path, "-n", str(workers), "--max-worker-restart=9")
    assert outcomes(text, "PASSED") == {0, 1, 3, 4, 6, 8}
    assert outcomes(text, "FAILED") == {2, 5, 7}
    assert len(re.findall(r"^E +assert 2 not in \(2, 5, 7\)", text, re.MULTILINE)) == 1
    assert "AssertionError: the context is lost" not in text
    for number in (2, 5):
        assert re.search(rf"crashed while running '\S*test_one\[{number}\]'", text)


def test_a_lost_context_ends_a_session_without_workers(tmp_path: Path) -> None:
    text = run_without_a_gpu(tmp_path, "-n", "0")
    assert outcomes(text, "PASSED") == {0, 1}
    assert outcomes(text, "FAILED") == {2}
    assert re.search(r"test_one\[2\] has lost the GPU's context, .*: an illegal instruction", text)
