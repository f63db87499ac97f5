"""Puts the parts of the report together and writes the page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from tilewave.device import DeviceSpec
from tilewave.lab.power.records import PowerRun
from tilewave.lab.profile.records import Profile
from tilewave.lab.records import Ladder
from tilewave.lab.registry import get_rung
from tilewave.lab.report.banks import banks
from tilewave.lab.report.parts import Part
from tilewave.lab.report.power import power
from tilewave.lab.report.predictions import predictions
from tilewave.lab.report.roofline import roofline
from tilewave.lab.report.schedules import assign, schedules
from tilewave.lab.report.svg import DARK, LIGHT, Drawing, colour_properties, picture_style
from tilewave.lab.report.throughput import throughput
from tilewave.lab.report.tiling import tiling
from tilewave.lab.report.timelines import timelines

#: The roofline shows this size if the ladder has it, as large products tell least of launch and tails.
_ROOFLINE_SIZE = 4096


@dataclass(frozen=True)
class Report:
    """Everything that the page says. ``notes`` are remarks on the records, for its head."""

    ladder: Ladder
    spec: DeviceSpec
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()

    @property
    def drawings(self) -> list[Drawing]:
        """All pictures, in the order of the page."""
        return [panel.drawing for part in self.parts for panel in part.panels]


def make_report(
    ladder: Ladder,
    spec: DeviceSpec,
    power_run: PowerRun | None = None,
    profile: Profile | None = None,
    notes: Iterable[str] = (),
) -> Report:
    """Draw every part. ``spec`` is the GPU that the pictures without times are for."""
    sizes = ladder.sizes()
    peak = power_run.measured_peak_tflops if power_run else None
    parts = (
        throughput(ladder),
        tiling(spec),
        banks(spec),
        timelines(spec),
        schedules(spec, telling_sizes(sizes, spec), ladder),
        roofline(ladder, spec, _ROOFLINE_SIZE if _ROOFLINE_SIZE in sizes else max(sizes), peak),
        power(power_run, ladder),
        predictions(ladder, spec, profile),
    )
    return Report(ladder, spec, parts, tuple(notes))


def telling_sizes(sizes: list[int], spec: DeviceSpec) -> list[int]:
    """At most two sizes where a block a tile leaves most idle: one below a full wave, one above."""
    rung = get_rung("large_patch")
    found: dict[bool, tuple[float, int]] = {}
    for size in sizes:
        dealt = assign(rung, size, size, size, spec)
        above = dealt.cut.tiles > spec.sms
        found[above] = min(found.get(above, (2.0, 0)), (dealt.busy, size))
    return sorted(size for _, size in found.values())


def render(report: Report, command: str, version: str) -> str:
    """The page as HTML."""
    package = resources.files(__package__)
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters["code"] = _with_code
    environment.filters["sentence"] = _sentence
    template = environment.from_string(package.joinpath("page.html.j2").read_text(encoding="utf-8"))
    style = (
        f":root{{{colour_properties(LIGHT)}}}\n"
        f"@media (prefers-color-scheme: dark){{:root{{{colour_properties(DARK)}}}}}\n"
        + picture_style()
        + package.joinpath("page.css").read_text(encoding="utf-8")
    )
    values: dict[str, Any] = {
        "title": f"The SGEMM ladder on {report.ladder.device}",
        "summary": [*_summary(report), *report.notes],
        "facts": _facts(report),
        "parts": report.parts,
        "style": Markup(style),
        "script": Markup(package.joinpath("page.js").read_text(encoding="utf-8")),
        "command": command,
        "version": version,
    }
    return template.render(values)


def _with_code(text: str) -> Markup:
    """Text whose words between backquotes are code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _sentence(text: str) -> str:
    """Text that begins with a capital, unless its first word is a name such as cuBLAS."""
    word = text.partition(" ")[0]
    return text[:1].upper() + text[1:] if word.islower() else text


def _summary(report: Report) -> list[str]:
    """What a reader should take away, in a sentence or two."""
    ladder = report.ladder
    lines = [
        "Single-precision matrix multiply, from three nested loops to stream-K, step by step: what each step "
        "changes, what it was predicted to change, and what came out."
    ]
    for size in ladder.sizes()[::-1]:
        timed = [row for row in ladder.rows if row.size == size and row.speed]
        baseline = ladder.baseline(size)
        if not timed:
            continue
        first, best = timed[0], max(timed, key=lambda row: row.speed.tflops if row.speed else 0.0)
        if first.speed is None or best.speed is None:
            continue
        against = (
            f", {best.speed.over_baseline:.0%} of {baseline.name}"
            if baseline and best.speed.over_baseline is not None
            else ""
        )
        lines.append(
            f"At N = {size} the ladder climbs from {first.speed.tflops:.1f} to {best.speed.tflops:.1f} "
            f"TFLOP/s (rung {best.rung:02d}, {best.title}){against}."
        )
        break
    return lines


def _facts(report: Report) -> list[tuple[str, str]]:
    """Where the figures come from."""
    ladder, spec = report.ladder, report.spec
    last = ladder.sessions[-1] if ladder.sessions else {}
    compilers = ", ".join(sorted({row.build.compiler for row in ladder.rows}))
    facts = [
        ("GPU", f"{ladder.device}{', emulated' if ladder.emulated else ''}"),
        ("SMs", f"{spec.sms} at {spec.clock_mhz:,.0f} MHz ({spec.arch})"),
        ("FP32 peak", f"{spec.peak_fp32_tflops:.1f} TFLOP/s"),
        ("memory", f"{spec.bandwidth_gb_s:,.0f} GB/s"),
        ("driver", last.get("driver") or ""),
        ("compiler", compilers),
        ("library", ladder.baselines[-1].name if ladder.baselines else ""),
        ("date", str(last.get("date") or "")[:10]),
        ("made by", f"tilewave {last['command'].partition(' ')[2]}" if last.get("command") else ""),
    ]
    notes = [("note", note) for note in ladder.notes]
    return [(name, value) for name, value in facts if value] + notes
