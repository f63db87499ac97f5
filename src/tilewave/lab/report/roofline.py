"""The roofline: what a rung asks of memory for each multiply-add, and how fast it runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from tilewave.device import DeviceSpec
from tilewave.emulator.passes import SECTOR_BYTES
from tilewave.lab.records import Counted, Ladder, Row
from tilewave.lab.report.parts import Panel, Part, Table, numbers
from tilewave.lab.report.svg import CHARACTER, WIDTH, Drawing, round_ticks, spread

_LEFT, _RIGHT, _TOP, _PLOT = 36.0, 128.0, 26.0, 330.0


def asked_bytes(counted: Counted) -> int:
    """Bytes that all SMs ask of what lies behind L1, if nothing hits L1: sectors of all kinds."""
    return SECTOR_BYTES * (
        counted.global_load_sectors
        + counted.global_store_sectors
        + counted.copy_sectors
        + counted.local_load_sectors
        + counted.local_store_sectors
    )


@dataclass(frozen=True)
class Point:
    """A rung on the roofline. ``rate`` in TFLOP/s is measured, or what the roof allows without times."""

    row: Row
    intensity: float
    rate: float
    measured: bool


def points(ladder: Ladder, size: int, spec: DeviceSpec) -> list[Point]:
    """All rungs that were counted at a size, and timed if any was; flops of the product alone."""
    rows = [row for row in ladder.rows if row.size == size and row.counted is not None]
    timed = [row for row in rows if row.speed is not None]
    found = []
    for row in timed or rows:
        assert row.counted is not None
        intensity = 2.0 * size**3 / asked_bytes(row.counted)
        rate = roof(spec, intensity) if row.speed is None else row.speed.tflops
        found.append(Point(row, intensity, rate, row.speed is not None))
    return found


def roof(spec: DeviceSpec, intensity: float) -> float:
    """TFLOP/s that memory and arithmetic allow at so many flops a byte."""
    return min(spec.peak_fp32_tflops, intensity * spec.bandwidth_gb_s / 1000)


def roofline(ladder: Ladder, spec: DeviceSpec, size: int, measured_peak: float | None = None) -> Part:
    """The part about the roofline."""
    timed = any(row.speed for row in ladder.rows if row.size == size)
    part = Part(
        "roofline",
        "Roofline",
        "Across: useful flops for each byte that the kernel asks of what lies behind L1, as the emulator "
        "counts its sectors. Up: TFLOP/s. The slope is the bandwidth of the GPU's memory, the ceiling its "
        "FP32 peak. A point above the slope is served by the L2 cache, which this picture takes no account "
        "of; one far below the ceiling, right of the ridge, is held up by something else than memory: issue "
        "slots, shared memory, latency, idle SMs.",
    )
    found = points(ladder, size, spec)
    if not found:
        part.missing.append(f"No rung was counted at N = {size}.")
        return part
    part.panels.append(_overview(found, spec, size, ladder))
    closeup = _closeup(found, spec, size, ladder, measured_peak)
    if closeup is not None:
        part.panels.append(closeup)
    if not timed:
        part.missing.append("No times: each rung is drawn on the roof, where it could be at most.")
    return part


@dataclass(frozen=True)
class _Frame:
    """Where a plot lies in its drawing, and how values become places."""

    drawing: Drawing
    right: float
    x: Callable[[float], float]
    y: Callable[[float], float]

    def place(self, point: Point) -> tuple[float, float]:
        """Where a point lies."""
        return self.x(point.intensity), self.y(point.rate)

    def dot(self, point: Point) -> None:
        """Draw a point."""
        tip = f"{point.row.rung:02d} {point.row.title}: {point.intensity:.2f} flops a byte, " + (
            f"{point.rate:.2f} TFLOP/s" if point.measured else f"at most {point.rate:.2f} TFLOP/s"
        )
        style = "f-blue s-paper" if point.measured else "f-paper s-blue thick"
        self.drawing.dot(*self.place(point), 4, style, tip)

    def level(self, rate: float, style: str) -> None:
        """A dashed line across."""
        self.drawing.path([(_LEFT, self.y(rate)), (self.right, self.y(rate))], f"{style} dash")


def _overview(found: list[Point], spec: DeviceSpec, size: int, ladder: Ladder) -> Panel:
    """All rungs on logarithmic axes; those that lie together share a label."""
    ridge = spec.peak_fp32_tflops * 1000 / spec.bandwidth_gb_s
    low = math.floor(math.log2(min(ridge, *(point.intensity for point in found)) / 1.5))
    high = math.ceil(math.log2(max(ridge, *(point.intensity for point in found)) * 2))
    top = math.ceil(math.log2(spec.peak_fp32_tflops * 1.05))
    bottom = math.floor(math.log2(min(point.rate for point in found) / 1.3))
    right = WIDTH - 14.0
    words = ", ".join(f"{p.row.rung:02d} {p.row.title} {p.intensity:.1f} flops a byte" for p in found)
    drawing = Drawing(
        "roofline",
        f"Roofline of {spec.name} with every rung at N = {size}",
        f"FP32 peak {spec.peak_fp32_tflops:.1f} TFLOP/s, bandwidth {spec.bandwidth_gb_s:,.0f} GB/s. {words}.",
        _TOP + _PLOT + 34,
    )
    frame = _Frame(
        drawing,
        right,
        lambda intensity: _LEFT + (right - _LEFT) * (math.log2(intensity) - low) / (high - low),
        lambda rate: _TOP + _PLOT * (top - math.log2(rate)) / (top - bottom),
    )
    x, y = frame.x, frame.y
    drawing.text(0, 14, f"{spec.name}, N = {size}", "bold")
    drawing.text(right, 14, "TFLOP/s", "muted", "end")
    for power in range(low, high + 1):
        if (power - low) % max(1, round((high - low) / 6)) == 0:
            drawing.line(x(2.0**power), _TOP, x(2.0**power), _TOP + _PLOT)
            drawing.text(x(2.0**power), _TOP + _PLOT + 14, _power(power), "muted", "middle")
    for power in range(bottom, top + 1):
        drawing.line(_LEFT, y(2.0**power), right, y(2.0**power))
        drawing.text(_LEFT - 4, y(2.0**power) + 4, _power(power), "muted", "end")
    drawing.text(right, _TOP + _PLOT + 29, "flops per byte behind L1", "muted", "end")
    start = max(2.0**low, 2.0**bottom * 1000 / spec.bandwidth_gb_s)
    drawing.path([(x(at), y(roof(spec, at))) for at in (start, ridge, 2.0**high)], "s-ink thick")
    peak = f"FP32 peak {spec.peak_fp32_tflops:.1f}"
    drawing.text(x(ridge) - 6, y(spec.peak_fp32_tflops) - 5, peak, "muted", "end")
    baseline = ladder.baseline(size)
    if baseline is not None:
        frame.level(baseline.speed.tflops, "s-orange")
        label = f"{baseline.name.split()[0]} {baseline.speed.tflops:.1f}"
        drawing.text(_LEFT + 4, y(baseline.speed.tflops) + 13, label, "orange")
    for point in found:
        frame.dot(point)
    for cluster in _clusters(found, frame):
        places = [frame.place(point) for point in cluster]
        alone = len(cluster) == 1
        label = (
            f"{cluster[0].row.rung:02d} {cluster[0].row.title}"
            if alone
            else numbers([point.row.rung for point in cluster])
        )
        # Left of the points, where there is room on any roofline, but for those at the very left.
        left, behind = min(px for px, _ in places) - 8, max(px for px, _ in places) + 8
        up = sum(py for _, py in places) / len(places)
        if CHARACTER * len(label) > max(left - _LEFT, right - behind):
            label = f"{len(cluster)} rungs"  # the table says which
        if left - CHARACTER * len(label) > _LEFT:
            drawing.text(left, up + 4, label, anchor="end")
        else:
            drawing.text(behind, up + 4, label)
    return Panel(drawing, _said(found, spec, ridge), _table(found, spec, size))


def _clusters(found: list[Point], frame: _Frame) -> list[list[Point]]:
    """Points that lie so close together that their labels would overlap."""
    clusters: list[list[Point]] = []
    for point in found:
        near = [c for c in clusters if any(_near(frame.place(point), frame.place(other)) for other in c)]
        clusters = [c for c in clusters if c not in near] + [[*chain.from_iterable(near), point]]
    return clusters


def _near(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return abs(one[0] - other[0]) < 30 and abs(one[1] - other[1]) < 14


def _closeup(
    found: list[Point], spec: DeviceSpec, size: int, ladder: Ladder, measured_peak: float | None
) -> Panel | None:
    """The rungs right of the ridge, on even axes and with all their names."""
    ridge = spec.peak_fp32_tflops * 1000 / spec.bandwidth_gb_s
    near = [p for p in found if p.intensity > ridge and p.measured and p.rate > spec.peak_fp32_tflops / 4]
    if len(near) < 2:
        return None
    low, high = (f(point.intensity for point in near) for f in (min, max))
    low, high = low - 0.1 * (high - low) - 1, high + 0.1 * (high - low) + 1
    ceiling = spec.peak_fp32_tflops * 1.07
    bottom = min(point.rate for point in near) * 0.93
    right = WIDTH - _RIGHT
    drawing = Drawing(
        "roofline-closeup",
        f"The rungs under the FP32 peak of {spec.name}, N = {size}",
        ", ".join(f"{p.row.rung:02d} {p.row.title} {p.rate:.1f} TFLOP/s" for p in near),
        _TOP + _PLOT + 34,
    )
    frame = _Frame(
        drawing,
        right,
        lambda intensity: _LEFT + (right - _LEFT) * (intensity - low) / (high - low),
        lambda rate: _TOP + _PLOT * (ceiling - rate) / (ceiling - bottom),
    )
    drawing.text(0, 14, "Under the peak, close up", "bold")
    drawing.text(right, _TOP + _PLOT + 29, "flops per byte behind L1", "muted", "end")
    for tick in round_ticks(high, 8):
        if tick > low:
            drawing.line(frame.x(tick), _TOP, frame.x(tick), _TOP + _PLOT)
            drawing.text(frame.x(tick), _TOP + _PLOT + 14, f"{tick:g}", "muted", "middle")
    for tick in round_ticks(ceiling, 12):
        if tick > bottom:
            drawing.line(_LEFT, frame.y(tick), right, frame.y(tick))
            drawing.text(_LEFT - 4, frame.y(tick) + 4, f"{tick:g}", "muted", "end")
    peak = frame.y(spec.peak_fp32_tflops)
    drawing.path([(_LEFT, peak), (right, peak)], "s-ink thick")
    drawing.text(_LEFT + 4, peak - 5, f"peak {spec.peak_fp32_tflops:.1f}", "muted")
    if measured_peak:
        frame.level(measured_peak, "s-green")
        drawing.text(right - 2, frame.y(measured_peak) + 13, f"FFMA {measured_peak:.1f}", "green", "end")
    baseline = ladder.baseline(size)
    if baseline is not None and baseline.speed.tflops > bottom:
        frame.level(baseline.speed.tflops, "s-orange")
        label = f"{baseline.name.split()[0]} {baseline.speed.tflops:.1f}"
        drawing.text(_LEFT + 4, frame.y(baseline.speed.tflops) - 5, label, "orange")
    ordered = sorted(near, key=lambda point: (-point.rate, point.intensity))
    heights = spread([frame.y(point.rate) for point in ordered], 14.0, _TOP + 4, _TOP + _PLOT)
    for point, height in zip(ordered, heights, strict=True):
        drawing.path([frame.place(point), (right + 6, height)], "s-muted thin")
    for point, height in zip(ordered, heights, strict=True):
        frame.dot(point)
        drawing.text(right + 9, height + 4, f"{point.row.rung:02d} {point.row.title}")
    return Panel(
        drawing,
        "Right of the ridge memory would be fast enough even if no cache helped: something else limits.",
    )


def _table(found: list[Point], spec: DeviceSpec, size: int) -> Table:
    rate = "TFLOP/s" if found[0].measured else "roof, TFLOP/s"
    return Table(
        f"Roofline at N = {size}",
        ("rung", "GB asked of L2 and memory", "flops a byte", rate, "of the roof"),
        tuple(
            (
                f"{p.row.rung:02d} {p.row.title}",
                f"{asked_bytes(p.row.counted) / 1e9:.2f}" if p.row.counted else "",
                f"{p.intensity:.2f}",
                f"{p.rate:.2f}",
                f"{p.rate / roof(spec, p.intensity):.0%}" if p.measured else "",
            )
            for p in found
        ),
        folded=True,
    )


def _said(found: list[Point], spec: DeviceSpec, ridge: float) -> str:
    best = max(found, key=lambda point: point.rate)
    if not best.measured:
        return f"Right of {ridge:.0f} flops a byte, arithmetic is the limit."
    share = best.rate / spec.peak_fp32_tflops
    return f"The fastest, {best.row.rung:02d} {best.row.title}, runs at {share:.0%} of the FP32 peak."


def _power(power: int) -> str:
    return f"{2**power}" if power >= 0 else f"1/{2**-power}"
