"""The roofline: what a rung asks of memory for each multiply-add, and how fast it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewave.device import DeviceSpec
from tilewave.emulator.passes import SECTOR_BYTES
from tilewave.lab.records import Counted, Ladder, Row
from tilewave.lab.report.parts import Panel, Part, Table
from tilewave.lab.report.svg import WIDTH, Drawing, spread

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
    """All rungs that were counted at a size, flops of the product alone."""
    found = []
    for row in ladder.rows:
        if row.size != size or row.counted is None:
            continue
        intensity = 2.0 * size**3 / asked_bytes(row.counted)
        if row.speed is not None:
            found.append(Point(row, intensity, row.speed.tflops, True))
        else:
            found.append(Point(row, intensity, roof(spec, intensity), False))
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
    part.panels.append(_panel(found, spec, size, ladder, measured_peak))
    if not timed:
        part.missing.append("No times: each rung is drawn on the roof, where it could be at most.")
    return part


def _panel(
    found: list[Point], spec: DeviceSpec, size: int, ladder: Ladder, measured_peak: float | None
) -> Panel:
    baseline = ladder.baseline(size)
    ridge = spec.peak_fp32_tflops * 1000 / spec.bandwidth_gb_s
    low = math.floor(math.log2(min(ridge, *(point.intensity for point in found)) / 1.5))
    high = math.ceil(math.log2(max(ridge, *(point.intensity for point in found)) * 2))
    top = math.ceil(math.log2(spec.peak_fp32_tflops * 1.05))
    bottom = math.floor(math.log2(min(point.rate for point in found) / 1.3))
    right = WIDTH - _RIGHT

    def x(intensity: float) -> float:
        return _LEFT + (right - _LEFT) * (math.log2(intensity) - low) / (high - low)

    def y(rate: float) -> float:
        return _TOP + _PLOT * (top - math.log2(rate)) / (top - bottom)

    words = ", ".join(f"{p.row.rung:02d} {p.row.title} {p.intensity:.1f} flops a byte" for p in found)
    drawing = Drawing(
        "roofline",
        f"Roofline of {spec.name} with every rung at N = {size}",
        f"FP32 peak {spec.peak_fp32_tflops:.1f} TFLOP/s, bandwidth {spec.bandwidth_gb_s:,.0f} GB/s. {words}.",
        _TOP + _PLOT + 34,
    )
    drawing.text(0, 14, f"{spec.name}, N = {size}", "bold")
    drawing.text(right, 14, "TFLOP/s", "muted", "end")
    for power in range(low, high + 1):
        if (power - low) % max(1, round((high - low) / 6)) == 0:
            drawing.line(x(2.0**power), _TOP, x(2.0**power), _TOP + _PLOT)
            drawing.text(x(2.0**power), _TOP + _PLOT + 14, _power(power), "muted", "middle")
    for power in range(bottom, top + 1):
        drawing.line(_LEFT, y(2.0**power), right, y(2.0**power))
        drawing.text(_LEFT - 4, y(2.0**power) + 4, _power(power), "muted", "end")
    drawing.text(_LEFT, _TOP + _PLOT + 29, "flops per byte behind L1", "muted")
    start = max(2.0**low, 2.0**bottom * 1000 / spec.bandwidth_gb_s)
    corners = [start, ridge, 2.0**high]
    drawing.path([(x(at), y(roof(spec, at))) for at in corners], "s-ink thick")
    if measured_peak:
        drawing.path([(x(ridge), y(measured_peak)), (right, y(measured_peak))], "s-green dash")
    if baseline is not None:
        level = y(baseline.speed.tflops)
        drawing.path([(_LEFT, level), (right, level)], "s-orange dash")
        drawing.text(
            _LEFT + 3, level + 12, f"{baseline.name.split()[0]} {baseline.speed.tflops:.1f}", "orange"
        )
    ordered = sorted(found, key=lambda point: (-point.rate, point.intensity))
    places = spread([y(point.rate) for point in ordered], 14.0, _TOP + 4, _TOP + _PLOT)
    for point, place in zip(ordered, places, strict=True):
        tip = f"{point.row.rung:02d} {point.row.title}: {point.intensity:.2f} flops a byte, " + (
            f"{point.rate:.2f} TFLOP/s" if point.measured else f"at most {point.rate:.2f} TFLOP/s"
        )
        drawing.path([(x(point.intensity), y(point.rate)), (right + 6, place)], "s-muted thin")
        drawing.dot(
            x(point.intensity), y(point.rate), 3.5, "f-blue" if point.measured else "f-paper s-ink", tip
        )
        drawing.text(right + 9, place + 4, f"{point.row.rung:02d} {point.row.title}")
    table = Table(
        f"Roofline at N = {size}",
        ("rung", "GB asked of L2 and memory", "flops a byte",
         "TFLOP/s" if ordered[0].measured else "roof, TFLOP/s", "of the roof"),
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
    )  # fmt: skip
    best = max(found, key=lambda point: point.rate)
    share = best.rate / spec.peak_fp32_tflops
    said = (
        f"The fastest, {best.row.rung:02d} {best.row.title}, runs at {share:.0%} of the FP32 peak."
        if best.measured
        else f"Right of {ridge:.0f} flops a byte, arithmetic is the limit."
    )
    return Panel(drawing, said, table)


def _power(power: int) -> str:
    return f"{2**power}" if power >= 0 else f"1/{2**-power}"
