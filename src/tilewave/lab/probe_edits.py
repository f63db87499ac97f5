"""A rung's kernel with something changed: named edits of its source, so that a probe follows its rung.

Rungs are lessons and hold no switches for experiments. Each edit must apply exactly as often as it says: when
a rung is rewritten so that one no longer fits, building the probe fails instead of measuring another kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from tilewave.compiler import Source
from tilewave.errors import UsageError
from tilewave.lab.probe_search import LANE_BITS, number_of
from tilewave.lab.registry import Rung, get_rung


@dataclass(frozen=True)
class Edit:
    """One replacement in a source: ``old`` stands there exactly ``times`` times and becomes ``new``."""

    name: str
    old: str
    new: str
    times: int = 1


def apply_edits(text: str, edits: Sequence[Edit], where: str) -> str:
    """The text after all edits, in their order; raises ``UsageError`` if one does not fit."""
    for edit in edits:
        found = text.count(edit.old)
        if found != edit.times:
            raise UsageError(
                f"edit {edit.name!r} does not fit {where}: its text should stand there "
                f"{_times(edit.times)} and stands there {_times(found)}: {edit.old.strip()!r}"
            )
        text = text.replace(edit.old, edit.new)
    return text


def _times(number: int) -> str:
    return {0: "not at all", 1: "once"}.get(number, f"{number} times")


@dataclass(frozen=True)
class EditedRung(Rung):
    """A rung whose source has been edited; everything else (entries, tile, launch) is the rung's own.

    ``product`` says whether the kernel still computes C = A B.
    """

    edits: tuple[Edit, ...] = ()
    product: bool = True

    def source(self) -> Source:
        """The rung's file with all edits applied."""
        original = super().source()
        text = apply_edits(original.text, self.edits, f"rung {self.title}")
        return Source.from_text(original.name, text, original.headers)


def edited(number: int, *edits: Edit, product: bool = True) -> EditedRung:
    """The rung of this number with its source edited; without edits the rung itself, as a probe takes it."""
    rung = get_rung(number)
    values = {item.name: getattr(rung, item.name) for item in fields(rung)}
    return EditedRung(**values, edits=edits, product=product)


def lane_map_edits(row_bits: Sequence[int], column_bits: Sequence[int]) -> tuple[Edit, ...]:
    """Give each lane of a warp another patch: bit i of its row is bit ``row_bits[i]`` of its number.

    For rungs from 10 on, whose warps are ``WM / TM`` rows of ``WN / TN`` lanes. The map is a table in
    constant memory, into which the compiler cannot look: kernels of two maps differ in 32 bytes of data, and
    in no instruction or register.
    """
    if sorted([*row_bits, *column_bits]) != list(range(LANE_BITS)):
        raise UsageError(f"a lane map uses each of the bits 0 to 4 once, not {row_bits} and {column_bits}")
    places = number_of(column_bits) + (number_of(row_bits) << len(column_bits))
    return (
        Edit(
            "a table of the lanes' places",
            "template <bool kVectors>\n__global__ void",
            "// Row by row, where in the warp's tile each lane has its patch.\n"
            f"__constant__ unsigned char lane_places[32] = {{{', '.join(map(str, places))}}};\n\n"
            "template <bool kVectors>\n__global__ void",
        ),
        Edit(
            "lanes take their places from the table",
            "  const int lx = lane % (WN / TN), ly = lane / (WN / TN);  // the thread's place in the warp\n",
            "  const int place = lane_places[lane], lx = place % (WN / TN), ly = place / (WN / TN);\n",
        ),
    )
