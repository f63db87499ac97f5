"""Predictions beside what was counted and measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilewave.device import DeviceSpec
from tilewave.lab.launches import launch_of
from tilewave.lab.profile.records import COLUMNS, EMULATOR, FIGURES, HARDWARE, Profile
from tilewave.lab.records import Ladder
from tilewave.lab.registry import Rung, get_rung
from tilewave.lab.report.parts import Panel, Part, Table
from tilewave.lab.report.svg import WIDTH, Drawing
from tilewave.planner import (
    DATA_PARALLEL,
    DOUBLE_BUFFERED,
    VARIANTS,
    Schedule,
    ScheduleKind,
    Variant,
    decompose,
    estimate,
)

_COMPARED = (
    "thread_fma", "shared_loads", "shared_load_passes", "shared_load_conflicts", "shared_stores",
    "shared_store_passes", "global_loads", "global_load_sectors", "copies", "barriers",
)  # fmt: skip
"""Figures of a profile that emulator and profiler count alike (instructions are PTX here, SASS there)."""

_VERDICTS = {True: "holds", False: "differs", None: "not judged"}
_LEFT, _RIGHT = 150.0, WIDTH - 18.0


@dataclass(frozen=True)
class Mark:
    """A ratio to show, with what hovering tells."""

    ratio: float
    tip: str


def predictions(ladder: Ladder, spec: DeviceSpec, profile: Profile | None) -> Part:
    """The part that holds predictions against what came out."""
    part = Part(
        "predictions",
        "Prediction against hardware",
        "Each rung says beforehand what it should change, the emulator counts it, and a profiler reads the "
        "same counters on the GPU. The planner's estimate of the busiest SM's work becomes a time. Where "
        "they disagree, this says so.",
    )
    if profile is not None and profile.kernels:
        panel = _counter_panel(profile)
        part.panels += [panel] if panel else []
        part.tables.append(_profile_table(profile))
        if not panel:
            part.missing.append(f"The profile has no counters of hardware ({profile.how}).")
    else:
        part.missing.append(
            "No counters of hardware: give a file of `tilewave profile RUNG... --json FILE` with --profile."
        )
    times = _estimates(ladder, spec)
    if times:
        part.panels.append(_time_panel(times, spec))
    part.tables.append(_outcome_table(ladder))
    return part


def _outcome_table(ladder: Ladder) -> Table:
    """What the registry predicts beside what the emulator counted and the compiler said."""
    outcomes = [(row, outcome) for row in ladder.rows for outcome in row.outcomes]
    judged = [outcome for _, outcome in outcomes if outcome.holds is not None]
    kept = sum(bool(outcome.holds) for outcome in judged)
    rows = sorted(
        (
            f"{row.rung:02d} {row.title}",
            outcome.what,
            outcome.why,
            _VERDICTS[outcome.holds],
            str(row.size),
            outcome.predicted,
            outcome.found,
        )
        for row, outcome in outcomes
    )
    return Table(
        f"What the rungs predict and what was counted: {kept} of {len(judged)} hold",
        ("rung", "what", "why", "verdict", "N", "predicted", "found"),
        tuple(rows),
        words=4,
        folded=True,
    )


# -- counters -----------------------------------------------------------------------------------------------


def _counter_panel(profile: Profile) -> Panel | None:
    strips = []
    for figure in _COMPARED:
        marks = []
        for kernel in profile.kernels:
            emulated, read = (
                kernel.readings[column].figures.get(figure) if column in kernel.readings else None
                for column in (EMULATOR, HARDWARE)
            )
            if emulated is None or read is None:
                continue
            if emulated and read:
                tip = f"{kernel.rung:02d} {kernel.title}: emulator {emulated:,.0f}, hardware {read:,.0f}"
                marks.append(Mark(emulated / read, tip))
        if marks:
            strips.append((FIGURES[figure], marks))
    if not strips:
        return None
    drawing = _strips(
        "counters",
        f"Emulator's counters over the hardware's, N = {profile.size} on {profile.device}",
        strips,
    )
    exact = sum(abs(mark.ratio - 1) < 1e-3 for _, marks in strips for mark in marks)
    total = sum(len(marks) for _, marks in strips)
    return Panel(
        drawing,
        f"{exact} of {total} counts agree within 0.1 %. A dot is a rung; at 1 the emulator counted what the "
        f"profiler read.",
    )


def _profile_table(profile: Profile) -> Table:
    """All columns of all kernels."""
    rows = []
    for kernel in profile.kernels:
        for figure, name in FIGURES.items():
            cells = [
                _amount(reading.figures.get(figure)) if (reading := kernel.readings.get(column)) else ""
                for column in COLUMNS[:-1]
            ]
            theirs = profile.library[0].reading.figures.get(figure) if profile.library else None
            if any(cells):
                rows.append((f"{kernel.rung:02d} {kernel.title}", name, *cells, _amount(theirs)))
    library = f"; the library ran {profile.library[0].kernel}" if profile.library else ""
    return Table(
        f"Profile at N = {profile.size} on {profile.device} ({profile.how}){library}",
        ("rung", "what", *COLUMNS),
        tuple(rows),
        words=2,
        folded=True,
    )


def _amount(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value == int(value) and abs(value) >= 10 else f"{value:,.3g}"


# -- the planner's estimate ---------------------------------------------------------------------------------


def _estimates(ladder: Ladder, spec: DeviceSpec) -> list[tuple[Rung, list[tuple[int, float, float]]]]:
    """For each rung that the planner knows: size, estimated and measured microseconds."""
    found: dict[int, list[tuple[int, float, float]]] = {}
    for row in ladder.rows:
        if row.speed is None:
            continue
        microseconds = estimated(get_rung(row.rung), row.size, spec)
        if microseconds is not None:
            found.setdefault(row.rung, []).append((row.size, microseconds, 1000 * row.speed.median_ms))
    return [(get_rung(number), times) for number, times in sorted(found.items())]


def estimated(rung: Rung, size: int, spec: DeviceSpec) -> float | None:
    """Microseconds that the planner expects of a rung at N = M = K = size; None if it knows no such tile."""
    variant = _variant(rung)
    if variant is None or (rung.schedule is not None and rung.schedule.kind == "select"):
        return None
    planned = launch_of(rung, size, size, size, spec)
    schedule = DATA_PARALLEL
    cut = planned.cut or decompose(planned.blocks, size, variant.tile.bk, schedule, spec.sms)
    if rung.schedule is not None and cut.slots:
        kind = ScheduleKind(rung.schedule.kind)
        schedule = Schedule(kind, 1 if cut.walkers else cut.pieces)
    return estimate(variant, schedule, cut, spec).microseconds


def _variant(rung: Rung) -> Variant | None:
    """The planner's variant that the rung's kernel is."""
    mine = (rung.tile.bm, rung.tile.bn, rung.tile.bk, rung.tile.tm, rung.tile.tn)
    for variant in VARIANTS.values():
        tile = variant.tile
        if (tile.bm, tile.bn, tile.bk, tile.tm, tile.tn) == mine:
            # Other rungs have the double-buffered one's tile and copy in another way.
            return variant if variant is not DOUBLE_BUFFERED or rung.name == "double_buffer" else None
    return None


def _time_panel(times: list[tuple[Rung, list[tuple[int, float, float]]]], spec: DeviceSpec) -> Panel:
    strips = [
        (
            rung.title,
            [
                Mark(there / here, f"N = {size}: estimated {here:,.0f} µs, measured {there:,.0f} µs")
                for size, here, there in values
            ],
        )
        for rung, values in times
    ]
    drawing = _strips("estimates", f"Measured time over the planner's estimate on {spec.name}", strips)
    table = Table(
        f"The planner's estimate and the measured time on {spec.name}, microseconds",
        ("rung", "N", "estimated", "measured", "ratio"),
        tuple(
            (rung.title, str(size), f"{here:,.1f}", f"{there:,.1f}", f"{there / here:.2f}")
            for rung, values in times
            for size, here, there in values
        ),
        folded=True,
    )
    return Panel(
        drawing,
        "A dot is a size. The estimate counts the busiest SM's multiply-adds at a rate taken from the "
        "article's GB10; it knows neither memory nor launch, so what matters is that a rung's dots lie "
        "together.",
        table,
    )


def _strips(name: str, title: str, strips: Sequence[tuple[str, list[Mark]]]) -> Drawing:
    """Dots on a logarithmic scale of ratios, a row for each label."""
    top, step = 46.0, 20.0
    widest = max(abs(math.log2(mark.ratio)) for _, marks in strips for mark in marks)
    span = next((s for s in (0.05, 0.2, 0.5, 1.0, 2.0) if widest <= s), math.ceil(widest))
    bottom = top + step * len(strips)
    middle, half = (_LEFT + _RIGHT) / 2, (_RIGHT - _LEFT) / 2
    ranges = "; ".join(
        f"{label} {min(m.ratio for m in marks):.2f} to {max(m.ratio for m in marks):.2f}"
        for label, marks in strips
    )
    drawing = Drawing(name, title, f"Ratios: {ranges}.", bottom + 24)
    head, _, tail = title.partition(", ") if ", " in title else title.partition(" on ")
    drawing.text(0, 14, head, "bold")
    drawing.text(0, 30, tail, "muted")
    for share in (-1.0, -0.5, 0.0, 0.5, 1.0):
        x = middle + half * share
        drawing.line(x, top - 2, x, bottom, "axis" if share == 0 else "rule")
        drawing.text(x, bottom + 15, f"{2 ** (span * share):.3g}", "muted", "middle")
    for place, (label, marks) in enumerate(strips):
        y = top + step * (place + 0.5)
        drawing.text(_LEFT - 8, y + 4, label, anchor="end")
        for mark in marks:
            drawing.dot(middle + half * math.log2(mark.ratio) / span, y, 3.5, "f-blue s-paper", mark.tip)
    return drawing
