"""Clocks, power, temperature and throughput over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewave.lab.power.records import CUBLAS, FFMA, OURS, PowerRun, Repeat, Sample
from tilewave.lab.records import Ladder
from tilewave.lab.report.parts import Panel, Part, Table
from tilewave.lab.report.svg import WIDTH, Drawing, round_ticks

_LEFT, _RIGHT, _TOP, _PLOT = 40.0, WIDTH - 10.0, 40.0, 120.0
_BANDS = {OURS: "f-sky", CUBLAS: "f-yellow", FFMA: "f-green"}


def power(run: PowerRun | None, ladder: Ladder) -> Part:
    """The part about clocks and power: a sustained run, and the state around each size of the ladder."""
    part = Part(
        "power",
        "Clocks and power over time",
        "A GPU lowers its clock when it draws too much power, and how much it draws depends on the data: the "
        "same kernel on zeros changes fewer bits. A small lead means little before this is known.",
    )
    if run is None:
        part.missing.append(
            "No sustained run: give a file of `tilewave power --json FILE` with --power to see clock, power "
            "and throughput over a minute."
        )
    else:
        part.panels += _run_panels(run)
        part.tables.append(_summary_table(run))
        part.remarks += [verdict.words for verdict in run.verdicts] + list(run.notes)
    states = _states(ladder)
    if states:
        part.tables.append(
            Table(
                f"{ladder.device} before and after each size of the ladder",
                ("N", "SM clock, MHz", "power, W", "temperature, °C", "throttling"),
                tuple(states),
                folded=run is not None,
            )
        )
    return part


def _states(ladder: Ladder) -> list[tuple[str, ...]]:
    rows = []
    for session in ladder.sessions:
        for state in session.get("states", ()):
            before, after = state.get("before") or {}, state.get("after") or {}
            pairs = [
                f"{_figure(before.get(key))} → {_figure(after.get(key))}"
                for key in ("sm_clock_mhz", "power_w", "temperature_c")
            ]
            reasons = sorted({*before.get("throttling", ()), *after.get("throttling", ())})
            rows.append((str(state["size"]), *pairs, ", ".join(reasons) or "none"))
    return rows


def _figure(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}"


def _run_panels(run: PowerRun) -> list[Panel]:
    panels = []
    lines: list[tuple[str, str, str, Callable[[Sample], float | None], float | None]] = [
        ("power", "Power", "W", lambda sample: sample.power_w, run.power_limit_w),
        ("clock", "SM clock", "MHz", lambda sample: sample.sm_clock_mhz, None),
        ("temperature", "Temperature", "°C", lambda sample: sample.temperature_c, None),
    ]
    for name, title, unit, read, limit in lines:
        values = [(sample.seconds, value) for sample in run.samples if (value := read(sample)) is not None]
        if values:
            panels.append(_series(run, name, title, unit, values, limit))
    if run.repeats:
        panels.append(_rates(run))
    return panels


def _frame(
    run: PowerRun, name: str, title: str, unit: str, low: float, high: float, about: str
) -> tuple[Drawing, Callable[[float], float], Callable[[float], float]]:
    """Axes with a band for each repeat; and the functions from seconds and values to places."""
    bottom = _TOP + _PLOT
    last = max([run.seconds, *(sample.seconds for sample in run.samples), *(r.end_s for r in run.repeats)])
    drawing = Drawing(
        f"power-{name}", f"{title} over time on {run.device}, N = {run.size}", about, bottom + 50
    )

    def x(seconds: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * seconds / last

    def y(value: float) -> float:
        return bottom - _PLOT * (value - low) / ((high - low) or 1.0)

    drawing.text(0, 14, f"{title}, {unit}", "bold")
    drawing.text(WIDTH, 14, f"N = {run.size}", "muted", "end")
    for repeat in run.repeats:
        drawing.rect(
            x(repeat.start_s), _TOP, max(0.5, x(repeat.end_s) - x(repeat.start_s)), _PLOT,
            f"band {_BANDS.get(repeat.contender, 'f-rule')}" + (" zeros" if repeat.data == "zeros" else ""),
            _repeat_tip(run, repeat),
        )  # fmt: skip
    for tick in round_ticks(last, 6):
        drawing.line(x(tick), bottom, x(tick), bottom + 4, "axis")
        drawing.text(x(tick), bottom + 16, f"{tick:g}", "muted", "middle")
    drawing.text(WIDTH, bottom + 30, "seconds", "muted", "end")
    place = _LEFT
    for contender, band in _BANDS.items():
        if any(repeat.contender == contender for repeat in run.repeats):
            label = {OURS: "ours", CUBLAS: "cuBLAS", FFMA: "FFMA only"}[contender]
            drawing.rect(place, bottom + 36, 12, 10, f"band {band}")
            drawing.text(place + 16, bottom + 45, label)
            place += 30 + 6.5 * len(label)
    if any(repeat.data == "zeros" for repeat in run.repeats):
        drawing.text(place, bottom + 45, "paler: zeros", "muted")
    return drawing, x, y


def _repeat_tip(run: PowerRun, repeat: Repeat) -> str:
    name = run.names.get(repeat.contender, repeat.contender)
    return f"{name}, {repeat.data}, round {repeat.round}: {repeat.tflops:.2f} TFLOP/s"


def _series(
    run: PowerRun,
    name: str,
    title: str,
    unit: str,
    values: Sequence[tuple[float, float]],
    limit: float | None,
) -> Panel:
    lows, highs = min(v for _, v in values), max([*(v for _, v in values), *([limit] if limit else [])])
    low, high = _nice(lows, highs)
    top = max(value for _, value in values)
    course = (
        f"stays at {top:,.0f}" if f"{lows:,.0f}" == f"{top:,.0f}" else f"goes from {lows:,.0f} to {top:,.0f}"
    )
    about = f"{title} {course} {unit}." + (f" The limit is {limit:,.0f} {unit}." if limit else "")
    drawing, x, y = _frame(run, name, title, unit, low, high, about)
    _rulers(drawing, y, low, high)
    if limit:
        drawing.path([(_LEFT, y(limit)), (_RIGHT, y(limit))], "s-hot dash")
        drawing.text(_LEFT + 3, y(limit) - 4, f"limit {limit:,.0f}", "muted")
    drawing.path([(x(seconds), y(value)) for seconds, value in values], "s-ink")
    return Panel(drawing, about)


def _rates(run: PowerRun) -> Panel:
    rates = [repeat.tflops for repeat in run.repeats]
    low, high = _nice(min(rates), max(rates))
    said = "; ".join(
        f"{run.names.get(s.contender, s.contender)} on {s.data} {s.tflops:.1f} (spread {s.spread:.1%})"
        for s in run.summaries
    )
    drawing, x, y = _frame(run, "rate", "Throughput", "TFLOP/s", low, high, f"Median TFLOP/s: {said}.")
    _rulers(drawing, y, low, high)
    for repeat in run.repeats:
        drawing.path(
            [(x(repeat.start_s), y(repeat.tflops)), (x(repeat.end_s), y(repeat.tflops))], "s-ink thick"
        )
    return Panel(drawing, "Median throughput of each stretch, contenders in turn.")


def _rulers(drawing: Drawing, y: Callable[[float], float], low: float, high: float) -> None:
    for tick in round_ticks(high - low, 4):
        drawing.line(_LEFT, y(low + tick), _RIGHT, y(low + tick), "rule")
        drawing.text(_LEFT - 4, y(low + tick) + 4, f"{low + tick:,.0f}", "muted", "end")


def _nice(low: float, high: float) -> tuple[float, float]:
    """Round bounds around a range that keep some air above and below."""
    if high - low < 0.02 * abs(high):  # hardly any change should not look like one
        low, high = low - 0.01 * abs(high), high + 0.01 * abs(high)
    step = max(round_ticks(max(high - low, 1e-9), 4)[1:2] or [1.0])
    air = 0.05 * (high - low)
    return (low - air) // step * step, ((high + air) // step + 1) * step


def _summary_table(run: PowerRun) -> Table:
    def optional(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return Table(
        f"Sustained run of {run.seconds:.0f} s at N = {run.size} on {run.device}: medians over repeats",
        (
            "contender",
            "data",
            "repeats",
            "TFLOP/s",
            "spread",
            "power, W",
            "J a call",
            "clock, MHz",
            "°C",
            "throttled",
        ),
        tuple(
            (
                run.names.get(s.contender, s.contender),
                s.data,
                str(s.repeats),
                f"{s.tflops:.2f}",
                f"{s.spread:.2%}",
                optional(s.median_w, ".0f"),
                optional(s.joules_per_call, ".3g"),
                optional(s.sm_clock_mhz, ".0f"),
                optional(s.temperature_c, ".0f"),
                ", ".join(f"{reason} {share:.0%}" for reason, share in s.throttled.items()) or "no",
            )
            for s in run.summaries
        ),
        words=2,
    )
