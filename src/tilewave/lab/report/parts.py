"""What a page is made of: parts with a lead, pictures, tables and remarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from tilewave.lab.report.svg import Drawing


@dataclass(frozen=True)
class Table:
    """A table whose first column names the rows; the first ``words`` columns hold text, others figures."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    folded: bool = False


@dataclass(frozen=True)
class Panel:
    """A picture with its caption, and the table of the same figures for those who cannot see it.

    Panels of one ``group`` stand together under its heading.
    """

    drawing: Drawing
    caption: str
    table: Table | None = None
    group: str = ""

    @property
    def told(self) -> bool:
        """Whether some marks tell something."""
        return any(mark.find("title") is not None for mark in self.drawing.marks)

    @property
    def hint(self) -> str:
        """What stands where a mark's words will."""
        if self.drawing.explorable:
            return "Hover over a cell, or focus one and walk with the arrow keys."
        return ""


@dataclass
class Part:
    """A section of the page. ``missing`` says what could not be shown and what to give to see it,
    ``remarks`` what the records themselves say in words.
    """

    anchor: str
    title: str
    lead: str
    panels: list[Panel] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def groups(self) -> list[tuple[str, list[Panel]]]:
        """Neighbouring panels of one group, with its heading."""
        return [(name, list(panels)) for name, panels in groupby(self.panels, lambda panel: panel.group)]


def listing(words: Sequence[str]) -> str:
    """a, b and c."""
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else "".join(words)


def numbers(values: Sequence[int]) -> str:
    """Numbers of rungs such as 5, 6, 7, 10 as "05 to 07, 10"."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(
        f"{low:02d}"
        if low == high
        else f"{low:02d}, {high:02d}"
        if high == low + 1
        else f"{low:02d} to {high:02d}"
        for low, high in runs
    )
