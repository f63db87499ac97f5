"""The truth table: what the profiler counts for known accesses, beside what the emulator counts.

A *bundle* is a folder that a machine with a GPU needs to take the readings: `plan.json` (lane maps and
launches) and the cubins. `prepare` makes it without a GPU, `run_launches` executes launches of it (under the
profiler), `readings` turns the profiler's sums back into figures of single accesses.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewave.errors import UsageError
from tilewave.lab.ncu import KernelCounters
from tilewave.lab.probes.maps import GLOBAL_BYTES, KINDS, LaneMap, named_maps, random_maps, repeated_maps

if TYPE_CHECKING:
    from tilewave.runtime.driver import DeviceArray

MAPS_PER_LAUNCH = 3
DIGIT_BASE = 64
"""Map i of a launch is repeated DIGIT_BASE^i times, so that one counter holds the figures of all its maps."""

_LSU = "l1tex__data_pipe_lsu_wavefronts_mem_shared"
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared"

METRICS: dict[str, dict[str, tuple[str, ...]]] = {
    "shared_load": {
        "instructions": ("smsp__inst_executed_op_shared_ld.sum",),
        "passes": (f"{_LSU}_op_ld.sum",),
        "conflicts": (f"{_CONFLICTS}_op_ld.sum",),
    },
    "shared_store": {
        "instructions": ("smsp__inst_executed_op_shared_st.sum",),
        "passes": (f"{_LSU}_op_st.sum",),
        "conflicts": (f"{_CONFLICTS}_op_st.sum",),
    },
    "global_load": {
        "instructions": ("smsp__inst_executed_op_global_ld.sum",),
        "requests": ("l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",),
        "sectors": ("l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",),
    },
    "global_store": {
        "instructions": ("smsp__inst_executed_op_global_st.sum",),
        "requests": ("l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",),
        "sectors": ("l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",),
    },
    "copy": {
        "instructions": ("smsp__inst_executed_op_ldgsts.sum",),
        "all_passes": (f"{_LSU}.sum",),
        "conflicts": (f"{_CONFLICTS}_op_ldgsts.sum",),
        # This counter holds the sectors of copies too, of both ways (through L1 and past it).
        "load_sectors": ("l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",),
        "load_requests": ("l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",),
        "sectors_access": ("l1tex__t_sectors_pipe_lsu_mem_global_op_ldgsts_cache_access.sum",),
        "requests_access": ("l1tex__t_requests_pipe_lsu_mem_global_op_ldgsts_cache_access.sum",),
        "lookups": ("l1tex__t_output_wavefronts_pipe_lsu_mem_global_op_ldgsts_cache_access.sum",),
        "set_conflicts": ("l1tex__t_set_conflicts_pipe_lsu_mem_global_op_ldgsts_cache_access.sum",),
        "l2_sectors": ("l1tex__m_xbar2l1tex_read_sectors_pipe_lsu.sum",),
        "bank_writes": ("l1tex__data_bank_writes.sum",),
    },
}
"""For each kind of probe, the figures that are read, and the names under which the profiler may have them."""

METRICS["rung"] = {
    "warp_instructions": ("smsp__inst_executed.sum",),
    "thread_fma": ("smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",),
    "shared_loads": METRICS["shared_load"]["instructions"],
    "shared_load_passes": METRICS["shared_load"]["passes"],
    "shared_load_conflicts": METRICS["shared_load"]["conflicts"],
    "shared_stores": METRICS["shared_store"]["instructions"],
    "shared_store_passes": METRICS["shared_store"]["passes"],
    "shared_store_conflicts": METRICS["shared_store"]["conflicts"],
    "global_loads": METRICS["global_load"]["instructions"],
    "global_load_requests": METRICS["global_load"]["requests"],
    "global_load_sectors": METRICS["global_load"]["sectors"],
    "global_stores": METRICS["global_store"]["instructions"],
    "global_store_requests": METRICS["global_store"]["requests"],
    "global_store_sectors": METRICS["global_store"]["sectors"],
    "local_loads": ("smsp__inst_executed_op_local_ld.sum",),
    "local_load_sectors": ("l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum",),
    "local_stores": ("smsp__inst_executed_op_local_st.sum",),
    "local_store_sectors": ("l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum",),
    "copies": METRICS["copy"]["instructions"],
    "copy_conflicts": METRICS["copy"]["conflicts"],
    "copy_sectors_access": METRICS["copy"]["sectors_access"],
    "all_passes": METRICS["copy"]["all_passes"],
    "barriers": ("smsp__inst_executed_op_barrier.sum", "smsp__inst_executed_pipe_adu.sum"),
    "fp32_pipe": ("smsp__inst_executed_pipe_fma.sum",),
    "integer_pipe": ("smsp__inst_executed_pipe_alu.sum",),
    "uniform_pipe": ("smsp__inst_executed_pipe_uniform.sum",),
    "branches": ("smsp__inst_executed_pipe_cbu.sum",),
    "lsu_pipe": ("smsp__inst_executed_pipe_lsu.sum",),
}


def group_of(kind: str) -> str:
    """The key of `METRICS` for a probe's kind."""
    return "copy" if kind.startswith("copy") else kind.rsplit("_", 1)[0]


@dataclass(frozen=True)
class Planned:
    """One launch: a probe with its maps and how often each is repeated, or a rung at a size."""

    index: int
    group: str
    cubin: str
    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    label: str
    maps: tuple[int, ...] = ()
    shape: tuple[int, int, int] | None = None
    source: str = ""
    """For a rung, `digest_of` its source."""
    integers: tuple[int, ...] | None = None
    """For a rung with a schedule, its arguments behind workspace and counters."""
    partial_floats: int = 0
    tickets: int = 0

    @property
    def repeats(self) -> tuple[int, ...]:
        """How often each map's access is executed."""
        return tuple(DIGIT_BASE**i for i in range(len(self.maps)))


@dataclass(frozen=True)
class Plan:
    """Lane maps and launches; the order of the launches is their priority."""

    compiler: str
    arch: str
    seed: int
    maps: tuple[LaneMap, ...]
    launches: tuple[Planned, ...]

    def save(self, path: Path) -> None:
        """Write the plan as JSON."""
        data = {
            "compiler": self.compiler,
            "arch": self.arch,
            "seed": self.seed,
            "maps": [map_to_json(lane_map) for lane_map in self.maps],
            "launches": [vars(launch) for launch in self.launches],
        }
        path.write_text(json.dumps(data))

    @staticmethod
    def load(path: Path) -> Plan:
        """Read a plan."""
        data = json.loads(path.read_text())
        launches = []
        for entry in data["launches"]:
            for name in ("grid", "block", "maps", "shape", "integers"):
                entry[name] = None if entry.get(name) is None else tuple(entry[name])
            launches.append(Planned(**entry))
        maps = tuple(map_from_json(entry) for entry in data["maps"])
        return Plan(data["compiler"], data["arch"], data["seed"], maps, tuple(launches))


def map_to_json(lane_map: LaneMap) -> dict[str, Any]:
    """A lane map as plain data, compact enough for a committed file."""
    entry = {
        "kind": lane_map.kind,
        "name": lane_map.name,
        "offsets": " ".join(map(str, lane_map.offsets.tolist())),
        "active": f"{lane_map.mask_bits:08x}",
    }
    if lane_map.space == "copy":
        entry["sources"] = " ".join(map(str, lane_map.sources.tolist()))
    return entry


def map_from_json(entry: Mapping[str, Any]) -> LaneMap:
    """The inverse of `map_to_json`."""
    offsets = np.array(entry["offsets"].split(), dtype=np.int64)
    sources = np.array(entry["sources"].split(), dtype=np.int64) if "sources" in entry else 0 * offsets
    active = (int(entry["active"], 16) >> np.arange(32)) & 1 == 1
    return LaneMap(entry["name"], entry["kind"], offsets, active, sources)


def digest_of(source: str) -> str:
    """A short digest of CUDA source that comments and white space do not change."""
    code = re.sub(r"//.*?$|/\*.*?\*/", " ", source, flags=re.MULTILINE | re.DOTALL)
    return hashlib.sha256(" ".join(code.split()).encode()).hexdigest()[:16]


def plan_maps(
    seed: int, random_per_kind: Mapping[str, int], known: Container[tuple[str, str]] = ()
) -> list[tuple[int, list[LaneMap]]]:
    """All maps in batches for one launch each, with the priority of the launch (0 is read first).

    Maps whose (kind, name) is `known` are left out, and the random ones get numbers that are not known.
    """
    rng = np.random.default_rng(seed)
    batches = []
    for kind in KINDS:
        named = [lane_map for lane_map in named_maps(kind) if (kind, lane_map.name) not in known]
        first = next(index for index in itertools.count() if (kind, f"random {index}") not in known)
        drawn = list(random_maps(kind, random_per_kind[group_of(kind)], rng, first))
        # Two copies in flight would disturb each other's counts: one map a launch.
        size = 1 if kind.startswith("copy") else MAPS_PER_LAUNCH
        rules_are_new = kind.startswith(("copy", "shared_load_16"))
        for priority, maps in ((0, named), (1 if rules_are_new else 2, drawn)):
            batches += [(priority, maps[i : i + size]) for i in range(0, len(maps), size)]
        if kind.startswith("copy"):
            batches += [(0, [*pair]) for pair in repeated_maps(kind) if (kind, pair[1].name) not in known]
    return batches


def run_launches(folder: Path, plan: Plan, launches: Iterable[Planned]) -> None:
    """Execute launches on the GPU of this machine, in order (the profiler reads their counters)."""
    from tilewave.runtime.driver import Device, DeviceArray, Function, Module, Stream

    device = Device()
    stream = Stream(device)
    functions: dict[tuple[str, str], Function] = {}
    modules: dict[str, Module] = {}
    data = aligned(DeviceArray.empty(device, (2 * GLOBAL_BYTES // 4,)))
    data.poison()
    rng = np.random.default_rng(plan.seed)
    for planned in launches:
        if planned.cubin not in modules:
            modules[planned.cubin] = Module(device, (folder / planned.cubin).read_bytes())
        key = (planned.cubin, planned.symbol)
        if key not in functions:
            functions[key] = modules[planned.cubin].function(planned.symbol)
        if planned.shape is not None:
            m, n, k = planned.shape
            a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in ((m, k), (k, n)))
            operands = [DeviceArray.from_numpy(device, operand) for operand in (a, b)]
            result = DeviceArray.empty(device, (m, n))
            result.poison()
            arguments: list[Any] = [*operands, result, m, n, k]
            if planned.integers is not None:
                partials = DeviceArray.empty(device, (max(1, planned.partial_floats),))
                partials.poison()
                tickets = DeviceArray.from_numpy(device, np.zeros(max(1, planned.tickets), np.uint32))
                arguments += [partials, tickets, *planned.integers]
        else:
            tables = [DeviceArray.from_numpy(device, table) for table in probe_tables(plan, planned)]
            sums = DeviceArray.empty(device, (32 * len(planned.maps),), np.uint32)
            arguments = [*tables, data, sums, 0]
        functions[key].prepare(planned.grid, planned.block, arguments, stream)()
        device.synchronize()


def aligned(array: DeviceArray) -> DeviceArray:
    """The part, `GLOBAL_BYTES` long, of an array twice as long that begins at a multiple of that length."""
    words = GLOBAL_BYTES // 4
    return array.view(-array.address % GLOBAL_BYTES // 4, (words,))


def probe_tables(plan: Plan, planned: Planned, repeats: Sequence[int] | None = None) -> list[Any]:
    """The arrays `offsets`, `sources`, `active` and `repeats` of a probe's launch."""
    maps = [plan.maps[index] for index in planned.maps]
    offsets = np.stack([lane_map.offsets for lane_map in maps]).astype(np.uint32)
    sources = np.stack([lane_map.sources for lane_map in maps]).astype(np.uint32)
    active = np.array([lane_map.mask_bits for lane_map in maps], dtype=np.uint32)
    return [offsets, sources, active, np.array(repeats or planned.repeats, dtype=np.uint32)]


def overhead(group: str, figure: str) -> int:
    """What a block's own reading of its tables adds to a counter (see access.cu)."""
    if group == "copy":
        return {"load_sectors": 10, "load_requests": 4, "l2_sectors": 10}.get(figure, 0)
    return {
        ("global_load", "instructions"): 3,
        ("global_load", "requests"): 3,
        ("global_load", "sectors"): 6,
        ("global_store", "instructions"): 1,
        ("global_store", "requests"): 1,
        ("global_store", "sectors"): 4,
    }.get((group, figure), 0)


def select_metrics(group: str, available: frozenset[str]) -> tuple[dict[str, str], list[str]]:
    """For each figure of a group the first of its names that exists; and the figures without one."""
    chosen, missing = {}, []
    for figure, names in METRICS[group].items():
        found = next((name for name in names if name.split(".")[0] in available), None)
        if found is None:
            missing.append(figure)
        else:
            chosen[figure] = found
    return chosen, missing


def readings(planned: Planned, counters: KernelCounters, metrics: Mapping[str, str]) -> list[dict[str, int]]:
    """The figures of each map of a launch (or of the rung, as one entry) from the profiler's sums."""
    if re.sub(r"\W.*", "", counters.kernel) != planned.symbol and planned.shape is None:
        raise UsageError(f"launch {planned.index} should be {planned.symbol}, but is {counters.kernel}")
    entries: list[dict[str, int]] = [{} for _ in planned.maps or (None,)]
    for figure, metric in metrics.items():
        if metric not in counters.metrics:
            continue
        total = int(counters.metrics[metric])
        if planned.shape is not None:
            entries[0][figure] = total
            continue
        digits = digits_of(total - overhead(planned.group, figure) * len(entries), len(entries))
        for entry, digit in zip(entries, digits, strict=True):
            entry[figure] = digit
    return entries


PASSES_BESIDE_A_COPY = 3
"""Passes of the three shared loads without a lane that the assembler puts in front of each copy."""

PASSES_OF_A_BLOCK = 1
"""Passes that a copy's probe shows once a block; of what is not known."""


def comparable(lane_map: LaneMap, figures: Mapping[str, int]) -> dict[str, int]:
    """A map's figures under the emulator's names.

    Copies past L1 have no counter of passes of their own: theirs are what the counter of all passes shows
    above the instructions beside the copy. In that counter an instruction without active lanes takes one, as
    it does not in those of single kinds. Of a pair of maps `totals_of_pair` gives passes and conflicts.
    """
    result = {
        name: figures[name] for name in ("instructions", "passes", "conflicts", "sectors") if name in figures
    }
    if lane_map.space == "copy":
        idle = not (lane_map.active.any() or "zfill" in lane_map.kind)
        result["passes"] = figures["all_passes"] - PASSES_BESIDE_A_COPY - PASSES_OF_A_BLOCK - idle
        result["sectors"] = figures["load_sectors"]
    if lane_map.is_of_a_pair:
        del result["passes"], result["conflicts"]
    return result


def totals_of_pair(once: Mapping[str, int], repeated: Mapping[str, int]) -> dict[str, int]:
    """Passes and conflicts of all the copies of a pair's launch, from the digits that were taken for figures.

    Of its 1 + `DIGIT_BASE` copies the first of each block misses L1, and the others hit.
    """
    copies = 1 + DIGIT_BASE
    sums = {name: once[name] + DIGIT_BASE * repeated[name] for name in ("all_passes", "conflicts")}
    beside = 2 * PASSES_OF_A_BLOCK + copies * PASSES_BESIDE_A_COPY
    return {"passes": sums["all_passes"] - beside, "conflicts": sums["conflicts"]}


def digits_of(total: int, count: int) -> list[int]:
    """The figures of `count` maps from their weighted sum; the last one takes what does not fit."""
    digits = []
    for _ in range(count - 1):
        total, digit = divmod(total, DIGIT_BASE)
        digits.append(digit)
    return [*digits, total]


IDLE_LOADS_PER_COPY = 3
"""Shared loads without a lane that the assembler puts in front of a copy at most."""

STRAY_STORE_PASSES = 0.05
"""Extra passes of stores, as a share, that other traffic of the same SM may cause."""

STRAY_LOAD_PASSES = 0.001
"""The same of loads, in kernels with copies (rung 13 showed 47 of 98,351)."""

COPY_CONFLICTS = (0.9, 1.25)
"""How far below and above the emulator's two figures the conflicts of a kernel's copies may lie.

The cause is not known: an H200 showed 0.93 to 1.19 (set 3), so this bound only guards against a change."""

SKIPPED_LOADS = 1.45
"""How many times the global accesses that have an active lane those may be that the hardware issues."""

SASS_PER_PTX = (0.7, 1.15)
"""Machine instructions of a launch in terms of its PTX instructions: the least and the most."""


def shares_a_target(lane_map: LaneMap) -> bool:
    """Whether two active lanes of a copy write to one place, which a program must not do."""
    targets = [offset for offset, on in zip(lane_map.offsets, lane_map.active, strict=True) if on]
    return len(set(targets)) < len(targets)


def rung_limits(counts: Mapping[str, int], spills: bool) -> dict[str, tuple[int, int]]:
    """For each figure of the profiler for a rung, the least and the most that the emulator's counts allow.

    `spills` says whether the machine code keeps registers in local memory, which PTX does not.
    docs/truth-table.md explains every figure that may differ.
    """
    exact = (
        "thread_fma",
        "shared_stores",
        "global_store_sectors",
        "copies",
    )
    limits = {name: (counts[name], counts[name]) for name in exact}
    loads, copies = counts["shared_loads"], counts["copies"]
    limits["shared_loads"] = loads, loads + IDLE_LOADS_PER_COPY * copies
    for kind, share in (("store", STRAY_STORE_PASSES), ("load", STRAY_LOAD_PASSES if copies else 0)):
        passes, conflicts = counts[f"shared_{kind}_passes"], counts[f"shared_{kind}_conflicts"]
        stray = int(share * passes)
        limits[f"shared_{kind}_passes"] = passes, passes + stray
        limits[f"shared_{kind}_conflicts"] = conflicts, conflicts + stray
    if copies:
        # What of the source is in L1 already, the emulator does not know.
        extremes = counts["copy_conflicts"], counts["copy_hit_conflicts"]
        least, most = COPY_CONFLICTS
        limits["copy_conflicts"] = int(least * min(extremes)), int(most * max(extremes))
    sectors = counts["global_load_sectors"] + counts["copy_sectors"]
    limits["global_load_sectors"] = sectors, sectors
    for name in ("global_load", "global_store"):
        count = counts[f"{name}s"]
        limits[f"{name}s"] = count, int(SKIPPED_LOADS * count)
        limits[f"{name}_requests"] = count, count + (copies if name == "global_load" else 0)
    if not spills:
        local = ("local_loads", "local_load_sectors", "local_stores", "local_store_sectors")
        limits |= {name: (counts[name], counts[name]) for name in local}
    least, most = SASS_PER_PTX
    total = counts["warp_instructions"]
    limits["warp_instructions"] = int(least * total), int(most * total)
    return limits
