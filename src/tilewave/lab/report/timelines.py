"""How loads, copies and multiplication follow one another: buffers over time, from a warp's trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tilewave.device import DeviceSpec
from tilewave.emulator.ptx import Immediate
from tilewave.emulator.trace import Traced
from tilewave.lab.registry import Rung, get_rung
from tilewave.lab.report.follow import Followed, follow
from tilewave.lab.report.parts import Panel, Part, Table
from tilewave.lab.report.svg import WIDTH, Drawing

RUNGS = ("shallow_slice", "double_buffer", "async_copies", "four_stages")
SLICES = 6
"""Slices of the product that is followed: enough to see the pattern begin, repeat and end."""

_FILLS = ("f-sky", "f-yellow", "f-green", "f-purple")
_INKS = ("onpale bold", "on bold", "on bold", "on bold")
_LABEL = 74.0


@dataclass
class Span:
    """From one instruction of the warp to another (counted from 0), for one slice of K."""

    slice: int
    begin: int
    end: int


@dataclass
class Timeline:
    """What happened to each slice.

    ``travelling``: asked for, not yet there; ``ready``: from there to its last read, by buffer;
    ``multiplied``: from its first read to its last multiply-add; ``barriers``: instructions.
    """

    length: int
    travelling: list[Span] = field(default_factory=list)
    ready: dict[int, list[Span]] = field(default_factory=dict)
    multiplied: list[Span] = field(default_factory=list)
    barriers: list[int] = field(default_factory=list)

    @property
    def overlap(self) -> float:
        """How much of the multiplication runs while a later slice is travelling, but for the last slice."""
        busy = both = 0
        last = max((span.slice for span in self.multiplied), default=0)
        for span in self.multiplied:
            if span.slice == last:
                continue
            moments = np.zeros(span.end - span.begin, dtype=np.bool_)
            for other in self.travelling:
                if other.slice > span.slice:
                    moments[max(0, other.begin - span.begin) : max(0, other.end - span.begin)] = True
            busy += len(moments)
            both += int(moments.sum())
        return both / busy if busy else 0.0


def timeline(found: Followed) -> Timeline:
    """Read a trace.

    Loads tell their slice by their address. A group of copies is one slice, in order; it is there when a wait
    says so. Stores bring the oldest slice that was loaded, and a buffer's reads belong to the slice that it
    holds.
    """
    reader = _Reader(found)
    for moment, step in enumerate(found.steps):
        reader.read(moment, step)
    return reader.finish(len(found.steps))


class _Reader:
    """Goes through a trace once."""

    def __init__(self, found: Followed) -> None:
        self.found = found
        tile = found.rung.tile
        self.buffer_bytes = 4 * tile.bm * tile.bk
        self.stages = _stages(found)
        self.line = Timeline(0)
        self.loaded: dict[int, Span] = {}  # by slice: from its first load on
        self.stored: set[int] = set()  # slices whose stores into shared memory have begun
        self.groups: list[tuple[int, int]] = []  # of copies: first instruction, buffer
        self.open_group: tuple[int, int] | None = None
        self.arrived = 0  # groups that a wait has shown to be there
        self.holds: dict[int, Span] = {}  # by buffer

    def read(self, moment: int, step: Traced) -> None:
        """One instruction."""
        opcode, modifiers = step.instruction.opcode, step.instruction.modifiers
        if opcode == "bar":
            self.line.barriers.append(moment)
        elif opcode == "fma" and self.line.multiplied:
            self.line.multiplied[-1].end = moment + 1
        elif opcode == "cp" and "commit_group" in modifiers:
            # A group without copies counts too: waits count groups.
            self.groups.append(self.open_group or (moment, -1))
            self.open_group = None
        elif opcode == "cp" and modifiers[-1:] in (("wait_group",), ("wait_all",)):
            newest = step.instruction.operands[0] if step.instruction.operands else None
            self._wait(moment, newest.value if isinstance(newest, Immediate) else 0)
        elif step.access is not None and step.active is not None and step.active.any():
            self._access(moment, step)

    def _access(self, moment: int, step: Traced) -> None:
        assert step.addresses is not None
        assert step.active is not None
        assert step.access is not None
        address = int(step.addresses[np.argmax(step.active)])
        if step.space == "copy":
            if self.open_group is None:
                self.open_group = (moment, self._buffer(address))
        elif step.space == "global" and not step.access.store:
            number = self._slice(address)
            if number is not None and number not in self.stored:
                self.loaded.setdefault(number, Span(number, moment, moment + 1))
        elif step.space == "shared" and step.access.store:
            self._store(moment, address)
        elif step.space == "shared":
            self._read_shared(moment, address)

    def _slice(self, address: int) -> int | None:
        """The slice that an element of A or B belongs to."""
        tile, found = self.found.rung.tile, self.found
        if found.a.address <= address < found.a.address + found.a.nbytes:
            return (address - found.a.address) // 4 % found.k // tile.bk
        if found.b.address <= address < found.b.address + found.b.nbytes:
            return (address - found.b.address) // 4 // tile.bn // tile.bk
        return None

    def _buffer(self, address: int) -> int:
        """The buffer at a byte of the shared memory for A, which comes first; that for B counts along."""
        tile = self.found.rung.tile
        if address < self.stages * self.buffer_bytes:
            return address // self.buffer_bytes
        return (address - self.stages * self.buffer_bytes) // (4 * tile.bk * tile.bn)

    def _store(self, moment: int, address: int) -> None:
        waiting = [number for number in self.loaded if number not in self.stored]
        if waiting:
            number = min(waiting)
            self.stored.add(number)
            self.line.travelling.append(Span(number, self.loaded[number].begin, moment))
            self._fill(self._buffer(address), number, moment)

    def _wait(self, moment: int, newest: int) -> None:
        for number in range(self.arrived, max(self.arrived, len(self.groups) - newest)):
            begin, buffer = self.groups[number]
            self.arrived = number + 1
            if buffer >= 0 and number < self.found.slices:
                self.line.travelling.append(Span(number, begin, moment))
                self._fill(buffer, number, moment)

    def _fill(self, buffer: int, number: int, moment: int) -> None:
        span = Span(number, moment, moment)
        self.line.ready.setdefault(buffer, []).append(span)
        self.holds[buffer] = span

    def _read_shared(self, moment: int, address: int) -> None:
        held = self.holds.get(self._buffer(address))
        if held is None:
            return
        held.end = moment + 1
        last = self.line.multiplied[-1] if self.line.multiplied else None
        if last is None or last.slice != held.slice:
            self.line.multiplied.append(Span(held.slice, moment, moment + 1))

    def finish(self, length: int) -> Timeline:
        """The timeline of all instructions."""
        self.line.length = length
        return self.line


def _stages(found: Followed) -> int:
    """Buffers of the rung, by the shared memory that it touches."""
    tile = found.rung.tile
    each = 4 * tile.bk * (tile.bm + tile.bn)
    highest = max(
        (int(step.addresses[step.active].max()) for step in _shared(found) if step.addresses is not None),
        default=0,
    )
    return highest // each + 1


def _shared(found: Followed) -> Iterator[Traced]:
    for step in found.steps:
        if step.space in ("shared", "copy") and step.active is not None and step.active.any():
            yield step


def timelines(spec: DeviceSpec) -> Part:
    """The part about overlap."""
    part = Part(
        "timelines",
        "Double buffering and asynchronous copies",
        "What one warp does with the first six slices of K, instruction by instruction, in the order of the "
        "compiled PTX: time flows to the right, and a number is a slice. A slice travels from its first load "
        "or copy until it lies in shared memory, and dashed lines are barriers. The point of both techniques "
        "is the same: the next slice should travel while the current one is multiplied. How long an "
        "instruction takes is not shown; the assembler may still move some.",
    )
    for name in RUNGS:
        rung = get_rung(name)
        part.panels.append(_panel(rung, timeline(follow(rung, spec, SLICES))))
    if spec.compute_capability < (8, 0):
        part.missing.append(f"{spec.name} has no cp.async: on it rungs 13 and 14 load and store instead.")
    return part


def _panel(rung: Rung, line: Timeline) -> Panel:
    buffers = sorted(line.ready)
    lanes = _lanes(line.travelling)
    rows = [("on the way", spans) for spans in lanes]
    rows += [(f"buffer {buffer}", line.ready[buffer]) for buffer in buffers]
    rows += [("multiplied", line.multiplied)]
    top, step = 26.0, 24.0
    drawing = Drawing(
        f"timeline-{rung.number:02d}",
        f"Slices on the way, in shared memory and multiplied, rung {rung.title}",
        f"{len(buffers)} buffers; {line.overlap:.0%} of the multiplication runs while a later slice is on "
        f"the way; {len(line.barriers)} barriers.",
        top + step * len(rows) + 20,
    )
    drawing.text(0, 14, f"{rung.title}", "bold")
    drawing.text(WIDTH, 14, f"{line.overlap:.0%} overlapped", "muted", "end")
    scale = (WIDTH - _LABEL) / line.length

    def x(moment: float) -> float:
        return _LABEL + scale * moment

    bottom = top + step * len(rows)
    said = ""
    for place in range(len(rows)):
        drawing.rect(_LABEL, top + step * place + 2, WIDTH - _LABEL, step - 4, "f-panel")
    for barrier in line.barriers:
        drawing.path([(x(barrier), top), (x(barrier), bottom)], "s-muted thin dash")
    for place, (label, spans) in enumerate(rows):
        y = top + step * place
        if label != said:
            drawing.text(0, y + 16, label)
            said = label
        for span in spans:
            width = max(2.0, scale * (span.end - span.begin))
            tip = f"slice {span.slice} {_verb(label)}: instructions {span.begin} to {span.end}"
            drawing.rect(x(span.begin), y + 3, width, step - 6, _FILLS[span.slice % 4], tip)
            if width > 12:
                drawing.text(
                    x(span.begin) + width / 2, y + 16, str(span.slice), _INKS[span.slice % 4], "middle"
                )
    drawing.text(_LABEL, bottom + 15, "0", "muted")
    drawing.text(WIDTH, bottom + 15, f"instruction {line.length:,}", "muted", "end")
    table = Table(
        f"Slices of rung {rung.title}, by instruction of the warp",
        ("slice", "on the way", "buffer", "in shared memory until", "multiplied"),
        tuple(_slice_row(line, number) for number in range(SLICES)),
        folded=True,
    )
    return Panel(drawing, rung.idea, table)


def _verb(label: str) -> str:
    return {"on the way": "travels", "multiplied": "is multiplied"}.get(label, f"lies in {label}")


def _lanes(spans: list[Span]) -> list[list[Span]]:
    """Rows of spans that do not overlap."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.begin):
        lane = next((lane for lane in lanes if lane[-1].end <= span.begin), None)
        if lane is None:
            lanes.append([span])
        else:
            lane.append(span)
    return lanes


def _slice_row(line: Timeline, number: int) -> tuple[str, ...]:
    way = next((s for s in line.travelling if s.slice == number), None)
    held = next(((b, s) for b, spans in line.ready.items() for s in spans if s.slice == number), None)
    done = next((s for s in line.multiplied if s.slice == number), None)
    return (
        str(number),
        f"{way.begin} to {way.end}" if way else "",
        str(held[0]) if held else "",
        str(held[1].end) if held else "",
        f"{done.begin} to {done.end}" if done else "",
    )
