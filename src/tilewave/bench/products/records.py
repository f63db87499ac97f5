"""What `tilewave bench` found: frozen records that travel to JSON and back."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tilewave.bench.suite import SuiteProduct
from tilewave.errors import UsageError

FORMAT = "tilewave bench 1"
"""Kind and version of the file's layout; another one is refused, not guessed at."""

COLD, WARM = "cold", "warm"


@dataclass(frozen=True)
class Reading:
    """One contender on one product.

    ``rounds_us`` holds microseconds of GPU time per product, a figure a round; ``host_us`` what an eager call
    cost the host. ``error_in_bounds`` is the largest error in units of what float32 may leave, ``checked``
    says how the answer was checked. ``rejected`` is the reason why the reading does not count, None for one
    that does. ``clocks_mhz``, ``power_w`` and ``throttling`` were read after each round.
    """

    contender: str
    rounds_us: tuple[float, ...] = ()
    host_us: float | None = None
    error_in_bounds: float | None = None
    checked: str = ""
    plan: str | None = None
    predicted_us: float | None = None
    clocks_mhz: tuple[float, ...] = ()
    power_w: tuple[float, ...] = ()
    throttling: tuple[str, ...] = ()
    rejected: str | None = None

    @property
    def microseconds(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.rounds_us)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median over the rounds."""
        return (max(self.rounds_us) - min(self.rounds_us)) / self.microseconds

    @property
    def counts(self) -> bool:
        """Whether this reading may be used."""
        return self.rejected is None and bool(self.rounds_us)


@dataclass(frozen=True)
class Result:
    """All contenders on one product.

    ``mode`` is ``cold`` (operands rotate through ``buffers`` sets that together exceed twice the L2 cache)
    or ``warm`` (one set, again and again). ``graph`` tells whether calls were replayed from a CUDA graph.
    ``flags`` say what a reader must know of the readings: noise, throttling, drift, operands in L2.
    """

    product: SuiteProduct
    mode: str
    buffers: int
    graph: bool
    readings: tuple[Reading, ...]
    flags: tuple[str, ...] = ()

    def reading(self, contender: str) -> Reading | None:
        """The reading of a contender, None where it has none that counts."""
        return next((one for one in self.readings if one.contender == contender and one.counts), None)

    def ideal_us(self, peak_tflops: float, bandwidth_gb_s: float) -> float:
        """What the roofline allows: arithmetic at the peak or, if that is longer, each byte moved once."""
        return max(self.product.flops / (1e6 * peak_tflops), self.product.nbytes / (1e3 * bandwidth_gb_s))


@dataclass(frozen=True)
class BenchRun:
    """Everything that one file holds. ``contenders`` is in the order in which they are shown."""

    device: str
    mode: str
    contenders: tuple[str, ...]
    names: dict[str, str]
    peak_tflops: float
    bandwidth_gb_s: float
    l2_bytes: int
    launch_floor_us: float
    environment: dict[str, Any]
    results: tuple[Result, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def find(self, product: SuiteProduct) -> Result | None:
        """The result of a product, whatever it is called."""
        return next((one for one in self.results if _same(one.product, product)), None)

    def to_json(self) -> dict[str, Any]:
        """Plain data for a JSON file."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> BenchRun:
        """The record from what `to_json` made. Raises ``UsageError`` for anything else."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise UsageError(f"this is no file of `tilewave bench`: its format is not {FORMAT!r}")
        try:
            fields = {name: value for name, value in data.items() if name != "format"}
            fields["results"] = tuple(_result(one) for one in data["results"])
            fields["contenders"] = tuple(data["contenders"])
            fields["notes"] = tuple(data["notes"])
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise UsageError(f"this file of `tilewave bench` is damaged: {error}") from error


def _same(one: SuiteProduct, other: SuiteProduct) -> bool:
    return _shape(one) == _shape(other)


def _shape(product: SuiteProduct) -> tuple[Any, ...]:
    return (
        product.m, product.n, product.k, product.transposed_a, product.transposed_b, product.batch,
        product.shared_a, product.shared_b,
    )  # fmt: skip


def _result(data: dict[str, Any]) -> Result:
    return Result(
        SuiteProduct(**data["product"]),
        data["mode"],
        data["buffers"],
        data["graph"],
        tuple(_reading(one) for one in data["readings"]),
        tuple(data["flags"]),
    )


def _reading(data: dict[str, Any]) -> Reading:
    lists = ("rounds_us", "clocks_mhz", "power_w", "throttling")
    fields: dict[str, Any] = {name: tuple(data[name]) if name in lists else data[name] for name in data}
    return Reading(**fields)


def load_run(path: Path) -> BenchRun:
    """Read a file of `tilewave bench --json`."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        return BenchRun.from_json(data)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
