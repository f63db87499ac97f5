"""What a user may type, and what the refusals say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewave.errors import UsageError
from tilewave.lab import options

KNOWN = (1, 2, 3, 4, 5, 6, 9)


def test_sizes() -> None:
    assert options.parse_sizes("1024, 2048,1") == (1, 1024, 2048)
    assert options.parse_sizes("7,7") == (7,)


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1024,", "a", "1e3", "1.5", "0x10", "1_000", "32769", "٣", "9" * 5000, "²"]
)
def test_bad_sizes_are_named(text: str) -> None:
    with pytest.raises(UsageError, match="whole numbers from 1 to 32768"):
        options.parse_sizes(text)


def test_rungs() -> None:
    assert options.parse_numbers("1-3,9,2", KNOWN) == (1, 2, 3, 9)
    assert options.parse_numbers("05", KNOWN) == (5,)


@pytest.mark.parametrize("text", ["", "x", "3-1", "1-", "-3", "1,,2"])
def test_bad_rungs_are_named(text: str) -> None:
    with pytest.raises(UsageError, match="a number or a range"):
        options.parse_numbers(text, KNOWN)


@pytest.mark.parametrize("text", ["7", "0", "1-9", "99", "1-999999999"])
def test_unknown_rungs_are_told_what_there_is(text: str) -> None:
    with pytest.raises(UsageError, match=r"there are 1-6, 9"):
        options.parse_numbers(text, KNOWN)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_budgets(seconds: float) -> None:
    with pytest.raises(UsageError, match="positive"):
        options.check_budget(seconds)


def test_jobs() -> None:
    assert options.check_jobs(None) >= 1
    assert options.check_jobs(3) == 3
    with pytest.raises(UsageError):
        options.check_jobs(0)


def test_outputs_are_checked_before_the_work(tmp_path: Path) -> None:
    options.check_writable(tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="is a directory"):
        options.check_writable(tmp_path)
    with pytest.raises(UsageError, match=r"missing.*No such file"):
        options.check_writable(tmp_path / "missing" / "x.json")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="Not a directory"):
        options.check_writable(tmp_path / "file" / "x.json")
