"""The profiler's metrics as figures of a reading, and what the name of a library's kernel tells."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tilewave.errors import UsageError
from tilewave.lab.ncu import KernelCounters
from tilewave.lab.probe_profile import STALLS, stall_shares
from tilewave.lab.profile.records import LibraryKernel, Reading
from tilewave.lab.truth import METRICS as COUNTED

COUNTERS: dict[str, tuple[str, ...]] = {
    figure: COUNTED["rung"][figure]
    for figure in (
        "warp_instructions",
        "thread_fma",
        "shared_loads",
        "shared_load_passes",
        "shared_load_conflicts",
        "shared_stores",
        "shared_store_passes",
        "shared_store_conflicts",
        "global_loads",
        "global_load_sectors",
        "global_stores",
        "global_store_sectors",
        "local_loads",
        "local_load_sectors",
        "local_stores",
        "local_store_sectors",
        "copies",
    )
}
"""Counts of a launch, and the names under which the profiler may have them."""

_SHARES: dict[str, tuple[str, ...]] = {
    "fma_pipe_percent": ("sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",),
    "issue_percent": (
        "smsp__issue_active.avg.pct_of_peak_sustained_active",
        "smsp__issue_active.avg.pct",
    ),
    "occupancy_percent": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
}
DURATION = "gpu__time_duration.sum"
REGISTERS = "launch__registers_per_thread"
THREADS, BLOCKS = "launch__block_size", "launch__grid_size"
_LIMITS = "launch__occupancy_limit_"
_MILLISECONDS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}
_RUNG = re.compile(r"\bsgemm_(\d\d)_\w+")
_TILE_IN_NAME = (
    re.compile(r"tilesize(\d+)x(\d+)x(\d+)"),
    re.compile(r"GemmShape<\D*(\d+),\D*(\d+),\D*(\d+)>"),
    re.compile(r"_(\d+)x(\d+)_(\d+)x\d+(?:_|\b)"),
    re.compile(r"sgemm_(?:\w*?_)?(\d+)x(\d+)(?:_|\b)"),
)
"""How cuBLAS names its kernels' tiles: xmma, CUTLASS's templates and their short names, hand-written ones."""


def wanted_metrics() -> list[str]:
    """All names to ask the profiler for; what a launch looks like (``launch__...``) it tells unasked."""
    names = [name for group in (COUNTERS, _SHARES) for found in group.values() for name in found]
    return [*names, DURATION, *map(_stall, STALLS)]


def _stall(reason: str) -> str:
    return f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"


def rung_of(kernel: str) -> int | None:
    """The number of the rung that a kernel's name belongs to; None for another's kernel."""
    found = _RUNG.search(kernel)
    return int(found[1]) if found else None


def reading_of(counters: KernelCounters, size: int) -> Reading:
    """A launch's figures, for an N x N x N product of ``size``."""
    metrics = counters.metrics
    figures: dict[str, float] = {}
    for figure, names in (COUNTERS | _SHARES | {"registers": (REGISTERS,)}).items():
        name = next((name for name in names if name in metrics), None)
        if name is not None:
            figures[figure] = metrics[name]
    if DURATION in metrics:
        figures["milliseconds"] = metrics[DURATION] * _to_milliseconds(counters.units.get(DURATION, "ns"))
        if figures["milliseconds"]:
            figures["tflops"] = 2.0 * size**3 / figures["milliseconds"] * 1e-9
    limits = [value for name, value in metrics.items() if name.startswith(_LIMITS) and value > 0]
    if limits:
        figures["blocks_per_sm"] = min(limits)
    return Reading(figures | derived(figures), stall_shares(metrics))


def _to_milliseconds(unit: str) -> float:
    short = unit.replace("second", "s")
    if short not in _MILLISECONDS:
        raise UsageError(f"the report gives times in {unit!r}; {', '.join(_MILLISECONDS)} are understood")
    return _MILLISECONDS[short]


def derived(figures: Mapping[str, float]) -> dict[str, float]:
    """What follows from other figures: passes for each access, and the share of multiply-adds."""
    found = {}
    for name, top, bottom, scale in (
        ("passes_per_read", "shared_load_passes", "shared_loads", 1.0),
        ("passes_per_write", "shared_store_passes", "shared_stores", 1.0),
        ("fma_share", "thread_fma", "warp_instructions", 32.0),
    ):
        if figures.get(bottom) and top in figures:
            found[name] = figures[top] / figures[bottom] / scale
    return found


def tile_in_name(kernel: str) -> tuple[int, ...] | None:
    """The extents of a block's tile as a library's kernel is named after them; None if it is not."""
    for pattern in _TILE_IN_NAME:
        found = pattern.search(kernel)
        if found:
            return tuple(map(int, found.groups()))
    return None


def library_kernel(counters: KernelCounters, size: int) -> LibraryKernel:
    """A library's kernel: its reading, and how many outputs each thread computes, if that can be told."""
    metrics = counters.metrics
    threads, blocks = (int(metrics[name]) if metrics.get(name) else None for name in (THREADS, BLOCKS))
    tile = tile_in_name(counters.kernel)
    outputs, derivation = _outputs(tile, threads, blocks, size)
    reading = reading_of(counters, size)
    if outputs is not None:
        reading = Reading({**reading.figures, "outputs_per_thread": outputs}, reading.stalls)
    return LibraryKernel(counters.kernel, reading, threads, blocks, tile, outputs, derivation)


def _outputs(
    tile: tuple[int, ...] | None, threads: int | None, blocks: int | None, size: int
) -> tuple[float | None, str]:
    if tile is None:
        return None, "the kernel's name tells no tile"
    rows, columns = tile[:2]
    if threads is None:
        return None, f"the kernel's name tells a tile of {rows} x {columns}; its threads are not known"
    outputs = rows * columns / threads
    words = (
        f"the kernel's name tells a tile of {rows} x {columns}; shared out to the {threads} threads of a "
        f"block that is {outputs:g} outputs a thread"
    )
    if blocks is None:
        return outputs, words
    tiles = -(-size // rows) * -(-size // columns)
    if blocks == tiles:
        return outputs, f"{words}; {blocks} such blocks are just what N = {size} takes"
    return outputs, (
        f"{words}; N = {size} takes {tiles} such tiles and the grid has {blocks} blocks, so blocks share "
        "tiles, or walk through several"
    )
