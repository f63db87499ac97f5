"""What the ladder found: frozen records that travel to JSON and back.

A row's ``key`` names everything that its figures depend on (source, compiler, architecture, device, baseline,
version of the procedure), so that a row of an earlier run is taken over exactly when it would come out alike.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from tilewave.errors import UsageError

Record = TypeVar("Record")

#: Version of the file's layout; a file of another version is refused, not guessed at.
FORMAT = 1


@dataclass(frozen=True)
class Build:
    """What the compiler made of a rung, and how much of it fits on an SM."""

    arch: str
    compiler: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    threads: int
    blocks_per_sm: int
    occupancy: float
    limited_by: tuple[str, ...]
    fma_per_step: int


@dataclass(frozen=True)
class Counted:
    """The emulator's counters of one launch; ``blocks_run`` of ``blocks_total`` blocks were executed.

    ``copy_conflicts`` is None in files that were written before it was kept.
    """

    blocks_run: int
    blocks_total: int
    warp_instructions: int
    thread_fma: int
    shared_loads: int
    wide_shared_loads: int
    shared_load_passes: int
    shared_load_conflicts: int
    shared_stores: int
    shared_store_passes: int
    shared_store_conflicts: int
    global_loads: int
    global_load_sectors: int
    global_stores: int
    global_store_sectors: int
    local_loads: int
    local_load_sectors: int
    local_stores: int
    local_store_sectors: int
    copies: int
    copy_sectors: int
    copy_passes: int
    barriers: int
    copy_conflicts: int | None = None

    @property
    def passes_per_read(self) -> float | None:
        """Shared-memory passes that an average shared load needs; None without shared loads."""
        return self.shared_load_passes / self.shared_loads if self.shared_loads else None

    @property
    def passes_per_write(self) -> float | None:
        """Shared-memory passes that an average shared store needs; None without shared stores."""
        return self.shared_store_passes / self.shared_stores if self.shared_stores else None

    @property
    def fma_share(self) -> float:
        """Multiply-adds among all instructions of PTX, both counted by warp."""
        return self.thread_fma / 32 / self.warp_instructions


@dataclass(frozen=True)
class Check:
    """The largest error against float64 in units of the bound, for one product; at most ``allowed``."""

    where: str
    shape: tuple[int, int, int]
    error_in_bounds: float
    allowed: float = 1.0

    @property
    def holds(self) -> bool:
        """Whether every element lies within what the rung may be off by."""
        return self.error_in_bounds <= self.allowed


@dataclass(frozen=True)
class Speed:
    """Timing of one contender at one size; ``over_baseline`` is the median ratio within rounds."""

    milliseconds: tuple[float, ...]
    repeats: int
    tflops: float
    spread: float
    over_baseline: float | None = None

    @property
    def median_ms(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.milliseconds)


@dataclass(frozen=True)
class Outcome:
    """One prediction of the registry beside what came out. ``holds`` is None where it could not be judged."""

    what: str
    predicted: str
    found: str
    holds: bool | None
    why: str = ""


@dataclass(frozen=True)
class Row:
    """One rung at one size (N = M = K). ``session`` is the index of its environment in the file.

    ``reported`` and ``reported_figures`` are the article's, for its GB10; empty where it is silent.
    """

    rung: int
    name: str
    title: str
    size: int
    key: str
    session: int
    build: Build
    counted: Counted | None = None
    checks: tuple[Check, ...] = ()
    speed: Speed | None = None
    difference: float | None = None
    outcomes: tuple[Outcome, ...] = ()
    reported: str = ""
    reported_figures: str = ""

    @property
    def worst_error(self) -> float | None:
        """The largest error among the checks, in units of the bound."""
        return max((check.error_in_bounds for check in self.checks), default=None)


@dataclass(frozen=True)
class BaselineRow:
    """The library at one size, timed among the rungs of the same session."""

    name: str
    size: int
    session: int
    speed: Speed
    error_in_bounds: float


@dataclass
class Ladder:
    """Everything one ladder file holds: rows, baselines, the environments they were found in, notes."""

    device: str
    emulated: bool
    sessions: list[dict[str, Any]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    baselines: list[BaselineRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def find(self, rung: int, size: int) -> Row | None:
        """The row of a rung at a size, or None."""
        return next((row for row in self.rows if (row.rung, row.size) == (rung, size)), None)

    def only(self, rungs: Collection[int], sizes: Collection[int]) -> Ladder:
        """The same ladder with the rows of these rungs and sizes alone."""
        return replace(
            self,
            rows=[row for row in self.rows if row.rung in rungs and row.size in sizes],
            baselines=[row for row in self.baselines if row.size in sizes],
        )

    def put(self, row: Row) -> None:
        """Add a row in place of an older one of the same rung and size."""
        self.rows = [old for old in self.rows if (old.rung, old.size) != (row.rung, row.size)]
        self.rows.append(row)
        self.rows.sort(key=lambda row: (row.size, row.rung))

    def put_baseline(self, row: BaselineRow) -> None:
        """Add a baseline in place of an older one of the same size."""
        self.baselines = [old for old in self.baselines if old.size != row.size]
        self.baselines.append(row)
        self.baselines.sort(key=lambda row: row.size)

    def baseline(self, size: int) -> BaselineRow | None:
        """The baseline at a size, or None."""
        return next((row for row in self.baselines if row.size == size), None)

    def sizes(self) -> list[int]:
        """All sizes with rows, ascending."""
        return sorted({row.size for row in self.rows})

    def to_json(self) -> dict[str, Any]:
        """Plain data for a JSON file."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ladder:
        """Read `to_json`'s data; raises UsageError where it is not a ladder of this format."""
        found = data.get("format") if isinstance(data, Mapping) else None
        if found != FORMAT:
            raise UsageError(f"not a ladder of format {FORMAT} (its format is {found!r})")
        try:
            return cls(
                device=data["device"],
                emulated=data["emulated"],
                sessions=list(data["sessions"]),
                rows=[_row(row) for row in data["rows"]],
                baselines=[
                    BaselineRow(**{**row, "speed": _speed(row["speed"])}) for row in data["baselines"]
                ],
                notes=list(data["notes"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"a damaged ladder file: {type(error).__name__}: {error}") from error


def _speed(data: Mapping[str, Any]) -> Speed:
    return Speed(**{**data, "milliseconds": tuple(data["milliseconds"])})


def _row(data: Mapping[str, Any]) -> Row:
    build = dict(data["build"])
    return Row(
        **{
            **data,
            "build": Build(**{**build, "limited_by": tuple(build["limited_by"])}),
            "counted": Counted(**data["counted"]) if data["counted"] else None,
            "checks": tuple(Check(**{**check, "shape": tuple(check["shape"])}) for check in data["checks"]),
            "speed": _speed(data["speed"]) if data["speed"] else None,
            "outcomes": tuple(Outcome(**outcome) for outcome in data["outcomes"]),
        }
    )


def load_ladder(path: Path) -> Ladder:
    """Read a ladder file; UsageError says what is wrong with one that cannot be used."""
    return read_json(path, Ladder.from_json)


def save_ladder(ladder: Ladder, path: Path) -> None:
    """Write a ladder file."""
    write_json(ladder.to_json(), path)


def read_json(path: Path, build: Callable[[Any], Record]) -> Record:
    """What ``build`` makes of a JSON file; every ``UsageError``, its own too, names the file."""
    try:
        return build(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def write_json(data: Any, path: Path) -> None:
    """Write a JSON file whole or not at all: to a temporary name beside it, then renamed."""
    text = json.dumps(data, indent=1, allow_nan=True) + "\n"
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
