"""What a sustained run found: frozen records that travel to JSON and back.

Contenders go by keys: ``ours`` (a rung), ``cublas`` and ``ffma`` (multiply-adds on registers alone). ``data``
is ``random`` (N(0,1)), ``zeros`` or, for ``ffma``, ``registers``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tilewave.errors import UsageError
from tilewave.lab.records import read_json, write_json

FORMAT = 1
"""Version of the file's layout; a file of another version is refused, not guessed at."""

OURS, CUBLAS, FFMA = "ours", "cublas", "ffma"
RANDOM, ZEROS, REGISTERS = "random", "zeros", "registers"


@dataclass(frozen=True)
class Sample:
    """The GPU at one moment, ``seconds`` after the run began; None where it does not tell.

    ``contender`` and ``data`` say what was running: empty before the first and behind the last repeat.
    """

    seconds: float
    contender: str
    data: str
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttling: tuple[str, ...] = ()


@dataclass(frozen=True)
class Repeat:
    """One stretch of one contender on one kind of data, in seconds since the run began.

    ``batch_ms`` holds the milliseconds per call of each batch of calls, ``batch_ends_s`` when it ended. The
    first ``unsettled`` batches still show what ran before: neither they nor the samples of their time count
    in the figures. ``throttled`` is the share of the samples that name each reason.
    """

    contender: str
    data: str
    round: int
    start_s: float
    end_s: float
    calls_per_batch: int
    batch_ends_s: tuple[float, ...]
    batch_ms: tuple[float, ...]
    unsettled: int
    tflops: float
    median_w: float | None = None
    joules_per_call: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    throttled: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """All repeats of one contender on one kind of data: medians over the repeats.

    ``spread`` is (largest - smallest) / median of the repeats' TFLOP/s; ``between_runs`` the same over the
    medians of this run and of those it was compared with, None where there was none.
    """

    contender: str
    data: str
    repeats: int
    tflops: float
    spread: float
    between_runs: float | None
    median_w: float | None
    joules_per_call: float | None
    sm_clock_mhz: float | None
    temperature_c: float | None
    throttled: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """One contender against another in words.

    ``ratio`` is ``one``'s throughput over ``other``'s, the median within rounds; ``outcome`` is ``ahead``,
    ``behind`` or ``parity``; ``spread`` is what the difference was held against and ``times`` how many times
    as large it is (None where nothing varied).
    """

    one: str
    one_data: str
    other: str
    other_data: str
    ratio: float
    spread: float
    outcome: str
    times: float | None
    words: str


@dataclass(frozen=True)
class PowerRun:
    """Everything that one sustained run holds.

    ``size`` is N of the N x N x N products, ``names`` says what the keys of the contenders stand for,
    ``telemetry`` where clocks and power come from or why there are none, ``peak_tflops`` is the theoretical
    FP32 peak.
    """

    device: str
    size: int
    rung: int
    seconds: float
    peak_tflops: float
    power_limit_w: float | None
    names: Mapping[str, str]
    telemetry: str
    environment: Mapping[str, Any]
    samples: tuple[Sample, ...] = ()
    repeats: tuple[Repeat, ...] = ()
    summaries: tuple[Summary, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    notes: tuple[str, ...] = ()

    def repeats_of(self, contender: str, data: str) -> list[Repeat]:
        """The repeats of a contender on one kind of data, in order."""
        return [repeat for repeat in self.repeats if (repeat.contender, repeat.data) == (contender, data)]

    def summary(self, contender: str, data: str) -> Summary | None:
        """The summary of a contender on one kind of data, or None."""
        return next((s for s in self.summaries if (s.contender, s.data) == (contender, data)), None)

    @property
    def measured_peak_tflops(self) -> float | None:
        """What the loop of multiply-adds on registers reached; None if it did not run."""
        found = self.summary(FFMA, REGISTERS)
        return None if found is None else found.tflops

    def to_json(self) -> dict[str, Any]:
        """Plain data for a JSON file."""
        return {"format": FORMAT, "kind": "power", **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> PowerRun:
        """Read `to_json`'s data; raises ``UsageError`` where it is no power run of this format."""
        kind = (data.get("kind"), data.get("format")) if isinstance(data, Mapping) else None
        if kind != ("power", FORMAT):
            raise UsageError(f"not a power run of format {FORMAT}")
        values = {name: value for name, value in data.items() if name not in ("kind", "format")}
        try:
            for name, record in (
                ("samples", Sample),
                ("repeats", Repeat),
                ("summaries", Summary),
                ("verdicts", Verdict),
            ):
                values[name] = tuple(record(**_tuples(entry)) for entry in values[name])
            values["notes"] = tuple(values["notes"])
            return cls(**values)
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"a damaged power run: {type(error).__name__}: {error}") from error


def _tuples(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}


def load_power_run(path: Path) -> PowerRun:
    """Read a file that `tilewave power --json` wrote; ``UsageError`` says what is wrong with it."""
    return read_json(path, PowerRun.from_json)


def save_power_run(run: PowerRun, path: Path) -> None:
    """Write a power run."""
    write_json(run.to_json(), path)
