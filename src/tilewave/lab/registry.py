"""The registry of rungs: ``rungs.toml`` as checked, frozen records.

Ladder, tests and docs read what a rung is, needs and predicts from here and from nowhere else.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib import resources
from numbers import Integral
from typing import Any, TypeVar

from tilewave.compiler import Source
from tilewave.errors import UsageError

COUNTERS = frozenset(
    {
        "warp_instructions",
        "thread_fma",
        "barriers",
        "copies",
        "copy_sectors",
        "copy_passes",
        "copy_conflicts",
        *(f"{space}_{kind}s" for space in ("shared", "global", "local") for kind in ("load", "store")),
        *(f"{space}_{kind}_sectors" for space in ("global", "local") for kind in ("load", "store")),
        *(f"shared_{kind}_{what}" for kind in ("load", "store") for what in ("passes", "conflicts")),
    }
)
"""Counters of a launch that a rung may predict; docs/architecture.md says what each counts."""

RESOURCES = frozenset({"registers", "spill_store_bytes", "static_shared_bytes", "blocks_per_sm"})
"""Figures of the compiled kernel that a rung may predict; ``blocks_per_sm`` is the GB10's."""

MAX_SIZE = 2**31 - 256
"""The largest M, N or K: the kernels count in 32-bit integers and look up to one tile past the edge."""

MAX_BLOCKS_Y = 65_535
"""CUDA's limit for the y extent of a grid, which runs along the rows of C."""


@dataclass(frozen=True)
class Tile:
    """Extents in elements: block tile ``bm`` x ``bn``, slice depth ``bk``, warp tile, thread patch."""

    bm: int
    bn: int
    bk: int
    wm: int
    wn: int
    tm: int
    tn: int


@dataclass(frozen=True)
class Needs:
    """What ``entry`` requires of the sizes; ``ragged_entry`` runs at all others."""

    n_multiple: int
    k_multiple: int


@dataclass(frozen=True)
class Prediction:
    """A counter or resource figure that a rung should change.

    Exactly one of ``ratio`` (to the rung it builds on) and ``value`` is given, for M = N = K = ``size``. With
    ``sms`` it holds on GPUs with so many SMs only, whose number a rung's schedule follows.
    """

    counter: str
    size: int
    why: str
    ratio: float | None = None
    value: float | None = None
    sms: int | None = None

    def __str__(self) -> str:
        wanted = f"x {self.ratio:.3g}" if self.ratio is not None else f"= {self.value:,.0f}"
        where = "" if self.sms is None else f" on {self.sms} SMs"
        return f"{self.counter} {wanted} at {self.size}{where}"


@dataclass(frozen=True)
class Reported:
    """What the article measured on the GB10: throughput against the rung before, and other figures.

    ``gain`` is the throughput's change as a fraction at N = 2048. All empty where the article is silent.
    """

    throughput: str = ""
    figures: str = ""
    gain: float | None = None

    def __str__(self) -> str:
        return self.throughput or "not in the article"


SCHEDULES = ("split_k", "stream_k_walk", "stream_k_sixteen", "stream_k", "select")
"""How a rung may deal its tiles to blocks; `tilewave.lab.launches` says what each means."""


@dataclass(frozen=True)
class RungSchedule:
    """How a rung deals tiles to blocks: one of `SCHEDULES`, with its own arguments, workspace and tickets.

    ``pieces`` belongs to ``split_k``; ``family``, the planner's set of candidates, to ``select``.
    """

    kind: str
    pieces: int | None = None
    family: str | None = None


@dataclass(frozen=True)
class Alternative:
    """The other kernel that a selecting rung may launch, for a tile of its own."""

    entry: str
    ragged_entry: str
    tile: Tile
    block: tuple[int, int, int]


@dataclass(frozen=True)
class Rung:
    """One step of the ladder: a complete kernel, what it needs, and what it should change."""

    number: int
    name: str
    file: str
    entry: str
    idea: str
    tile: Tile
    block: tuple[int, int, int]
    independent_fmas: int
    constraints: tuple[str, ...]
    tolerance: float
    predictions: tuple[Prediction, ...]
    reported: Reported
    builds_on: int | None = None
    ragged_entry: str | None = None
    needs: Needs | None = None
    schedule: RungSchedule | None = None
    alternative: Alternative | None = None

    @property
    def title(self) -> str:
        """Number and name for people, such as ``05 course``."""
        return f"{self.number:02d} {self.name.replace('_', ' ')}"

    @property
    def entries(self) -> tuple[str, ...]:
        """The name expressions of all kernels of this rung."""
        own = (self.entry,) if self.ragged_entry is None else (self.entry, self.ragged_entry)
        other = self.alternative
        return own if other is None else (*own, other.entry, other.ragged_entry)

    def threads_of(self, entry: str) -> int:
        """Threads of a block of one of the rung's kernels."""
        other = self.alternative
        if other is not None and entry in (other.entry, other.ragged_entry):
            return math.prod(other.block)
        return self.threads

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return math.prod(self.block)

    def source(self) -> Source:
        """The rung's file, ready to compile."""
        return Source.packaged(f"lab/rungs/{self.file}")

    def entry_for(self, m: int, n: int, k: int) -> str:
        """The name expression of the kernel that computes an M x N x K product.

        Raises ``UsageError`` for sizes that the rung does not take.
        """
        for what, size in (("M", m), ("N", n), ("K", k)):
            self._check_size(what, size)
        if self.ragged_entry is None or self.needs is None:
            return self.entry
        fits = n % self.needs.n_multiple == 0 and k % self.needs.k_multiple == 0
        return self.entry if fits else self.ragged_entry

    def grid(self, m: int, n: int) -> tuple[int, int, int]:
        """Blocks in x (along the columns of C), y (along its rows) and z for an M x N result.

        That is a block a tile; a rung with a schedule has another grid (`tilewave.lab.launches`).
        Raises ``UsageError`` for sizes that the rung does not take.
        """
        self._check_size("M", m)
        self._check_size("N", n)
        rows = -(-m // self.tile.bm)
        if rows > MAX_BLOCKS_Y:
            raise UsageError(
                f"M = {m:,} is too large for rung {self.title}: a grid has at most {MAX_BLOCKS_Y:,} rows of "
                f"blocks, so M may be at most {MAX_BLOCKS_Y * self.tile.bm:,}"
            )
        return -(-n // self.tile.bn), rows, 1

    def _check_size(self, what: str, size: Any) -> None:
        if not isinstance(size, Integral) or not 1 <= int(size) <= MAX_SIZE:
            raise UsageError(f"{what} = {size!r} for rung {self.title}: sizes go from 1 to {MAX_SIZE:,}")


@cache
def load_rungs() -> tuple[Rung, ...]:
    """All rungs in the order of their numbers."""
    path = resources.files("tilewave") / "lab" / "rungs.toml"
    return parse_rungs(path.read_text(encoding="utf-8"))


def get_rung(number_or_name: int | str) -> Rung:
    """The rung of a number (``5``, ``"05"``) or name (``"course"``, ``"05_course"``)."""
    wanted = str(number_or_name).strip().lower().removesuffix(".cu")
    for rung in load_rungs():
        names = {rung.name, f"{rung.number:02d}_{rung.name}", str(rung.number), f"{rung.number:02d}"}
        if wanted in names:
            return rung
    known = ", ".join(f"{rung.number:02d} {rung.name}" for rung in load_rungs())
    raise UsageError(f"there is no rung {number_or_name!r}; there are {known}")


def parse_rungs(text: str) -> tuple[Rung, ...]:
    """The rungs of a registry in TOML; raises ``UsageError`` that says what is wrong with which rung."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"rungs.toml is not TOML: {error}") from error
    if set(tables) != {"rung"} or not isinstance(tables["rung"], list):
        raise UsageError("rungs.toml should hold [[rung]] tables and nothing else")
    rungs = tuple(_rung(table, position) for position, table in enumerate(tables["rung"], start=1))
    for before, rung in zip((None, *rungs), rungs, strict=False):
        _check_rung(rung, before, rungs)
    return rungs


def _rung(table: Mapping[str, Any], position: int) -> Rung:
    where = f"rung {table.get('number', f'at position {position}')} of rungs.toml"
    values = dict(table)
    for key, record in (
        ("tile", Tile),
        ("needs", Needs),
        ("reported", Reported),
        ("schedule", RungSchedule),
    ):
        if key in values:
            values[key] = _record(record, values[key], f"{key} of {where}")
    if "alternative" in values:
        values["alternative"] = _alternative(values["alternative"], f"alternative of {where}")
    for key in ("block", "constraints", "predictions"):
        if not isinstance(values.get(key, []), list):
            raise UsageError(f"{key} of {where} should be a list, not {values[key]!r}")
    values["block"] = tuple(values.get("block", ()))
    values["constraints"] = tuple(values.get("constraints", ()))
    values["predictions"] = tuple(
        _record(Prediction, item, f"a prediction of {where}") for item in values.get("predictions", ())
    )
    return _record(Rung, values, where)


def _alternative(table: Any, where: str) -> Alternative:
    values = dict(table) if isinstance(table, Mapping) else table
    if isinstance(values, dict):
        if "tile" in values:
            values["tile"] = _record(Tile, values["tile"], f"tile of {where}")
        if "block" in values:
            if not isinstance(values["block"], list):
                raise UsageError(f"block of {where} should be a list, not {values['block']!r}")
            values["block"] = tuple(values["block"])
    return _record(Alternative, values, where)


_Record = TypeVar("_Record")

# What TOML may hold for each type that the records use; the composite ones are built before.
_ACCEPTED: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "int | None": int,
    "str": str,
    "str | None": str,
    "float": (int, float),
    "float | None": (int, float),
}


def _record(record: type[_Record], values: Any, where: str) -> _Record:
    """Build ``record`` from a TOML table, refusing unknown, missing and ill-typed keys."""
    if not isinstance(values, Mapping):
        raise UsageError(f"{where} should be a table, not {values!r}")
    known = {item.name: item for item in fields(record)}  # type: ignore[arg-type]
    if unknown := sorted(set(values) - set(known)):
        raise UsageError(f"{where} has unknown keys {', '.join(unknown)}; known are {', '.join(known)}")
    required = [name for name, item in known.items() if item.default is MISSING]
    if missing := [name for name in required if name not in values]:
        raise UsageError(f"{where} lacks {', '.join(missing)}")
    for name, value in values.items():
        accepted = _ACCEPTED.get(str(known[name].type))
        if accepted is not None and (isinstance(value, bool) or not isinstance(value, accepted)):
            raise UsageError(f"{name} of {where} should be {known[name].type}, not {value!r}")
    return record(**values)


def _check_rung(rung: Rung, before: Rung | None, rungs: tuple[Rung, ...]) -> None:
    """Refuse a rung that contradicts itself or its neighbours."""

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise UsageError(f"rung {rung.number} of rungs.toml: {message}")

    stem = f"{rung.number:02d}_{rung.name}"
    require(before is None or rung.number > before.number, "numbers should rise")
    require(
        rung.name not in {other.name for other in rungs if other is not rung}, f"name {rung.name!r} is taken"
    )
    require(rung.file == f"{stem}.cu", f"file should be {stem}.cu, not {rung.file!r}")
    directory = resources.files("tilewave") / "lab" / "rungs"
    require((directory / rung.file).is_file(), f"there is no file {rung.file}")
    for entry in rung.entries:
        require(entry.partition("<")[0] == f"sgemm_{stem}", f"entry {entry!r} should be sgemm_{stem}")
    require((rung.ragged_entry is None) == (rung.needs is None), "ragged_entry and needs go together")
    if rung.needs is not None:
        require(min(rung.needs.n_multiple, rung.needs.k_multiple) >= 1, "multiples should be at least 1")
    require(
        rung.builds_on is None or any(other.number == rung.builds_on < rung.number for other in rungs),
        f"builds_on = {rung.builds_on} is no earlier rung",
    )

    shapes = [(rung.tile, rung.block)]
    if rung.alternative is not None:
        shapes.append((rung.alternative.tile, rung.alternative.block))
    for tile, block in shapes:
        require(
            len(block) == 3 and all(isinstance(n, int) and n >= 1 for n in block), "block should be x, y, z"
        )
        require(
            min(getattr(tile, item.name) for item in fields(Tile)) >= 1, "tile extents should be at least 1"
        )
        require(tile.bm % tile.wm == 0 and tile.bn % tile.wn == 0, "warp tiles should fill the block's tile")
        require(tile.wm % tile.tm == 0 and tile.wn % tile.tn == 0, "patches should fill the warp's tile")
        require(tile.wm * tile.wn == 32 * tile.tm * tile.tn, "a warp's tile should be 32 patches")
        require(
            tile.bm * tile.bn == math.prod(block) * tile.tm * tile.tn,
            "the block's tile should be one patch a thread",
        )
    _check_schedule(rung, require)
    tile = rung.tile
    require(rung.independent_fmas == tile.tm * tile.tn, "independent_fmas should be tm x tn")
    require(rung.tolerance > 0, "tolerance should be positive")
    require(all(isinstance(line, str) for line in rung.constraints), "constraints should be strings")
    for prediction in rung.predictions:
        require(
            prediction.counter in COUNTERS | RESOURCES,
            f"unknown counter {prediction.counter!r}; known are {', '.join(sorted(COUNTERS | RESOURCES))}",
        )
        require(
            (prediction.ratio is None) != (prediction.value is None), "a prediction is a ratio or a value"
        )
        require(prediction.ratio is None or rung.builds_on is not None, "a ratio needs builds_on")
        require(1 <= prediction.size <= MAX_SIZE, f"size of a prediction goes from 1 to {MAX_SIZE}")
        require(prediction.sms is None or prediction.sms >= 1, "sms should be at least 1")
        require(prediction.sms is None or rung.schedule is not None, "only a schedule follows the SMs")


def _check_schedule(rung: Rung, require: Callable[[bool, str], None]) -> None:
    """Refuse a schedule that is unknown or lacks what it needs."""
    schedule = rung.schedule
    kind = None if schedule is None else schedule.kind
    require(kind is None or kind in SCHEDULES, f"schedule {kind!r} is none of {', '.join(SCHEDULES)}")
    pieces = None if schedule is None else schedule.pieces
    require((pieces is not None) == (kind == "split_k"), "pieces belong to a split_k schedule")
    require(pieces is None or pieces >= 2, "a split_k schedule needs at least 2 pieces")
    family = None if schedule is None else schedule.family
    require((family is not None) == (kind == "select"), "a family belongs to a select schedule")
    require(
        (rung.alternative is not None) == (kind == "select"), "an alternative belongs to a select schedule"
    )
