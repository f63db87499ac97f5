"""Predictions beside what was counted and measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewave.device import DeviceSpec
from tilewave.lab.launches import launch_of
from tilewave.lab.profile.records import EMULATOR, FIGURES, HARDWARE, Profile
from tilewave.lab.profile.table import COUNTED_ALIKE, columns_of, main_kernel, rows_of, stalls_of
from tilewave.lab.records import Ladder
from tilewave.lab.registry import Rung, get_rung
from tilewave.lab.report.parts import Panel, Part, Table
from tilewave.lab.report.svg import CHARACTER, WIDTH, Drawing
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

_VERDICTS = {True: "holds", False: "differs", None: "not judged"}
_WIDEST_LABEL, _RIGHT = 225.0, WIDTH - 18.0


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
        part.tables += _profile_tables(profile)
        part.remarks += [*_library_words(profile), *profile.notes]
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
    for figure in COUNTED_ALIKE:
        marks = []
        for kernel in profile.kernels:
            emulated, read = (
                kernel.readings[column].figures.get(figure) if column in kernel.readings else None
                for column in (EMULATOR, HARDWARE)
            )
            if emulated is None or read is None:
                continue
            if emulated and read:
                tip = f"{kernel.title}: emulator {emulated:,.0f}, hardware {read:,.0f}"
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
        f"{exact} of {total} counts agree within 0.1 %. A dot is a rung.",
    )


def _profile_tables(profile: Profile) -> list[Table]:
    """Prediction, emulator, hardware and library in columns, a table for each kernel."""
    tables = []
    for kernel in profile.kernels:
        columns = columns_of(profile, kernel)
        rows = [*rows_of(columns), *stalls_of(columns)]
        tables.append(
            Table(
                f"Profile of {kernel.title}, N = {profile.size} on {profile.device} ({profile.how})",
                ("what", *columns),
                tuple((name, *cells) for name, cells in rows),
                folded=True,
            )
        )
    return tables


def _library_words(profile: Profile) -> list[str]:
    """The kernel that the library chose, and its outputs per thread."""
    main = main_kernel(profile)
    if main is None:
        return []
    words = f"{profile.library_name or 'The library'} ran {main.kernel}"
    if main.outputs_per_thread is not None:
        words += f": {main.outputs_per_thread:g} outputs per thread"
        words += f" ({main.derivation})" if main.derivation else ""
    return [words + "."]


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
    """Dots on a scale of ratios with 1 in the middle, a row for each label."""
    top, step = 46.0, 20.0
    scale, ticks = _ratio_scale([mark.ratio for _, marks in strips for mark in marks])
    bottom = top + step * len(strips)

    left = min(_WIDEST_LABEL, 10 + CHARACTER * max(len(label) for label, _ in strips))

    def x(ratio: float) -> float:
        return (left + _RIGHT + (_RIGHT - left) * scale(ratio)) / 2

    ranges = "; ".join(
        f"{label} {min(m.ratio for m in marks):.2f} to {max(m.ratio for m in marks):.2f}"
        for label, marks in strips
    )
    drawing = Drawing(name, title, f"Ratios: {ranges}.", bottom + 24)
    head, _, tail = title.partition(", ") if ", " in title else title.partition(" on ")
    drawing.text(0, 14, head, "bold")
    drawing.text(0, 30, tail, "muted")
    for ratio, label in ticks:
        drawing.line(x(ratio), top - 2, x(ratio), bottom, "axis" if ratio == 1 else "rule")
        drawing.text(x(ratio), bottom + 15, label, "muted", "middle")
    for place, (label, marks) in enumerate(strips):
        y = top + step * (place + 0.5)
        drawing.text(left - 8, y + 4, label, anchor="end")
        for mark in marks:
            drawing.dot(x(mark.ratio), y, 3.5, "f-blue s-paper", mark.tip)
    return drawing


def _ratio_scale(ratios: Sequence[float]) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    """A function from ratios to -1 ... 1, 0 for a ratio of 1, and ticks with their labels.

    Near 1 the scale is even and tells percents; farther away it is logarithmic.
    """
    farthest = max(abs(ratio - 1) for ratio in ratios)
    span = next((span for span in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if farthest <= span), None)
    if span is not None:
        near: float = span
        ends = [(1 - near, f"-{100 * near:g} %"), (1.0, "equal"), (1 + near, f"+{100 * near:g} %")]
        return lambda ratio: (ratio - 1) / near, ends
    powers = max(1, math.ceil(max(abs(math.log2(ratio)) for ratio in ratios)))
    step = -(-powers // 2)
    exponents = range(-(powers // step) * step, powers + 1, step)
    labels = [(2.0**e, "equal" if e == 0 else f"× {2**e}" if e > 0 else f"÷ {2**-e}") for e in exponents]
    return lambda ratio: math.log2(ratio) / powers, labels
