"""Puts the ladder's readings into docs/ladder.md, and draws them; `--check` says whether it has.

    python benchmarks/ladder_page.py [--check]

Everything comes from benchmarks/results/ladder-h200.json, which `tilewave ladder --json FILE` writes.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

from tilewave.lab.picture import draw_ladder, markdown_tables
from tilewave.lab.records import Ladder, load_ladder

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "ladder-h200.json"
PICTURE = ROOT / "docs" / "images" / "ladder-h200.png"
PAGE = ROOT / "docs" / "ladder.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->"
WIDTH = 118
"""Characters of a line of prose."""


def rounds_told(ladder: Ladder) -> str:
    """How many rounds the times come from, size by size where it differs."""
    fewest: dict[int, list[int]] = {}
    for size in ladder.sizes():
        counts = [len(row.speed.milliseconds) for row in ladder.rows if row.size == size and row.speed]
        if counts:
            fewest.setdefault(min(counts), []).append(size)
    if len(fewest) == 1:
        (number,) = fewest
        return "single rounds, whose spread is not known" if number == 1 else f"medians of {number} rounds"
    parts = [
        f"{'a single round (spread unknown)' if number == 1 else f'medians of {number} rounds'} at "
        + ", ".join(str(size) for size in sizes)
        for number, sizes in sorted(fewest.items(), reverse=True)
    ]
    return "; ".join(parts)


def table(ladder: Ladder) -> str:
    """The page's part between its markers."""
    record = RESULTS.relative_to(ROOT)
    told = (
        "TFLOP/s on one NVIDIA H200, and the share of cuBLAS FP32 (TF32 off) in brackets; random data, "
        f"contenders in turn: {rounds_told(ladder)}. "
        f"Made by `tilewave ladder` and `benchmarks/ladder_page.py` from [{record}](../{record}), "
        "which also holds driver, compiler and clocks."
    )
    prose = textwrap.fill(told, WIDTH, break_long_words=False, break_on_hyphens=False)
    speeds = markdown_tables(ladder).split("\n\n")[1]
    return f"{prose}\n\n{speeds.strip()}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    options = parser.parse_args()
    ladder = load_ladder(RESULTS)
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = before + BEGIN + table(ladder) + END + after
    if options.check:
        if made != text:
            print("docs/ladder.md is out of date: run python benchmarks/ladder_page.py", file=sys.stderr)
        return int(made != text)
    PAGE.write_text(made, encoding="utf-8")
    draw_ladder(ladder, PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
