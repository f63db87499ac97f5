"""Pictures and Markdown from a ladder."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from ladders import made_up_ladder

from tilewave.errors import UsageError
from tilewave.lab.picture import draw_ladder, markdown_tables


def test_an_svg_shows_every_rung_and_size(tmp_path: Path, rng: np.random.Generator) -> None:
    ladder = made_up_ladder(rng)
    out = tmp_path / "ladder.svg"
    draw_ladder(ladder, out)
    ElementTree.parse(out)
    text = out.read_text()
    for shown in ("N = 1024", "N = 2049", "12 made up 12", "cuBLAS 50.0", "through torch 2.11.0", "TFLOP/s"):
        assert re.search(f"<!-- .*{shown}|^{shown}.*-->", text, re.MULTILINE), shown
    for size in (1024, 2049):
        row = ladder.find(9, size)
        assert row is not None
        assert row.speed is not None
        assert f"<!-- {row.speed.tflops:.1f} (45%) -->" in text
    again = tmp_path / "again.svg"
    draw_ladder(ladder, again)
    assert again.read_text() == text  # nothing in it but the ladder


def test_a_png_is_written(tmp_path: Path, rng: np.random.Generator) -> None:
    draw_ladder(made_up_ladder(rng, sizes=(512,), rungs=2), tmp_path / "l.PNG")
    assert (tmp_path / "l.PNG").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    with pytest.raises(UsageError, match=r"\.png or \.svg"):
        draw_ladder(made_up_ladder(rng), tmp_path / "ladder.pdf")
    with pytest.raises(UsageError, match="without a GPU"):
        draw_ladder(made_up_ladder(rng, timed=False), tmp_path / "ladder.svg")
    with pytest.raises(UsageError, match="cannot write"):
        draw_ladder(made_up_ladder(rng), tmp_path / "missing" / "ladder.svg")


@pytest.mark.parametrize("timed", [True, False])
def test_markdown_tables_are_well_formed(rng: np.random.Generator, timed: bool) -> None:
    ladder = made_up_ladder(rng, timed=timed)
    text = markdown_tables(ladder)
    blocks = [block.splitlines() for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]
    assert len(blocks) == 1 + timed
    for block in blocks:
        assert len({line.count("|") for line in block}) == 1
        assert len(block) >= 2 + 12
    row = ladder.find(7, 2049)
    assert row is not None
    assert (f"{row.speed.tflops:.1f} (35%)" in text) if row.speed else ("TFLOP/s" not in text)
