"""``tilewave plan`` as a user meets it."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tilewave.cli import app
from tilewave.device import get_spec, spec_names
from tilewave.errors import DeviceError
from tilewave.planner import EVERYTHING, Problem, plan, report
from tilewave.planner.report import plan_command, print_plan


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_article_gpu_at_1025() -> None:
    code, out, err = run("1025", "1025", "1025", "--device", "GB10")
    assert (code, err) == (0, "")
    assert re.search(r"128x256 data-parallel +45 +45 +1 +3 +65 +34\.1 +0\.0 +34\.1 +chosen", out)
    assert re.search(r"128x128 data-parallel +81 +81 +2 +15 +130 +34\.1 +0\.0 +35\.2 +1\.033", out)
    assert "tie of bare work, 34.1 M multiply-adds each: 128x256 data-parallel; 128x128 data-parallel" in out
    assert "choice: 128x256 data-parallel" in out
    assert "SMs idle in the last wave 3 of 48" in out
    assert "among the three kernels, without stream-K: 128x256 data-parallel" in out


@pytest.mark.parametrize("n", ["1024", "2049"])
def test_the_big_tile_is_turned_down_among_three(n: str) -> None:
    code, out, _ = run(n, n, n, "--device", "gb10", "--family", "three")
    assert code == 0
    assert re.search(r"^choice: 128x128 ", out, re.MULTILINE)
    assert re.search(r"^128x256 data-parallel .* 1\.\d+$", out, re.MULTILINE)


@pytest.mark.parametrize("name", spec_names())
@pytest.mark.parametrize(
    "size", [("0", "7", "7"), ("7", "7", "0"), ("1", "1", "1"), ("9999", "33", "100000")]
)
def test_every_known_gpu_gets_a_plan(name: str, size: tuple[str, str, str]) -> None:
    code, out, err = run(*size, "--device", name, "--family", "all")
    assert (code, err) == (0, "")
    assert "choice: " in out
    assert ("nothing to compute" in out) == ("0" in size[:2])
    assert ("not calibrated" in out) == (name != "GB10")


def test_json_holds_the_plan() -> None:
    code, out, _ = run("2049", "2049", "2049", "--device", "H200", "--json", "--batch", "3")
    assert code == 0
    record = json.loads(out)
    assert record["problem"] == {"m": 2049, "n": 2049, "k": 2049, "batch": 3}
    assert record["sms"] == 132
    assert (
        record["launch"]["grid"][0]
        == record["cut"]["whole_tiles"]
        + (record["cut"]["tiles"] - record["cut"]["whole_tiles"]) * record["cut"]["pieces"]
    )
    assert [c["rejected"] for c in record["considered"]].count(None) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["10", "10"], "'k'"),
        (["10", "x", "10"], "valid integer"),
        (["10", "-10", "10", "--device", "T4"], "n must be at least 0, not -10"),
        (["10", "10", "10", "--device", "T4", "--batch", "-1"], "batch must be at least 0, not -1"),
        (["10", "10", "10", "--device", "GB100000"], "unknown device 'GB100000'"),
        (["10", "10", "10", "--device", "T4", "--family", "four"], "known families: three, stream-k, all"),
        (["1" + "0" * 30, "10", "10", "--device", "T4"], "2^63"),
        (["1", "1", "1", "--device", "H200", "--batch", "2147483648"], "no kernel can run"),
        (["1", "1", "1", "--devise", "H200"], "--devise"),
    ],
)
def test_bad_input_is_one_line_and_code_two(arguments: list[str], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_without_a_gpu_and_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gpu() -> None:
        raise DeviceError("nothing here")

    monkeypatch.setattr(report, "query_device", no_gpu)
    code, _, err = run("1", "1", "1")
    assert code == 2
    assert "nothing here" in err
    assert "--device: T4" in err


def test_the_gpu_here_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "query_device", lambda: get_spec("A100"))
    assert plan_command(64, 64, 64, console=Console(file=io.StringIO())).device == "A100"


def test_a_narrow_terminal_cuts_nothing() -> None:
    chosen = plan(Problem(2048, 2048, 2048), get_spec("GB10"), family=EVERYTHING)
    texts = []
    for width in (20, 300):
        stream = io.StringIO()
        print_plan(chosen, Console(file=stream, width=width))
        texts.append(stream.getvalue())
    assert texts[0] == texts[1]
    for candidate in chosen.considered:
        assert f"{candidate.variant} {candidate.schedule}" in texts[0]
