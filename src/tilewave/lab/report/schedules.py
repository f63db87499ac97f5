"""Which SM works on which tile when: data-parallel, split-K and three kinds of stream-K."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewave.device import DeviceSpec
from tilewave.lab.launches import launch_of
from tilewave.lab.records import Ladder
from tilewave.lab.registry import Rung, get_rung
from tilewave.lab.report.parts import Panel, Part, Table
from tilewave.lab.report.svg import WIDTH, Drawing, round_ticks
from tilewave.planner import DATA_PARALLEL, Decomposition, WorkItem, decompose

RUNGS = ("large_patch", "split_k", "stream_k_walk", "stream_k_pieces", "stream_k")
#: The article draws its schedules on six SMs in place of 48: a product of nine of its tiles shows the same.
SKETCH_SMS, SKETCH_SHAPE = 6, (384, 768, 1024)

_LEFT, _HEIGHT, _LEGIBLE = 40.0, 250.0, 12.0
_FILLS = ("f-orange", "f-green", "f-purple", "f-yellow")


@dataclass(frozen=True)
class Stint:
    """An SM at work on one item from ``begin`` to ``end``, in multiply-adds that it has made before."""

    sm: int
    begin: int
    end: int
    item: WorkItem


@dataclass(frozen=True)
class Assignment:
    """All SMs' work under one schedule, in multiply-adds, padding included."""

    rung: Rung
    what: str
    tile: tuple[int, int, int]
    cut: Decomposition
    sms: int
    stints: tuple[Stint, ...]

    @property
    def longest(self) -> int:
        """Multiply-adds of the busiest SM."""
        return max(stint.end for stint in self.stints)

    @property
    def busy(self) -> float:
        """The share of all SMs' time that is work, padding included."""
        return sum(stint.end - stint.begin for stint in self.stints) / (self.sms * self.longest)


def assign(rung: Rung, m: int, n: int, k: int, spec: DeviceSpec) -> Assignment:
    """Deal the work as the planner's estimate does: block b to SM b mod the number of SMs, in turn.

    Blocks that are resident together share an SM, so their sum counts; a slice costs the same everywhere.
    """
    planned = launch_of(rung, m, n, k, spec)
    tile = rung.tile
    if planned.cut is None:
        cut = decompose(planned.blocks, k, tile.bk, DATA_PARALLEL, spec.sms)
        what = str(DATA_PARALLEL)
    else:
        cut = planned.cut
        what = _words(rung, cut)
    clock = [0] * spec.sms
    stints = []
    for block, item in cut.all_items():
        sm = block % spec.sms
        slices = max(1, -(-(item.k_end - item.k_begin) // tile.bk))
        work = slices * tile.bm * tile.bn * tile.bk
        stints.append(Stint(sm, clock[sm], clock[sm] + work, item))
        clock[sm] += work
    return Assignment(rung, what, (tile.bm, tile.bn, tile.bk), cut, spec.sms, tuple(stints))


def _words(rung: Rung, cut: Decomposition) -> str:
    kinds = {
        "split_k": f"split-K {cut.pieces} ways",
        "stream_k_walk": "stream-K, first try: a long walk",
        "stream_k_sixteen": f"stream-K, second try: {cut.pieces} pieces",
        "stream_k": f"stream-K as kept: {cut.pieces} pieces",
    }
    assert rung.schedule is not None
    return kinds[rung.schedule.kind]


def schedules(spec: DeviceSpec, sizes: Sequence[int], ladder: Ladder | None = None) -> Part:
    """The part about dealing tiles to SMs: a sketch on six SMs, then the device at each size."""
    part = Part(
        "schedules",
        "Which SM does which tile, and when",
        "Rows are SMs, time flows to the right, in multiply-adds at an even pace. Blue bars are whole tiles; "
        "other colours are pieces of tiles that several SMs share along K: in the sketch a colour is a tile, "
        "on many SMs it is the piece, first to last. Whatever the bars leave empty is idle. The dashed line "
        "is where all would end if the useful work were dealt evenly: padding at the edges and idle SMs lie "
        "between it and the end of the longest row. What this picture does not have: combining the sums of "
        "pieces, and reuse lost in the cache.",
    )

    six = replace(spec, name="six SMs", sms=SKETCH_SMS)
    m, n, k = SKETCH_SHAPE
    group = f"A sketch: {m} × {n} × {k} on {SKETCH_SMS} SMs"
    for name in RUNGS:
        found = assign(get_rung(name), m, n, k, six)
        part.panels.append(_panel(found, (m, n, k), "sketch", None, group))
    for size in sizes:
        rows = []
        group = f"N = {size} on the {spec.sms} SMs of {spec.name}"
        for name in RUNGS:
            rung = get_rung(name)
            found = assign(rung, size, size, size, spec)
            row = ladder.find(rung.number, size) if ladder else None
            rate = row.speed.tflops if row and row.speed else None
            part.panels.append(_panel(found, (size, size, size), str(size), rate, group))
            rows.append(_row(found, size, rate))
        head = ["rung", "schedule", "tile", "blocks", "SMs busy", "busiest SM, million multiply-adds"]
        if ladder and any(row.speed for row in ladder.rows if row.size == size):
            head.append("TFLOP/s")
        part.tables.append(
            Table(
                f"Schedules at N = {size} on the {spec.sms} SMs of {spec.name}",
                tuple(head),
                tuple(row[: len(head)] for row in rows),
                words=3,
            )
        )
    return part


def _row(found: Assignment, size: int, rate: float | None) -> tuple[str, ...]:
    return (
        found.rung.title,
        found.what,
        " x ".join(map(str, found.tile)),
        str(found.cut.blocks),
        f"{found.busy:.0%}",
        f"{found.longest / 1e6:.1f}",
        "" if rate is None else f"{rate:.1f}",
    )


def _panel(
    found: Assignment, shape: tuple[int, int, int], name: str, rate: float | None, group: str
) -> Panel:
    m, n, k = shape
    sms = found.sms
    step = min(20.0, _HEIGHT / sms)
    top = 38.0
    bottom = top + step * sms
    even = m * n * k / sms
    most = found.longest
    size = f"N = {m}" if m == n == k else f"{m} × {n} × {k}"
    pieces = f", {found.cut.cut_tiles} of {found.cut.tiles} tiles shared" if found.cut.slots else ""
    drawing = Drawing(
        f"schedule-{name}-{found.rung.number:02d}",
        f"{found.what}: SMs over time, {size} on {sms} SMs",
        f"{found.cut.tiles} tiles of {found.tile[0]} x {found.tile[1]} in {found.cut.blocks} blocks on "
        f"{sms} SMs{pieces}; SMs are busy {found.busy:.0%} of the time.",
        bottom + 34,
    )
    drawing.text(0, 14, found.what, "bold")
    drawing.text(0, 30, f"rung {found.rung.number:02d}, {size}, {sms} SMs", "muted")
    drawing.text(WIDTH, 30, f"busy {found.busy:.0%}", "muted", "end")
    scale = (WIDTH - _LEFT - 6) / most
    drawing.rect(_LEFT, top, most * scale, bottom - top, "f-panel")
    gap = 0.15 * step if step < 6 else 1.0
    for stint in found.stints:
        item = stint.item
        shared = item.pieces > 1
        # Many thin rows in as many colours as tiles would blur: there, a colour is a piece.
        colour = item.tile - found.cut.whole_tiles if step >= _LEGIBLE else item.piece
        fill = _FILLS[colour % len(_FILLS)] if shared else "f-sky"
        part = f", piece {item.piece + 1} of {item.pieces}" if shared else ""
        drawing.rect(
            _LEFT + stint.begin * scale + 0.4,
            top + step * stint.sm + gap / 2,
            max(0.6, (stint.end - stint.begin) * scale - 0.8),
            step - gap,
            fill,
            f"SM {stint.sm}: tile {item.tile}{part}, k {item.k_begin} to {item.k_end}",
        )
        if step >= _LEGIBLE and (stint.end - stint.begin) * scale > 7 * len(str(item.tile)) + 2:
            x = _LEFT + (stint.begin + stint.end) / 2 * scale
            style = "on" if shared else "onpale"
            drawing.text(x, top + step * stint.sm + step / 2 + 4, str(item.tile), style, "middle")
    for sm in range(0, sms, 1 if step >= _LEGIBLE else max(1, -(-sms // 6) // 4 * 4 or 4)):
        drawing.text(_LEFT - 5, top + step * sm + min(step, 11) / 2 + 4, str(sm), "muted", "end")
    drawing.text(0, top + 8, "SM", "muted")
    for tick in round_ticks(most / 1e6, 5):
        x = _LEFT + tick * 1e6 * scale
        drawing.line(x, bottom, x, bottom + 4, "axis")
        if x < WIDTH - 30:
            drawing.text(x, bottom + 16, f"{tick:g}", "muted", "middle")
    drawing.text(WIDTH, bottom + 28, "million multiply-adds of an SM", "muted", "end")
    x = _LEFT + even * scale
    drawing.path([(x, top - 4), (x, bottom)], "s-hot dash")
    measured = "" if rate is None else f" Measured: {rate:.1f} TFLOP/s."
    end = f" The busiest SM makes {most / even:.2f} times an even share."
    return Panel(
        drawing,
        f"{found.what[0].upper()}{found.what[1:]}: busy {found.busy:.0%}.{end}{measured}",
        group=group,
    )
