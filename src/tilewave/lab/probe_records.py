"""What a probe is, and what it found."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tilewave.device import DeviceSpec
from tilewave.errors import UsageError
from tilewave.lab.probe_edits import EditedRung
from tilewave.lab.records import Build, Check, Counted, Speed


@dataclass(frozen=True)
class Variant:
    """One kernel of a probe.

    ``against`` is the key of the variant that it is compared with (the probe's first by default); one that
    stands ``alone`` is compared with none, others are with it. ``hold_to`` launches it with so much dynamic
    shared memory that no more blocks than that fit on an SM. ``reported`` is what the article saw,
    ``reported_ratio`` its throughput over that of ``against``.
    """

    key: str
    label: str
    rung: EditedRung
    against: str | None = None
    alone: bool = False
    hold_to: int | None = None
    reported: str = ""
    reported_ratio: float | None = None


@dataclass(frozen=True)
class Expectation:
    """A counter or resource figure of a variant: its ratio to that of ``against``, or its value.

    ``ratio`` may depend on N.
    """

    variant: str
    figure: str
    why: str
    ratio: float | Callable[[int], float] | None = None
    value: float | None = None

    def ratio_at(self, size: int) -> float | None:
        """The expected ratio for N = ``size``; None if a value is expected."""
        return self.ratio(size) if callable(self.ratio) else self.ratio


@dataclass(frozen=True)
class Examined:
    """One variant without a GPU: how it was compiled, whether its product is right, what it does."""

    build: Build
    dynamic_shared_bytes: int
    checks: tuple[Check, ...]
    counted: Counted | None


@dataclass(frozen=True)
class Judged:
    """An expectation beside the emulator's figure and the hardware's. None: not known."""

    variant: str
    figure: str
    expected: float
    is_ratio: bool
    emulated: float | None
    hardware: float | None
    why: str

    def holds(self, found: float | None, closeness: float = 0.02) -> bool | None:
        """Whether a figure is as expected; None if there is none."""
        if found is None:
            return None
        return abs(found - self.expected) <= closeness * abs(self.expected)


@dataclass(frozen=True)
class Timed:
    """A variant on a GPU at one size; without ``speed`` it was wrong and was not timed.

    ``ratio`` is its throughput over that of the variant that it is compared with, median within rounds.
    """

    check: Check | None
    speed: Speed | None
    ratio: float | None = None


@dataclass
class SizeFindings:
    """All variants at one size. ``profiled`` holds the profiler's metrics at this size."""

    size: int
    timed: dict[str, Timed] = field(default_factory=dict)
    profiled: dict[str, dict[str, float]] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)


@dataclass
class Findings:
    """What a probe found. Counters of ``examined`` and ``hardware`` are those at N = ``counted_size``."""

    probe: str
    counted_size: int
    examined: dict[str, Examined] = field(default_factory=dict)
    hardware: dict[str, dict[str, float]] = field(default_factory=dict)
    judged: list[Judged] = field(default_factory=list)
    sizes: list[SizeFindings] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Reading:
    """What the words of a probe are made from: one size on one GPU. Figures not taken are None."""

    spec: DeviceSpec
    findings: Findings
    at: SizeFindings

    def ratio(self, key: str) -> float | None:
        """Throughput over that of the variant that it is compared with."""
        timed = self.at.timed.get(key)
        return None if timed is None else timed.ratio

    def milliseconds(self, key: str) -> float | None:
        """Median time of a launch."""
        timed = self.at.timed.get(key)
        return None if timed is None or timed.speed is None else statistics.median(timed.speed.milliseconds)

    def counted(self, key: str) -> Counted | None:
        """The emulator's counters."""
        examined = self.findings.examined.get(key)
        return None if examined is None else examined.counted

    def build(self, key: str) -> Build | None:
        """What the compiler made of a variant."""
        examined = self.findings.examined.get(key)
        return None if examined is None else examined.build

    def metric(self, key: str, name: str) -> float | None:
        """A metric of the profiler at this size."""
        return self.at.profiled.get(key, {}).get(name)


@dataclass(frozen=True)
class Probe:
    """A question, the kernels that answer it, and what was expected.

    ``sizes`` are those timed on a GPU. ``meaning`` puts a reading into words; ``tables`` adds what pure
    arithmetic says. ``profile`` asks for the profiler without being told to.
    """

    name: str
    question: str
    variants: tuple[Variant, ...]
    sizes: Callable[[DeviceSpec], tuple[int, ...]]
    meaning: Callable[[Reading], list[str]]
    expectations: tuple[Expectation, ...] = ()
    tables: Callable[[], list[str]] | None = None
    profile: bool = False
    about: str = ""

    def variant(self, key: str) -> Variant:
        """The variant of this key."""
        for variant in self.variants:
            if variant.key == key:
                return variant
        raise UsageError(
            f"probe {self.name} has no variant {key!r}: {', '.join(v.key for v in self.variants)}"
        )

    def against(self, variant: Variant) -> str | None:
        """The key of the variant that this one is compared with; None for the first and those alone."""
        first = self.variants[0].key
        return None if variant.alone or variant.key == first else variant.against or first


def by_name(probes: Mapping[str, Probe], name: str, others: Sequence[str] = ()) -> Probe:
    """The probe of this name; raises ``UsageError`` that lists the names there are, ``others`` too."""
    found = probes.get(name.strip().lower().replace("_", "-"))
    if found is None:
        raise UsageError(f"there is no probe {name!r}; there are {', '.join((*probes, *others))}")
    return found
