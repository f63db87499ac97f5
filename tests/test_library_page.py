"""docs/library.md: every block runs, prints what it says, and its lists are the code's."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import tilewave
from snippets import ROOT, blocks, run_in_order
from tilewave import errors
from tilewave.call import ACTIVATIONS
from tilewave.planner.gemm.options import OFFERED, WORKSPACE_LIMIT_BYTES

PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")


def test_the_blocks_run_and_print_what_they_say() -> None:
    codes = blocks("docs/library.md", gpu=False)
    assert len(codes) >= 10
    assert run_in_order(codes) >= 15


def test_a_block_that_prints_something_else_is_found() -> None:
    with pytest.raises(AssertionError, match="'two' was not printed"):
        run_in_order(["print('one')  # -> two"])
    with pytest.raises(AssertionError, match="in its place"):
        run_in_order(["print('b a')  # -> a\n# -> b"])


def test_blocks_for_a_gpu_are_marked_and_compile() -> None:
    everything = blocks("docs/library.md", gpu=True)
    marked = [code for code in everything if code not in blocks("docs/library.md", gpu=False)]
    assert len(marked) == 2
    for code in everything:
        assert ("torch" in code) == (code in marked)
        compile(code, "docs/library.md", "exec")


def test_the_table_lists_every_public_name() -> None:
    listed = re.findall(r"^\| `(\w+)\(", PAGE, re.MULTILINE)
    assert sorted(listed) == tilewave.__all__


def test_options_and_limits_are_the_code_s() -> None:
    for name in (*ACTIVATIONS, *OFFERED):
        assert f'"{name}"' in PAGE or f"`{name}`" in PAGE, name
    assert f"{WORKSPACE_LIMIT_BYTES // 2**20} MiB" in PAGE


def test_errors_are_named_with_what_python_calls_them() -> None:
    table = PAGE[PAGE.index("## Errors") : PAGE.index("## Environment")]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)?) \| (`\w+`)? ?\|", table, re.MULTILINE)
    assert len(rows) == 5
    for names, builtin in rows:
        for name in re.findall(r"\w+", names):
            kind = getattr(errors, name)
            assert issubclass(kind, errors.TilewaveError)
            if builtin:
                assert builtin.strip("`") in {base.__name__ for base in kind.__mro__}


def test_every_environment_variable_is_listed() -> None:
    used = set()
    for module in (Path(tilewave.__file__).parent).rglob("*.py"):
        used |= set(re.findall(r'environ\.get\("(TILEWAVE_\w+)"', module.read_text(encoding="utf-8")))
    listed = set(re.findall(r"^\| `(TILEWAVE_\w+)`", PAGE, re.MULTILINE))
    assert listed == used
    assert used


@pytest.mark.parametrize("page", ["docs/library.md", "docs/speed.md", "docs/ladder.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (ROOT / "docs" / os.fspath(target)).exists(), target
