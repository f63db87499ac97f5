"""The command line: what it prints, what it refuses, and how it exits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tilewave
from tilewave.cli import app
from tilewave.lab import command
from tilewave.lab.records import load_ladder
from tilewave.runtime.driver import Probe

runner = CliRunner()


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests ask for the emulator's answers, also on a machine with a GPU."""
    monkeypatch.setattr(command, "probe", lambda: Probe(0, None, "no NVIDIA driver on this machine"))
    monkeypatch.setenv("COLUMNS", "100")


def run(*arguments: str) -> tuple[int, str, str]:
    result = runner.invoke(app, list(arguments), prog_name="tilewave")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--sizes", "0"), "size '0': whole numbers from 1"),
        (("--sizes", "-5"), "size '-5': whole numbers from 1"),
        (("--sizes", "1024,x"), "size 'x': whole numbers from 1"),
        (("--sizes", ""), "whole numbers from 1"),
        (("--sizes", "16384"), "the emulator takes sizes up to 8192"),
        (("--rungs", "99"), "rung 99 is unknown: there are 1-"),
        (("--rungs", "naive"), "rungs 'naive': a number or a range"),
        (("--device", "TPU"), "unknown device 'TPU'"),
        (("--device", ""), "unknown device ''"),
        (("--budget", "0"), "budget 0: a positive number"),
        (("--budget", "-3"), "budget -3: a positive number"),
        (("--budget", "nan"), "budget nan: a positive number"),
        (("--budget", "soon"), "--budget"),
        (("--jobs", "0"), "jobs 0"),
        (("--json", "/proc/no/such/place.json"), "cannot write /proc/no/such/place.json"),
        (("--json", "/"), "is a directory"),
        (("--no-such-option",), "--no-such-option"),
        (("extra",), "extra"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], said: str) -> None:
    code, out, err = run("ladder", *arguments)
    assert code == 2
    assert out == ""
    assert said in err
    assert err.startswith("tilewave: ")
    assert err.count("\n") == 1


def test_a_file_that_is_no_ladder_is_refused_before_any_work(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text('{"mine": 1}')
    code, _, err = run("ladder", "--rungs", "1", "--sizes", "8", "--json", str(path))
    assert (code, err.count("\n")) == (2, 1)
    assert "not a ladder of format" in err
    assert path.read_text() == '{"mine": 1}'


def test_unknown_commands_and_no_command() -> None:
    code, _, err = run("laddr")
    assert (code, err.count("\n")) == (2, 1)
    assert "ladder" in err
    code, out, _ = run()
    assert code == 0
    assert "picture" in out


def test_version_is_printed_the_same_way_by_the_module() -> None:
    code, out, _ = run("--version")
    assert code == 0
    assert re.fullmatch(r"tilewave \S+\n", out)
    module = subprocess.run(
        [sys.executable, "-m", "tilewave", "--version"], capture_output=True, text=True, check=True
    )
    assert module.stdout == out


def test_info_says_what_is_there_and_what_is_missing() -> None:
    code, out, err = run("info")
    assert (code, err) == (0, "")
    for label in ("tilewave", "GPU", "compiler", "cache", "frameworks", "emulated"):
        assert re.search(rf"^{label}", out, re.MULTILINE), label
    assert "NVRTC 13." in out
    assert "GB10" in out


def test_ladder_shows_counts_checks_and_says_that_it_emulated(tmp_path: Path) -> None:
    path = tmp_path / "ladder.json"
    arguments = ("ladder", "--rungs", "3-4", "--sizes", "70", "--json", str(path), "--jobs", "1")
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    assert "No GPU was found (no NVIDIA driver on this machine)" in words
    assert "compiled for GB10 (sm_121)" in words
    assert "03 shared tile" in out
    assert "04 thread column" in out
    assert "All 4 products that were checked are right." in words
    assert "TFLOP/s" not in out
    rows = load_ladder(path).rows
    assert [(row.rung, row.size) for row in rows] == [(3, 70), (4, 70)]
    # 3 x 3 blocks of 32 x 32 threads, 3 slices of 32 steps, some of them beyond the edge but multiplied too.
    assert rows[0].counted is not None
    assert rows[0].counted.thread_fma == 9 * 1024 * 96
    assert (rows[0].counted.blocks_run, rows[0].counted.blocks_total) == (9, 9)


def test_ladder_goes_on_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ladder.json"
    arguments = ("ladder", "--sizes", "40", "--json", str(path), "--jobs", "1")
    assert run(*arguments, "--rungs", "1")[0] == 0
    examined = []
    original = command.run_ladder.__globals__["_examine"]

    def spy(task):
        examined.append((task.rung, task.size))
        return original(task)

    monkeypatch.setitem(command.run_ladder.__globals__, "_examine", spy)
    assert run(*arguments, "--rungs", "1-2")[0] == 0
    assert examined == [(2, 40)]
    data = json.loads(path.read_text())
    data["rows"][0]["key"] = "made from another source"
    path.write_text(json.dumps(data))
    examined.clear()
    assert run(*arguments, "--rungs", "1-2")[0] == 0
    assert examined == [(1, 40)]
    assert [row.rung for row in load_ladder(path).rows] == [1, 2]


def test_a_file_of_another_device_is_not_mixed_with_this_one(tmp_path: Path) -> None:
    path = tmp_path / "ladder.json"
    arguments = ("ladder", "--rungs", "1", "--sizes", "8", "--json", str(path), "--jobs", "1")
    assert run(*arguments)[0] == 0
    before = path.read_text()
    code, _, err = run(*arguments, "--device", "h200")
    assert (code, err.count("\n")) == (2, 1)
    assert "emulated on GB10" in err
    assert "H200" in err
    assert path.read_text() == before


def test_a_wrong_rung_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewave.lab import emulate

    original = emulate.product
    monkeypatch.setattr(emulate, "product", lambda *args, **kwargs: original(*args, **kwargs) * 1.5)
    code, out, _ = run("ladder", "--rungs", "2", "--sizes", "8", "--jobs", "1")
    assert code == 1
    assert "WRONG results: rungs 2" in out


def test_picture_needs_something_to_do(tmp_path: Path) -> None:
    path = tmp_path / "ladder.json"
    assert run("ladder", "--rungs", "1", "--sizes", "8", "--json", str(path), "--jobs", "1")[0] == 0
    for arguments, said in (
        ((str(path),), "nothing to do"),
        ((str(path), "--out", str(tmp_path / "l.svg")), "without a GPU"),
        ((str(tmp_path / "none.json"), "--markdown"), "cannot read"),
    ):
        code, _, err = run("picture", *arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert said in err
    code, out, _ = run("picture", str(path), "--markdown")
    assert code == 0
    assert "| 01 naive |" in out


def test_picture_shows_the_rungs_and_sizes_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "ladder.json"
    ladder = ("ladder", "--rungs", "1,2", "--sizes", "8,9", "--json", str(path), "--jobs", "1")
    assert run(*ladder)[0] == 0
    code, out, _ = run("picture", str(path), "--markdown", "--rungs", "2", "--sizes", "9")
    assert code == 0
    assert "| 02 coalesced |" in out
    assert "01 naive" not in out
    assert "at N = 9" in out
    for arguments, said in (
        (("--rungs", "3"), "rung 3 is unknown: there are 1-2"),
        (("--sizes", "10"), "size 10 is unknown: there are 8-9"),
        (("--sizes", "all"), "sizes 'all'"),
    ):
        code, _, err = run("picture", str(path), "--markdown", *arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert said in err


@pytest.mark.parametrize("precision", ["ieee", "fp16x3"])
def test_explain_is_the_library_s_plan(precision: str) -> None:
    arguments = ["explain", "3000", "2000", "5000", "--device", "H200", "--layouts", "TN", "--batch", "3"]
    shown = CliRunner().invoke(app, [*arguments, "--precision", precision])
    found = tilewave.plan(3000, 2000, 5000, device="H200", layouts="TN", batch=3, precision=precision)
    assert found.problem.precision.value == precision
    assert shown.exit_code == 0
    assert shown.stdout == f"{found}\n\n{tilewave.explain(found)}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["3", "4", "-5", "--device", "H200"], "k is -5; accepted are integers of at least 0"),
        (["3", "4", "5", "--device", "H20"], "unknown device 'H20'"),
        (["3", "4", "5", "--device", "H200", "--layouts", "nn"], "accepted are NN, NT, TN, TT"),
        (["3", "4", "5", "--device", "H200", "--schedule", "splitk"], "schedule must be None"),
    ],
)
def test_explain_says_what_is_wrong_in_a_line(arguments: list[str], words: str) -> None:
    shown = CliRunner().invoke(app, ["explain", *arguments])
    assert shown.exit_code == 2
    assert words in shown.stderr
    assert shown.stderr.count("\n") == 1
