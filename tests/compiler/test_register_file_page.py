"""The page on the register file shows the committed figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_is_the_committed_record() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "register_file_page.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    record = json.loads((ROOT / "benchmarks" / "results" / "register_file.json").read_text(encoding="utf-8"))
    assert all(row["reason"] is None for row in record["rows"])
