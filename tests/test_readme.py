"""What the README shows must run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from snippets import blocks
from tilewave.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\| `tilewave ([^`]+)` \|", README, re.MULTILINE)


@pytest.mark.parametrize("place", range(2))
def test_the_python_examples_run(place: int) -> None:
    """Each by itself, as if pasted into a file of its own."""
    found = blocks("README.md", gpu=True)
    assert len(found) == 2
    done = subprocess.run([sys.executable, "-c", found[place]], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    wanted = ["rounding: the largest error is", "2049 x 2049 x 2049 on H200 (132 SMs)"], ["[2. 2. 2.]"]
    for words in wanted[place]:
        assert words in done.stdout


def test_the_first_screen_leads_with_the_library() -> None:
    """What it is, one picture, the two commands, one table, and ten lines of use, in this order."""
    marks = ["# tilewave", "tilewave.matmul(a, b)", "![", "make run ", "make test ", "| --- |", "```python"]
    places = [README.index(mark) for mark in marks]
    assert places == sorted(places)
    assert README.count("![") == 1
    assert len(blocks("README.md", gpu=False)[0].splitlines()) <= 10


def test_the_examples_are_all_listed() -> None:
    listed = re.findall(r"^\| \[(\w+\.py)\]\(examples/(\w+\.py)\) \|", README, re.MULTILINE)
    assert all(name == target for name, target in listed)
    assert sorted(name for name, _ in listed) == sorted(
        path.name for path in (ROOT / "examples").glob("*.py")
    )


@pytest.mark.parametrize("page", ["suite", "ladder"])
def test_tables_are_the_committed_readings(page: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{page}_page.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


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


def test_every_page_can_be_found_from_here() -> None:
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)\)", README))
    assert linked == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_pictures_and_links_are_in_the_repository() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
