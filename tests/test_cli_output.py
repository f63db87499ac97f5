"""What a command says where its output cannot be written: one line, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
COMMANDS = (
    ["explain", "8", "8", "8", "--device", "H200"],
    ["picture", str(RESULTS / "ladder-h200.json"), "--markdown"],
    ["--version"],
)


def run(arguments: list[str], redirection: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'"$@" {redirection}', "sh", sys.executable, "-m", "tilewave", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: words[0])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk(arguments: list[str]) -> None:
    found = run(arguments, ">/dev/full")
    assert found.returncode == 1
    assert found.stderr == "tilewave: cannot read or write the output: No space left on device\n"


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: words[0])
def test_nowhere_to_write(arguments: list[str]) -> None:
    found = run(arguments, ">&-")
    assert (found.returncode, found.stderr) == (0, "")


def test_a_reader_that_has_gone() -> None:
    found = run(COMMANDS[1], "| true")
    assert found.stderr == ""
