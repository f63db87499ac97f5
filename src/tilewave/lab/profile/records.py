"""What profiling found: frozen records that travel to JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tilewave.errors import UsageError
from tilewave.lab.records import read_json, write_json

FORMAT = 1
"""Version of the file's layout; a file of another version is refused, not guessed at."""

PREDICTION, EMULATOR, HARDWARE, CUBLAS = "prediction", "emulator", "hardware", "cuBLAS"
COLUMNS = (PREDICTION, EMULATOR, HARDWARE, CUBLAS)

NCU, SAVED, TIMING, EMULATED = "ncu", "saved report", "timing", "emulator"
"""How a profile's hardware figures were had: read by ncu now, or earlier; only times; none at all."""

FIGURES: dict[str, str] = {
    "milliseconds": "milliseconds",
    "tflops": "TFLOP/s",
    "registers": "registers a thread",
    "spill_store_bytes": "spilled bytes a thread",
    "static_shared_bytes": "shared bytes a block",
    "blocks_per_sm": "blocks an SM",
    "outputs_per_thread": "outputs a thread",
    "warp_instructions": "instructions",
    "thread_fma": "multiply-adds (threads)",
    "fma_share": "multiply-adds among instructions",
    "shared_loads": "shared reads",
    "shared_load_passes": "passes of shared reads",
    "passes_per_read": "passes a read",
    "shared_load_conflicts": "conflicts of shared reads",
    "shared_stores": "shared writes",
    "shared_store_passes": "passes of shared writes",
    "passes_per_write": "passes a write",
    "shared_store_conflicts": "conflicts of shared writes",
    "global_loads": "global reads",
    "global_load_sectors": "sectors of global reads and copies",
    "global_stores": "global writes",
    "global_store_sectors": "sectors of global writes",
    "local_loads": "local reads",
    "local_load_sectors": "sectors of local reads",
    "local_stores": "local writes",
    "local_store_sectors": "sectors of local writes",
    "copies": "asynchronous copies",
    "copy_sectors": "sectors of copies",
    "copy_passes": "passes of copies",
    "copy_conflicts": "conflicts of copies",
    "barriers": "barriers",
    "fma_pipe_percent": "FMA pipe in use, %",
    "issue_percent": "issue slots in use, %",
    "occupancy_percent": "warps resident, %",
}
"""Figures of a reading and their names for people, in the order in which they are shown.

Instructions and accesses count warps, as the profiler does; the emulator's instructions are those of the PTX.
``global_load_sectors`` holds those of asynchronous copies too, as the profiler's counter does.
"""


@dataclass(frozen=True)
class Reading:
    """One column of a kernel: figures by the keys of `FIGURES` (those that are known).

    ``stalls`` is the share of each reason in all stalled warps, empty where the profiler was not asked.
    """

    figures: Mapping[str, float] = field(default_factory=dict)
    stalls: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelProfile:
    """One rung: its columns by the names of `COLUMNS` (cuBLAS stands in `Profile.library`)."""

    rung: int
    title: str
    kernel: str
    readings: Mapping[str, Reading]


@dataclass(frozen=True)
class LibraryKernel:
    """A kernel that the library launched for the same product.

    ``threads`` are those of a block. ``tile`` is what the kernel's name says, None where it does not tell;
    ``derivation`` says in a sentence where ``outputs_per_thread`` comes from.
    """

    kernel: str
    reading: Reading
    threads: int | None = None
    blocks: int | None = None
    tile: tuple[int, ...] | None = None
    outputs_per_thread: float | None = None
    derivation: str = ""


@dataclass(frozen=True)
class Profile:
    """Rungs in columns at one size, N of the N x N x N product; ``how`` is `NCU` or one of its neighbours."""

    device: str
    size: int
    how: str
    environment: Mapping[str, Any]
    kernels: tuple[KernelProfile, ...] = ()
    library_name: str = ""
    library: tuple[LibraryKernel, ...] = ()
    profiler: str = ""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data for a JSON file."""
        return {"format": FORMAT, "kind": "profile", **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """Read `to_json`'s data; raises ``UsageError`` where it is no profile of this format."""
        kind = (data.get("kind"), data.get("format")) if isinstance(data, Mapping) else None
        if kind != ("profile", FORMAT):
            raise UsageError(f"not a profile of format {FORMAT}")
        values = {name: value for name, value in data.items() if name not in ("kind", "format")}
        try:
            values["kernels"] = tuple(_kernel(entry) for entry in values["kernels"])
            values["library"] = tuple(_library_kernel(entry) for entry in values["library"])
            values["notes"] = tuple(values["notes"])
            return cls(**values)
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"a damaged profile: {type(error).__name__}: {error}") from error


def _kernel(entry: Mapping[str, Any]) -> KernelProfile:
    readings = {column: Reading(**reading) for column, reading in entry["readings"].items()}
    return KernelProfile(**{**entry, "readings": readings})


def _library_kernel(entry: Mapping[str, Any]) -> LibraryKernel:
    tile = None if entry["tile"] is None else tuple(entry["tile"])
    return LibraryKernel(**{**entry, "reading": Reading(**entry["reading"]), "tile": tile})


def load_profile(path: Path) -> Profile:
    """Read a file that `tilewave profile --json` wrote; ``UsageError`` says what is wrong with it."""
    return read_json(path, Profile.from_json)


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile."""
    write_json(profile.to_json(), path)
