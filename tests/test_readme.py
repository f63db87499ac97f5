"""What the README shows must run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilewave.cli import app

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\| `tilewave ([^`]+)` \|", README, re.MULTILINE)


@pytest.mark.parametrize("code", re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL))
def test_the_python_examples_run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "[2. 2. 2.]" in done.stdout


def test_the_table_lists_every_command() -> None:
    assert len(COMMANDS) == len({command.split()[0] for command in COMMANDS})
    listed = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert {command.split()[0] for command in COMMANDS} == listed


@pytest.mark.parametrize("command", COMMANDS)
def test_the_options_in_the_table_exist(command: str) -> None:
    name, *arguments = shlex.split(command)
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
    for argument in arguments:
        if argument.startswith("--"):
            assert argument in shown.output


def test_pictures_and_links_are_in_the_repository() -> None:
    root = Path(__file__).parents[1]
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (root / target).exists(), target


def test_the_table_is_the_committed_ladder() -> None:
    root = Path(__file__).parents[1]
    table = README.partition("<!-- table -->")[2].partition("<!-- end of table -->")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    numbers = ",".join(re.findall(r"^\| (\d\d) ", table, re.MULTILINE))
    sizes = ",".join(re.findall(r"N = (\d+)", rows[0]))
    arguments = ["--markdown", "--rungs", numbers, "--sizes", sizes]
    made = CliRunner().invoke(app, ["picture", str(root / "benchmarks/results/ladder-h200.json"), *arguments])
    assert [line for line in made.stdout.splitlines() if line.startswith("|")][: len(rows)] == rows
