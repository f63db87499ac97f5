"""The emulator's half of the truth table: the probes and rungs of the plan, executed on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilewave.compiler import Program, Source, compile_source
from tilewave.device import get_spec
from tilewave.emulator import Memory, Module, launch, parse_ptx
from tilewave.lab.emulate import workspace_arguments
from tilewave.lab.launches import launch_of
from tilewave.lab.probes.maps import GLOBAL_BYTES, KINDS, LaneMap
from tilewave.lab.registry import Rung
from tilewave.lab.truth import DIGIT_BASE, Plan, Planned, group_of, overhead, probe_tables

ARCH = "sm_90a"
"""The architecture of the readings."""

GPU = "H200"
"""The GPU of the readings; launches of rungs with a schedule follow its number of SMs."""

COUNTERS = {
    "shared_load": {
        "instructions": "shared_loads",
        "passes": "shared_load_passes",
        "conflicts": "shared_load_conflicts",
    },
    "shared_store": {
        "instructions": "shared_stores",
        "passes": "shared_store_passes",
        "conflicts": "shared_store_conflicts",
    },
    "global_load": {"instructions": "global_loads", "sectors": "global_load_sectors"},
    "global_store": {"instructions": "global_stores", "sectors": "global_store_sectors"},
    "copy": {
        "instructions": "copies",
        "passes": "copy_passes",
        "conflicts": "copy_conflicts",
        "sectors": "copy_sectors",
        "hit_passes": "copy_hit_passes",
        "hit_conflicts": "copy_hit_conflicts",
    },
}
"""For each kind of probe, the emulator's counter of each figure."""


def emulate_maps(maps: Sequence[LaneMap]) -> dict[str, int]:
    """The figures of maps of one kind, each accessed once, summed: from the emulator running `access.cu`."""
    kind = maps[0].kind
    group = group_of(kind)
    planned = Planned(
        0, group, "", f"probe_{kind}", (len(maps), 1, 1), (32, 1, 1), kind, tuple(range(len(maps)))
    )
    plan = Plan("", ARCH, 0, tuple(maps), (planned,))
    memory = Memory()
    tables = [memory.put(table) for table in probe_tables(plan, planned, repeats=[1] * len(maps))]
    # As on the GPU the address is a multiple of the size: tag sets depend on its bits.
    data = memory.empty(2 * GLOBAL_BYTES // 4, name="data")
    address = -(-data.address // GLOBAL_BYTES) * GLOBAL_BYTES
    sums = memory.empty(32 * len(maps), np.uint32, name="sums")
    result = launch(
        probe_module(), planned.symbol, planned.grid, planned.block, [*tables, address, sums, 0], memory
    )
    return {
        figure: int(getattr(result.counters, counter)) - overhead(group, figure) * len(maps)
        for figure, counter in COUNTERS[group].items()
    }


def emulate_pair(lane_map: LaneMap) -> dict[str, int]:
    """Passes and conflicts of all copies of a pair's launch (`totals_of_pair`); either map of it will do."""
    figures = emulate_maps([lane_map])
    return {
        name: 2 * figures[name] + (DIGIT_BASE - 1) * figures[f"hit_{name}"]
        for name in ("passes", "conflicts")
    }


@dataclass(frozen=True)
class EmulatedRung:
    """A whole launch of a rung in the emulator."""

    compiler: str
    counts: dict[str, int]
    classes: dict[str, int]
    spills: bool


def emulate_rung(rung: Rung, shape: tuple[int, int, int]) -> EmulatedRung:
    """Compile a rung and execute all its blocks."""
    m, n, k = shape
    planned = launch_of(rung, m, n, k, get_spec(GPU))
    program = compile_source(rung.source(), rung.entries, ARCH)
    kernel = program.kernels[planned.entry]
    memory = Memory()
    rng = np.random.default_rng()
    operands = [memory.put(rng.standard_normal(extent, dtype=np.float32)) for extent in ((m, k), (k, n))]
    arguments = [*operands, memory.empty((m, n), name="C"), m, n, k, *workspace_arguments(planned, memory)]
    counters = launch(program.ptx, kernel.symbol, planned.grid, planned.block, arguments, memory).counters
    counts = {name: value for name, value in vars(counters).items() if isinstance(value, int)}
    resources = kernel.resources
    spills = resources.spill_store_bytes + resources.spill_load_bytes > 0
    return EmulatedRung(program.compiler, counts, dict(counters.warp_instructions_by_class), spills)


def compile_probes() -> Program:
    """The probes of `access.cu`, for the architecture of the readings."""
    return compile_source(Source.packaged("lab/probes/access.cu"), [f"probe_{kind}" for kind in KINDS], ARCH)


@functools.cache
def probe_module() -> Module:
    """The probes' PTX, parsed."""
    return parse_ptx(compile_probes().ptx)
