"""Banks and passes of shared-memory accesses before and after a change, from the lanes' real addresses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewave.device import DeviceSpec
from tilewave.emulator.banks import BankMap, BankWord, bank_map
from tilewave.emulator.passes import BANKS
from tilewave.lab.registry import Rung, get_rung
from tilewave.lab.report.follow import Followed, follow
from tilewave.lab.report.parts import Panel, Part, Table
from tilewave.lab.report.svg import CHARACTER, WIDTH, Drawing

#: Steps that change how shared memory is accessed: the rung, whether reads or writes are meant, what it does.
STEPS = (
    ("split_groups", "load", "the split of rows and columns"),
    ("shallow_slice", "store", "the shallower slice"),
)
_LEFT, _ROW, _GAP = 50.0, 20.0, 20.0
_COLUMN = (WIDTH - _LEFT) / BANKS


@dataclass(frozen=True)
class Request:
    """One access of warp 0 that the hardware makes: its place on the banks, and which matrix it touches."""

    rung: Rung
    matrix: str
    map: BankMap

    @property
    def what(self) -> str:
        """For a caption."""
        verb = "read" if self.map.kind == "load" else "write"
        return f"{verb} of {self.matrix}, {self.map.width} bytes a lane"

    @property
    def pattern(self) -> tuple[object, ...]:
        """Equal for accesses whose addresses differ by whole rows of banks at most."""
        first = next(address for address in self.map.addresses if address is not None)
        base = first - first % (4 * BANKS)
        moved = tuple(None if address is None else address - base for address in self.map.addresses)
        return (self.matrix, self.map.width, moved)


def requests(found: Followed, kind: str) -> list[Request]:
    """The different shared accesses of ``kind``; two that differ by a multiple of 4 bytes are the same.

    As the hardware makes them: widened as ptxas does. They come in the order of the program.
    """
    stores = kind == "store"
    patterns = {}
    for step in found.steps:
        if step.space != "shared" or step.access is None or step.access.store != stores:
            continue
        width = step.access.counted_width
        if not width:
            continue
        assert step.addresses is not None
        assert step.active is not None
        addresses = step.addresses + step.access.counted_offset
        first = addresses[np.argmax(step.active)]
        matrix = _matrix(found.rung, int(first))
        key = (matrix, width, (addresses - first)[step.active].tobytes(), step.active.tobytes())
        if key not in patterns and step.active.any():
            patterns[key] = Request(found.rung, matrix, bank_map(addresses, step.active, width, kind))  # type: ignore[arg-type]
    return list(patterns.values())


def _matrix(rung: Rung, address: int) -> str:
    """The operand at a byte of shared memory: the rungs of `STEPS` lay their slice of A first, then B's."""
    return "A" if address < 4 * rung.tile.bm * rung.tile.bk else "B"


def _worst(found: list[Request], matrix: str) -> int:
    return max((request.map.conflicts for request in found if request.matrix == matrix), default=0)


def banks(spec: DeviceSpec) -> Part:
    """The part about banks."""
    part = Part(
        "banks",
        "Bank maps: who meets whom in shared memory",
        "Shared memory has 32 banks; in one pass each gives one 4-byte word. Columns are banks, rows are "
        "passes, and each cell is a word with the lanes that want it. Where lanes of one group want "
        "different words of the same bank, the words are coloured: they wait for one another. Hover over a "
        "cell, or focus a map and walk with the arrow keys, to learn lane, address, bank and pass. The "
        "addresses are those of warp 0, as the kernel computed them in the emulator.",
    )
    for name, kind, change in STEPS:
        after = get_rung(name)
        assert after.builds_on is not None
        before = get_rung(after.builds_on)
        old, new = (requests(follow(rung, spec, slices=1), kind) for rung in (before, after))
        unchanged = {request.pattern for request in old} & {request.pattern for request in new}
        told = [request for request in old + new if request.pattern not in unchanged]
        for matrix in sorted({r.matrix for r in told}, key=lambda m: -_worst(old, m)):
            verb = "read" if kind == "load" else "write"
            group = f"A {verb} of {matrix}, before and after {change}"
            for when, found in (("before", old), ("after", new)):
                mine = [request for request in found if request.matrix == matrix and request in told]
                part.panels += [_panel(request, when, place, group) for place, request in enumerate(mine)]
    return part


def _panel(request: Request, when: str, place: int, group: str) -> Panel:
    access = request.map
    groups = len(access.groups)
    top = 44.0
    height = top + access.passes * _ROW + groups * _GAP + 4
    name = f"banks-{request.rung.number:02d}-{access.kind}-{request.matrix.lower()}" + (
        f"-{place}" if place else ""
    )
    drawing = Drawing(
        name,
        f"Banks and passes of a {request.what}, rung {request.rung.title}",
        f"{access.passes} passes for {groups} groups of lanes, {access.conflicts} of them conflicts.",
        height,
        explorable=True,
    )
    drawing.text(0, 14, f"{when}: {request.rung.number:02d}, {request.what}", "bold")
    drawing.text(0, 34, "bank", "muted")
    for bank in range(0, BANKS, 4):
        drawing.text(_LEFT + (bank + 0.5) * _COLUMN, 34, str(bank), "muted", "middle")
    y = top
    for index, lanes in enumerate(access.groups):
        words = [word for word in access.words if word.group == index]
        drawing.text(_LEFT, y + 11, f"lanes {_spans(lanes)} together", "small muted")
        y += _GAP - 4
        turns = 1 + max(word.turn for word in words)
        for turn in range(turns):
            here = [word for word in words if word.turn == turn]
            drawing.text(_LEFT - 5, y + 14, f"pass {here[0].number + 1}", anchor="end")
            drawing.rect(_LEFT, y + 1, BANKS * _COLUMN, _ROW - 2, "f-panel")
            _row(drawing, access, here, y)
            y += _ROW
        y += 4
    verdict = "no conflict" if access.conflicts == 0 else f"{access.conflicts} of them conflicts"
    table = Table(
        f"Lanes of the {request.what}, rung {request.rung.title}",
        ("lane", "byte address", "banks", "passes"),
        tuple(_lane_row(access, lane) for lane in range(len(access.addresses))),
        folded=True,
    )
    return Panel(drawing, f"Rung {request.rung.title}: {access.passes} passes, {verdict}.", table, group)


def _row(drawing: Drawing, access: BankMap, words: list[BankWord], y: float) -> None:
    """The words of one pass, and the lanes' numbers where neighbouring words are wanted by the same ones."""
    words = sorted(words, key=lambda word: word.bank)
    for word in words:
        crowded = access.in_conflict(word)
        fills = ("f-hot", "f-ember") if crowded else ("f-sky", "f-mist")  # in turn, to tell lanes apart
        style = f"{fills[word.lanes[0] % 2]} cell"
        drawing.rect(
            _LEFT + word.bank * _COLUMN + 0.4,
            y + 1,
            _COLUMN - 0.8,
            _ROW - 2,
            style,
            _tell(access, word),
            role="img",
            tabindex="-1" if any("cell" in mark.get("class", "") for mark in drawing.marks) else "0",
            **{"data-row": str(word.number), "data-column": str(word.bank)},
        )
    for first, last in _runs(words):
        crowded = access.in_conflict(first)
        x = _LEFT + (first.bank + last.bank + 1) / 2 * _COLUMN
        label = _spans(first.lanes)
        if CHARACTER * len(label) <= (last.bank - first.bank + 1) * _COLUMN - 2 and last is not first:
            drawing.text(x, y + 14, label, "label on" if crowded else "label onpale", "middle")


def _runs(words: list[BankWord]) -> list[tuple[BankWord, BankWord]]:
    """First and last of neighbouring words that the same lanes want."""
    runs: list[tuple[BankWord, BankWord]] = []
    for word in words:
        if runs and runs[-1][1].bank + 1 == word.bank and runs[-1][1].lanes == word.lanes:
            runs[-1] = (runs[-1][0], word)
        else:
            runs.append((word, word))
    return runs


def _tell(access: BankMap, word: BankWord) -> str:
    lanes = f"lane {word.lanes[0]}" if len(word.lanes) == 1 else f"lanes {_spans(word.lanes)}"
    rivals = sum((w.group, w.bank) == (word.group, word.bank) for w in access.words) - 1
    conflict = f", conflict with {rivals} other word{'s' if rivals > 1 else ''}" if rivals else ""
    return (
        f"{lanes}: byte {word.address}, bank {word.bank}, pass {word.number + 1} of {access.passes}{conflict}"
    )


def _lane_row(access: BankMap, lane: int) -> tuple[str, ...]:
    address = access.addresses[lane]
    mine = [word for word in access.words if lane in word.lanes]
    if address is None:
        return (str(lane), "off", "", "")
    passes = sorted({word.number + 1 for word in mine})
    return (str(lane), str(address), _spans([word.bank for word in mine]), ", ".join(map(str, passes)))


def _spans(values: tuple[int, ...] | list[int]) -> str:
    """0, 1, 2, 3, 8 as "0-3, 8"."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
