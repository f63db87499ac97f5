"""The example in the emulator's documentation runs and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "emulator.md"


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    match = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert match
    exec(compile(match.group(1), str(PAGE), "exec"), {})
    assert capsys.readouterr().out.strip().endswith(match.group(1).split("# ")[-1].strip())
