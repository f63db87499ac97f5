"""The emulator's half of the truth table: the probes and rungs of the plan, executed on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from tilewave.compiler import Program, Source, compile_source
from tilewave.emulator import Memory, Module, launch, parse_ptx
from tilewave.lab.probes.maps import GLOBAL_BYTES, KINDS, LaneMap
from tilewave.lab.registry import Rung
from tilewave.lab.truth import Plan, Planned, group_of, overhead, probe_tables

ARCH = "sm_90a"
"""The architecture of the readings."""

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
    "copy": {"instructions": "copies", "passes": "copy_passes", "sectors": "copy_sectors"},
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
    data = memory.empty(GLOBAL_BYTES // 4, name="data")
    sums = memory.empty(32 * len(maps), np.uint32, name="sums")
    result = launch(
        probe_module(), planned.symbol, planned.grid, planned.block, [*tables, data, sums, 0], memory
    )
    return {
        figure: int(getattr(result.counters, counter)) - overhead(group, figure) * len(maps)
        for figure, counter in COUNTERS[group].items()
    }


def emulate_rung(rung: Rung, shape: tuple[int, int, int]) -> dict[str, int]:
    """The emulator's counters of a rung's whole launch."""
    m, n, k = shape
    entry = rung.entry_for(m, n, k)
    program = compile_source(rung.source(), rung.entries, ARCH)
    memory = Memory()
    rng = np.random.default_rng()
    operands = [memory.put(rng.standard_normal(extent, dtype=np.float32)) for extent in ((m, k), (k, n))]
    arguments = [*operands, memory.empty((m, n), name="C"), m, n, k]
    symbol = program.kernels[entry].symbol
    counters = launch(program.ptx, symbol, rung.grid(m, n), rung.block, arguments, memory).counters
    return {name: int(value) for name, value in vars(counters).items() if isinstance(value, (int, float))}


def compile_probes() -> Program:
    """The probes of `access.cu`, for the architecture of the readings."""
    return compile_source(Source.packaged("lab/probes/access.cu"), [f"probe_{kind}" for kind in KINDS], ARCH)


@functools.cache
def probe_module() -> Module:
    """The probes' PTX, parsed."""
    return parse_ptx(compile_probes().ptx)
