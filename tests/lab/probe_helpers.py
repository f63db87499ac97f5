"""Findings of probes made up for tests of what is said about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tilewave.device import get_spec
from tilewave.lab.probe_catalog import PROBES
from tilewave.lab.probe_records import Examined, Findings, Probe, Reading, SizeFindings, Timed, Variant
from tilewave.lab.records import Build, Check, Counted, Speed

ALL_VARIANTS = [(probe, variant) for probe in PROBES.values() for variant in probe.variants]
CHANGED = [(probe, variant) for probe, variant in ALL_VARIANTS if variant.rung.edits]


def named(pair: object) -> str:
    """An id for a parametrized test."""
    if isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Variant):
        return f"{pair[0].name}-{pair[1].key}"
    return str(pair)


def build(registers: int = 128, spills: int = 0, blocks: int = 2) -> Build:
    """What a compiler might have made of a kernel."""
    return Build(
        "sm_90", "NVRTC 1.2.3", registers, 0, spills, spills, 1024, 256, blocks, 0.25, ("registers",), 64
    )


def counted(**figures: int) -> Counted:
    """Counters that are 0 but for those given."""
    return Counted(**{item.name: figures.get(item.name, 0) for item in fields(Counted)})


def examined(figures: Mapping[str, int] | None = None, **of_build: int) -> Examined:
    """An examined variant."""
    return Examined(build(**of_build), 0, (), counted(**(figures or {})))


def speed(milliseconds: float, size: int = 1024) -> Speed:
    """A steady timing."""
    return Speed((milliseconds,) * 5, 3, 2e-9 * size**3 / milliseconds, 0.001)


def findings(
    probe: Probe,
    milliseconds: Mapping[str, float] | None = None,
    *,
    size: int = 1024,
    builds: Mapping[str, Examined] | None = None,
    profiled: Mapping[str, dict[str, float]] | None = None,
) -> Findings:
    """Findings at one size: times by variant, from which the ratios follow."""
    times = dict(milliseconds or {})
    timed = {}
    for variant in probe.variants if times else ():
        other = probe.against(variant)
        ratio = None if other is None else times[other] / times[variant.key]
        check = Check("GPU", (size, size, size), 0.5) if variant.rung.product else None
        timed[variant.key] = Timed(check, speed(times[variant.key], size), ratio)
    found = Findings(probe.name, size)
    found.examined = {variant.key: examined() for variant in probe.variants} | dict(builds or {})
    found.sizes = [SizeFindings(size, timed, dict(profiled or {}))]
    return found


def words(
    name: str, milliseconds: Mapping[str, float] | None = None, gpu: str = "H200", **options: Any
) -> str:
    """What a probe says about made-up times."""
    probe = PROBES[name]
    found = findings(probe, milliseconds, **options)
    return " ".join(probe.meaning(Reading(get_spec(gpu), found, found.sizes[0])))
