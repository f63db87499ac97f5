"""Code blocks of a Markdown page, run as a reader would: in order, in one namespace."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```python( gpu)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PROMISE = re.compile(r"# -> (.+)$", re.MULTILINE)


def blocks(page: str, *, gpu: bool) -> list[str]:
    """The page's Python blocks; with ``gpu`` those marked ``python gpu`` too, which need one."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [code for marked, code in _BLOCK.findall(text) if gpu or not marked]


def run_in_order(codes: list[str]) -> int:
    """Run blocks one after another; each ``# -> TEXT`` must be printed, in this order. Returns their
    number.
    """
    namespace: dict[str, Any] = {}
    promises = 0
    for code in codes:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "<snippet>", "exec"), namespace)
        seen = printed.getvalue()
        for promise in _PROMISE.findall(code):
            before, found, seen = seen.partition(promise)
            assert found, f"{promise!r} was not printed, or not in its place:\n{before}\nby\n{code}"
            promises += 1
    return promises
