"""How a block, a warp and a thread share the tile: who stores which element of C, as the kernels do it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilewave.device import DeviceSpec
from tilewave.lab.registry import Rung, Tile, load_rungs
from tilewave.lab.report.follow import follow
from tilewave.lab.report.parts import Panel, Part, Table, numbers
from tilewave.lab.report.svg import WIDTH, Drawing
from tilewave.planner import VARIANTS

Mask = npt.NDArray[np.bool_]
_ORIGIN = 58.0
"""Room for the strips of A and B, left of the tile and above it."""


@dataclass(frozen=True)
class Owners:
    """Elements of a block's tile (bm x bn) that warp 0 stores, and those of its thread 0."""

    warp: Mask
    thread: Mask


def owners(rung: Rung, spec: DeviceSpec) -> Owners:
    """Follow the stores of warp 0 into C."""
    found = follow(rung, spec, slices=1)
    shape = (rung.tile.bm, rung.tile.bn)
    owner = np.full(shape[0] * shape[1], -1)
    for step in found.steps:
        if step.space == "global" and step.access is not None and step.access.store:
            assert step.addresses is not None
            assert step.active is not None
            first = (step.addresses - found.c.address) // 4
            for offset in range(step.access.width // 4):
                owner[first[step.active] + offset] = np.flatnonzero(step.active)
    owner = owner.reshape(shape)
    return Owners(owner >= 0, owner == 0)


def rectangles(mask: Mask) -> list[tuple[int, int, int, int]]:
    """Disjoint rectangles (row, column, rows, columns) that cover a mask: runs, joined downwards."""
    done: list[tuple[int, int, int, int]] = []
    open_runs: dict[tuple[int, int], tuple[int, int]] = {}  # (column, columns) -> (row, rows)
    for row in range(mask.shape[0] + 1):
        runs = set()
        if row < mask.shape[0]:
            edges = np.flatnonzero(np.diff(np.concatenate([[0], mask[row].astype(np.int8), [0]])))
            runs = {
                (int(begin), int(end - begin)) for begin, end in zip(edges[::2], edges[1::2], strict=True)
            }
        for run in [run for run in open_runs if run not in runs]:
            first, rows = open_runs.pop(run)
            done.append((first, run[0], rows, run[1]))
        for run in runs:
            first, rows = open_runs.get(run, (row, 0))
            open_runs[run] = (first, rows + 1)
    return sorted(done)


def tiling(spec: DeviceSpec) -> Part:
    """The part about tiles: one picture for each way of sharing one."""
    part = Part(
        "tiles",
        "How block, warp and thread share the tile",
        "A block computes one tile of C. It walks along K in slices: a strip of A to the left, a strip of B "
        "above. Blue is what warp 0 stores, orange what its thread 0 stores, and the strips show which rows "
        "of A and columns of B thread 0 needs at each step. Found by following warp 0's stores in the "
        "emulator.",
    )
    alike: list[tuple[list[Rung], Owners]] = []
    for rung in load_rungs():
        if rung.schedule is not None:
            continue
        found = owners(rung, spec)
        for group, known in alike:
            same_tile = (group[0].tile.bm, group[0].tile.bn) == (rung.tile.bm, rung.tile.bn)
            if (
                same_tile
                and np.array_equal(known.warp, found.warp)
                and np.array_equal(known.thread, found.thread)
            ):
                group.append(rung)
                break
        else:
            alike.append(([rung], found))
    scheduled = [rung for rung in load_rungs() if rung.schedule is not None]
    for group, found in alike:
        extent = {(plain.tile, plain.block) for plain in group}
        guests = [rung.number for rung in scheduled if _shapes(rung) & extent]
        part.panels.append(_panel(group, found, guests))
    part.tables.append(_table())
    return part


def _shapes(rung: Rung) -> set[tuple[Tile, tuple[int, int, int]]]:
    """Tile and block of each of a rung's kernels."""
    other = rung.alternative
    return {(rung.tile, rung.block)} | ({(other.tile, other.block)} if other else set())


def _panel(group: list[Rung], found: Owners, guests: list[int]) -> Panel:
    rung = group[0]
    tile = rung.tile
    scale = min((WIDTH - _ORIGIN - 2) / tile.bn, 230 / tile.bm)
    deepest = max(other.tile.bk for other in group)
    strip = min(deepest * scale, 24.0)
    own = numbers([other.number for other in group])
    words = (
        f"{tile.bm} x {tile.bn} tile, {rung.threads} threads; thread 0 stores {int(found.thread.sum())} "
        f"elements in {len(rectangles(found.thread))} pieces, warp 0 stores {int(found.warp.sum())} in "
        f"{len(rectangles(found.warp))}; {_feeds(tile)}"
    )
    top = 30 + strip + 6
    drawing = Drawing(
        f"tile-{rung.number:02d}",
        f"How warp and thread share the tile of rung {rung.title}",
        f"Rungs {own}: {words}.",
        top + tile.bm * scale + 24,
    )
    left = _ORIGIN
    drawing.text(0, 14, f"Rung {own}", "bold")
    drawing.text(WIDTH, 14, f"{tile.bm} × {tile.bn} by {rung.threads} threads", "muted", "end")
    drawing.rect(left - strip - 6, top, strip, tile.bm * scale, "f-panel rule")
    drawing.rect(left, 30, tile.bn * scale, strip, "f-panel rule")
    drawing.text(left - strip - 12, top + 11, "A", "muted", "end")
    drawing.text(left - 8, 30 + max(9, strip / 2 + 4), "B", "muted", "end")
    drawing.rect(left, top, tile.bn * scale, tile.bm * scale, "f-panel rule")
    rows = np.asarray(found.thread.any(axis=1)).reshape(-1, 1)
    columns = np.asarray(found.thread.any(axis=0)).reshape(1, -1)
    for first, _, count, _ in rectangles(rows):
        drawing.rect(left - strip - 6, top + first * scale, strip, max(0.8, count * scale), "f-orange")
    for _, first, _, count in rectangles(columns):
        drawing.rect(left + first * scale, 30, max(0.8, count * scale), strip, "f-orange")
    for y, x, height, width in rectangles(found.warp):
        drawing.rect(left + x * scale, top + y * scale, width * scale, height * scale, "f-sky", "warp 0")
    for y, x, height, width in rectangles(found.thread):
        tip = f"thread 0: rows {y} to {y + height - 1}, columns {x} to {x + width - 1}"
        size = max(1.2, width * scale), max(1.2, height * scale)
        drawing.rect(left + x * scale, top + y * scale, *size, "f-orange", tip)
    drawing.text(left, top + tile.bm * scale + 18, _feeds(tile), "muted")
    others = f"; so do {numbers(guests)}" if guests else ""
    return Panel(drawing, f"{rung.idea}{_also(group, others)}")


def _feeds(tile: Tile) -> str:
    products = tile.tm * tile.tn
    return f"{tile.tm + tile.tn} values feed {products} multiply-add{'s' if products > 1 else ''} a step"


def _also(group: list[Rung], others: str) -> str:
    if len(group) == 1 and not others:
        return ""
    rest = [rung.number for rung in group[1:]]
    shared = f" Rungs {numbers(rest)} share it this way too" if len(rest) > 1 else ""
    if len(rest) == 1:
        shared = f" Rung {numbers(rest)} shares it this way too"
    if not shared:
        return f" With schedules of their own: rungs {others.removeprefix('; so do ')}."
    return f"{shared}{others}."


def _table() -> Table:
    rows = []
    for rung in load_rungs():
        tile = rung.tile
        names = [v.name for v in VARIANTS.values() if (v.tile.bm, v.tile.bn, v.tile.bk, v.tile.tm, v.tile.tn)
                 == (tile.bm, tile.bn, tile.bk, tile.tm, tile.tn)]  # fmt: skip
        values = tile.tm + tile.tn
        rows.append(
            (
                rung.title,
                f"{tile.bm} x {tile.bn} x {tile.bk}",
                f"{tile.wm} x {tile.wn}",
                f"{tile.tm} x {tile.tn}",
                str(rung.threads),
                f"{tile.tm * tile.tn / values:.2f}",
                f"{tile.bm * tile.bn / (tile.bm + tile.bn):.1f}",
                ", ".join(names),
            )
        )
    head = (
        "rung", "block x slice", "warp", "thread", "threads", "multiply-adds per value read",
        "per value copied", "planner's name",
    )  # fmt: skip
    return Table("Tiles of all rungs, in elements", head, tuple(rows), words=4, folded=True)
