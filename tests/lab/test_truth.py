"""The truth table's machinery, and the committed readings of an H200 as a test of the emulator."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewave.compiler import compile_source
from tilewave.device import get_spec
from tilewave.emulator import Buffer, Counters, Memory, Module, launch
from tilewave.errors import UsageError
from tilewave.lab.launches import launch_of
from tilewave.lab.ncu import KernelCounters
from tilewave.lab.probes.maps import (
    GLOBAL_BYTES,
    KINDS,
    ONCE,
    REPEATED,
    SHARED_BYTES,
    LaneMap,
    named_maps,
    random_maps,
    repeated_maps,
)
from tilewave.lab.registry import load_rungs
from tilewave.lab.truth import (
    DIGIT_BASE,
    METRICS,
    Plan,
    Planned,
    comparable,
    digest_of,
    digits_of,
    group_of,
    map_from_json,
    map_to_json,
    overhead,
    plan_maps,
    readings,
    run_launches,
    rung_limits,
    select_metrics,
    shares_a_target,
    totals_of_pair,
)
from tilewave.lab.truth_emulated import (
    ARCH,
    COUNTERS,
    GPU,
    emulate_maps,
    emulate_pair,
    emulate_rung,
    probe_module,
)

Generator = np.random.Generator
READINGS = Path(__file__).parents[2] / "benchmarks" / "results" / "truth_table_h200.json"


def same(left: LaneMap, right: LaneMap) -> bool:
    return (left.name, left.kind, left.mask_bits) == (right.name, right.kind, right.mask_bits) and all(
        np.array_equal(getattr(left, name), getattr(right, name)) for name in ("offsets", "sources", "active")
    )


@pytest.mark.parametrize("kind", KINDS)
def test_maps_stay_inside_their_memory_and_survive_json(rng: Generator, kind: str) -> None:
    maps = [*named_maps(kind), *random_maps(kind, 200, rng)]
    limit = GLOBAL_BYTES if kind.startswith("global") else SHARED_BYTES
    assert len({lane_map.name for lane_map in maps}) == len(maps)
    for lane_map in maps:
        assert lane_map.offsets.shape == (32,)
        assert 0 <= lane_map.offsets.min() <= lane_map.offsets.max() <= limit - lane_map.width
        assert 0 <= lane_map.sources.min() <= lane_map.sources.max() <= GLOBAL_BYTES - lane_map.width
        assert not (lane_map.offsets % lane_map.width).any()
        assert same(map_from_json(json.loads(json.dumps(map_to_json(lane_map)))), lane_map)


def test_a_plan_survives_json(rng: Generator, tmp_path: Path) -> None:
    maps = tuple(named_maps("copy_ca_8"))
    launches = (
        Planned(0, "copy", "a.cubin", "probe_copy_ca_8", (1, 1, 1), (32, 1, 1), "copy_ca_8", (2,)),
        Planned(1, "rung", "b.cubin", "sgemm", (3, 2, 1), (256, 1, 1), "05 course", (), (5, 6, 7)),
    )
    Plan("NVRTC 13.5", "sm_90a", 7, maps, launches).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.launches == launches
    assert all(same(*pair) for pair in zip(plan.maps, maps, strict=True))


def test_all_maps_are_planned_once() -> None:
    batches = plan_maps(3, dict.fromkeys(METRICS, 5))
    names = [(lane_map.kind, lane_map.name) for _, batch in batches for lane_map in batch]
    expected = sum(len(list(named_maps(kind))) + 5 + 2 * len(list(repeated_maps(kind))) for kind in KINDS)
    assert len(names) == len(set(names)) == expected
    for _, batch in batches:
        assert len({lane_map.kind for lane_map in batch}) == 1
    # The same seed gives the same maps on every machine.
    again = [lane_map for _, batch in plan_maps(3, dict.fromkeys(METRICS, 5)) for lane_map in batch]
    assert all(same(a, b) for a, b in zip(again, [m for _, batch in batches for m in batch], strict=True))


def test_figures_are_digits_of_the_counter(rng: Generator) -> None:
    figures = rng.integers(0, 33, 3).tolist()
    total = sum(figure * 64**i for i, figure in enumerate(figures))
    assert digits_of(total, 3) == figures
    planned = Planned(0, "global_load", "", "probe_global_load_4", (3, 1, 1), (32, 1, 1), "", (4, 5, 6))
    metrics, missing = select_metrics(
        "global_load", frozenset(["l1tex__t_sectors_pipe_lsu_mem_global_op_ld"])
    )
    assert missing == ["instructions", "requests"]
    counters = KernelCounters(
        "probe_global_load_4(const unsigned int *)", {metrics["sectors"]: total + 3 * 6, "other": 1}
    )
    assert readings(planned, counters, metrics) == [{"sectors": figure} for figure in figures]
    with pytest.raises(UsageError, match="launch 0 should be probe_global_load_4, but is probe_copy"):
        readings(planned, KernelCounters("probe_copy_ca_4", {}), metrics)


def test_a_rungs_counters_are_read_as_they_are() -> None:
    planned = Planned(0, "rung", "", "sgemm", (1, 1, 1), (32, 1, 1), "", (), (1, 2, 3))
    assert readings(planned, KernelCounters("sgemm", {"a": 7.0}), {"thread_fma": "a", "copies": "b"}) == [
        {"thread_fma": 7}
    ]


def test_what_is_known_is_not_planned_again() -> None:
    first = {(m.kind, m.name) for _, batch in plan_maps(3, dict.fromkeys(METRICS, 5)) for m in batch}
    second = [m for _, batch in plan_maps(4, dict.fromkeys(METRICS, 2), first) for m in batch]
    assert {lane_map.name for lane_map in second} == {"random 5", "random 6"}
    assert len(second) == 2 * len(KINDS)


def test_a_digest_sees_code_and_no_comments() -> None:
    code = "int a; // one\n/* two\n three */ int b;\n"
    assert digest_of(code) == digest_of("int a;\n\n  int b; // else")
    assert digest_of(code) != digest_of("int a; int c;")


@pytest.mark.parametrize("kind", KINDS)
def test_the_tables_cost_what_the_overhead_says(kind: str) -> None:
    """A probe none of whose lanes takes part costs an instruction and nothing else."""
    off = [lane_map for lane_map in named_maps(kind) if lane_map.mask_bits == 0]
    assert off
    for lane_map in off:
        figures = emulate_maps([lane_map])
        assert figures.pop("instructions") == 1
        if "zfill" in kind:  # all lanes write zeros
            assert figures["passes"] >= 1
            figures = {"sectors": figures["sectors"]}
        assert not any(figures.values())
    assert overhead(group_of(kind), "passes") == 0


def test_passes_of_copies_are_those_above_their_neighbours() -> None:
    copy = next(iter(named_maps("copy_cg_16")))
    figures = {"instructions": 1, "conflicts": 2, "all_passes": 9, "load_sectors": 7, "lookups": 3}
    assert comparable(copy, figures) == {"instructions": 1, "passes": 5, "conflicts": 2, "sectors": 7}
    idle = LaneMap("", copy.kind, copy.offsets, np.zeros(32, dtype=np.bool_), copy.sources)
    assert comparable(idle, {**figures, "all_passes": 5})["passes"] == 0
    load = next(iter(named_maps("shared_load_4")))
    assert comparable(load, {"passes": 3, "requests": 1}) == {"passes": 3}


class EmulatedGpu:
    """Stands in for the driver layer: device memory and launches are the emulator's."""

    def __init__(self, ptx: str | Module) -> None:
        self.ptx = ptx
        self.memory = Memory()
        self.counters: list[KernelCounters] = []
        self.launched: list[Counters] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = self

        class Array:
            def __init__(self, buffer: Buffer | int) -> None:
                self.buffer = buffer

            @classmethod
            def empty(cls, device: object, shape: tuple[int, ...], dtype: type = np.float32) -> Array:
                return cls(gpu.memory.empty(shape, dtype))

            @classmethod
            def from_numpy(cls, device: object, array: np.ndarray) -> Array:
                return cls(gpu.memory.put(array))

            @property
            def address(self) -> int:
                assert isinstance(self.buffer, Buffer)
                return self.buffer.address

            def view(self, offset: int, shape: tuple[int, ...]) -> Array:
                return Array(self.address + 4 * offset)

            def poison(self) -> None:
                pass

        class Function:
            def __init__(self, module: object, symbol: str) -> None:
                self.symbol = symbol

            def prepare(self, grid: Any, block: Any, arguments: list[Any], stream: object) -> Any:
                values = [value.buffer if isinstance(value, Array) else value for value in arguments]

                def submit() -> None:
                    result = launch(gpu.ptx, self.symbol, grid, block, values, gpu.memory)
                    gpu.record(self.symbol, result.counters)

                return submit

        class LoadedModule:
            def __init__(self, device: object, cubin: bytes) -> None:
                assert cubin == b"cubin"

            def function(self, symbol: str) -> Function:
                return Function(self, symbol)

        class Device:
            def synchronize(self) -> None:
                pass

        for name, fake in (("Device", Device), ("DeviceArray", Array), ("Module", LoadedModule)):
            monkeypatch.setattr(f"tilewave.runtime.driver.{name}", fake)
        monkeypatch.setattr("tilewave.runtime.driver.Stream", lambda device: None)

    def record(self, symbol: str, counters: Counters) -> None:
        self.launched.append(counters)
        if not symbol.startswith("probe_"):
            return
        group = group_of(symbol.removeprefix("probe_"))
        read = METRICS[group].keys() | {"passes", "sectors"}
        values = {
            figure: getattr(counters, name) for figure, name in COUNTERS[group].items() if figure in read
        }
        if group == "copy":
            values["all_passes"] = values.pop("passes") + 4 * counters.copies
            values["load_sectors"] = values.pop("sectors") + counters.global_load_sectors
        named = {METRICS[group][figure][0]: float(value) for figure, value in values.items()}
        self.counters.append(KernelCounters(symbol, named))


def test_launches_read_back_the_figures_of_every_map(
    rng: Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way to the GPU and back: tables, repeats, overhead and digits, with the emulator as the GPU."""
    kinds = ("shared_load_16", "shared_store_8", "global_load_8", "global_store_4", "copy_ca_4")
    maps: list[LaneMap] = []
    launches = []
    for index, kind in enumerate(kinds):
        drawn = (lane_map for lane_map in random_maps(kind, 100, rng) if lane_map.mask_bits)
        some = list(itertools.islice(drawn, 1 if kind.startswith("copy") else 3))
        indices = tuple(range(len(maps), len(maps) + len(some)))
        maps += some
        shape = (len(some), 1, 1)
        launches.append(
            Planned(index, group_of(kind), "a.cubin", f"probe_{kind}", shape, (32, 1, 1), kind, indices)
        )
    plan = Plan("", "sm_90a", 1, tuple(maps), tuple(launches))
    (tmp_path / "a.cubin").write_bytes(b"cubin")
    gpu = EmulatedGpu(probe_module())
    gpu.install(monkeypatch)
    run_launches(tmp_path, plan, launches)
    for planned, counters in zip(launches, gpu.counters, strict=True):
        names = {figure: METRICS[planned.group][figure][0] for figure in METRICS[planned.group]}
        for map_index, figures in zip(planned.maps, readings(planned, counters, names), strict=True):
            expected = emulate_maps([plan.maps[map_index]])
            found = comparable(plan.maps[map_index], figures)
            assert found == {figure: expected[figure] for figure in found}
            assert {"instructions"} < set(found)


def test_a_rung_with_a_schedule_gets_its_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rung, shape = next(rung for rung in load_rungs() if rung.schedule is not None), (65, 130, 48)
    found = launch_of(rung, *shape, get_spec(GPU))
    program = compile_source(rung.source(), rung.entries, ARCH)
    symbol = program.kernels[found.entry].symbol
    workspace = found.integers, found.partial_floats, found.tickets
    assert min(found.partial_floats, found.tickets) > 0
    planned = Planned(
        0, "rung", "a.cubin", symbol, found.grid, found.block, rung.title, (), shape, "", *workspace
    )
    Plan("", ARCH, 1, (), (planned,)).save(tmp_path / "plan.json")
    (tmp_path / "a.cubin").write_bytes(b"cubin")
    gpu = EmulatedGpu(program.ptx)
    gpu.install(monkeypatch)
    plan = Plan.load(tmp_path / "plan.json")
    run_launches(tmp_path, plan, plan.launches)
    counts = {name: value for name, value in vars(gpu.launched[0]).items() if isinstance(value, int)}
    assert counts == emulate_rung(rung, shape).counts


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    if not READINGS.exists():
        pytest.skip("no readings are committed yet")
    data: dict[str, Any] = json.loads(READINGS.read_text())
    return data


@pytest.mark.parametrize("kind", KINDS)
def test_the_emulator_counts_what_the_h200_counted(table: dict[str, Any], kind: str) -> None:
    entries = [entry for entry in table["maps"] if entry["kind"] == kind]
    assert len(entries) > 40
    wrong: dict[str, list[str]] = defaultdict(list)
    off_by_one: list[str] = []
    compared = 0
    for entry in entries:
        lane_map = map_from_json(entry)
        emulator = emulate_maps([lane_map])
        for figure, hardware in comparable(lane_map, entry["hardware"]).items():
            compared += 1
            # Past L1, which of several lanes with one target counts is known only nearly.
            open_question = "_cg_" in kind and figure == "sectors" and shares_a_target(lane_map)
            if open_question and abs(emulator[figure] - hardware) == 1:
                off_by_one.append(lane_map.name)
            elif emulator[figure] != hardware:
                wrong[figure].append(f"{lane_map.name}: H200 {hardware}, emulator {emulator[figure]}")
    assert compared >= 2 * len(entries)
    assert not wrong, dict(wrong)
    assert len(off_by_one) <= 2, off_by_one


def test_copies_whose_source_is_in_l1_take_one_lookup(table: dict[str, Any]) -> None:
    """Launches that make one copy again and again: two misses, and 63 hits."""
    entries = {(entry["kind"], entry["name"]): entry for entry in table["maps"]}
    pairs = [
        (entry, entries[kind, name.removesuffix(ONCE) + REPEATED])
        for (kind, name), entry in entries.items()
        if name.endswith(ONCE)
    ]
    assert len(pairs) == 12
    differ = 0
    for once, repeated in pairs:
        lane_map = map_from_json(once)
        emulated = emulate_pair(lane_map)
        assert totals_of_pair(once["hardware"], repeated["hardware"]) == emulated, (
            once["kind"],
            once["name"],
        )
        differ += emulated["passes"] != (1 + DIGIT_BASE) * emulate_maps([lane_map])["passes"]
    # The rule is seen only where hits and misses differ.
    assert differ >= 4


RUNGS = {rung.title: rung for rung in load_rungs()}


def entries_of(table: dict[str, Any], title: str) -> list[dict[str, Any]]:
    """A rung's readings, if it still is what was read."""
    digest = digest_of(RUNGS[title].source().text)
    return [e for e in table["rungs"] if e["rung"] == title and e["source"] == digest]


@pytest.mark.parametrize("title", RUNGS)
def test_a_rung_counts_what_the_h200_counted(table: dict[str, Any], title: str) -> None:
    entries = entries_of(table, title)
    if not entries:
        pytest.skip("not read as it is now")
    for entry in entries:
        hardware = entry["hardware"]
        emulated = emulate_rung(RUNGS[title], tuple(entry["shape"]))
        limits = rung_limits(emulated.counts, emulated.spills)
        wrong = {
            figure: (hardware[figure], limits[figure])
            for figure in limits
            if not limits[figure][0] <= hardware[figure] <= limits[figure][1]
        }
        assert not wrong, f"{entry['shape']}: (H200, (least, most) by the emulator): {wrong}"
        # The passes beyond the emulator's are the profiler's conflicts beyond the emulator's.
        for access in ("store", "load"):
            passes, conflicts = (f"shared_{access}_{figure}" for figure in ("passes", "conflicts"))
            assert hardware[passes] - limits[passes][0] == hardware[conflicts] - limits[conflicts][0]
        if emulated.compiler == table["readings"][entry["reading"]]["compiler"]:
            assert {name: count for name, count in emulated.counts.items() if count} == entry["emulator"]
            assert emulated.classes == entry["classes"]
            assert emulated.spills == entry["spills"]


def test_loads_show_stray_passes_in_one_launch_at_most(table: dict[str, Any]) -> None:
    strays = [
        entry["rung"]
        for entry in table["rungs"]
        if entry["hardware"]["shared_load_passes"] != entry["emulator"].get("shared_load_passes", 0)
    ]
    assert len(strays) <= 1, strays


def test_every_rung_is_compared(table: dict[str, Any]) -> None:
    """Readings of a rung that was edited since do not count: read it again (benchmarks/truth_table.py)."""
    assert [title for title in RUNGS if not entries_of(table, title)] == []


def test_conflicts_of_copies_lie_around_hits_and_misses() -> None:
    for misses, hits in ((700, 500), (500, 700), (600, 600)):
        counts = defaultdict(int, copies=300, copy_conflicts=misses, copy_hit_conflicts=hits)
        least, most = rung_limits(counts, False)["copy_conflicts"]
        assert (least, most) == (int(0.9 * min(misses, hits)), int(1.25 * max(misses, hits)))


def test_a_count_that_drifts_is_outside_the_limits(table: dict[str, Any]) -> None:
    """The limits above are tight: one too many of anything that must be equal is seen."""
    entry = next(e for e in table["rungs"] if not e["spills"])
    counts = defaultdict(int, entry["emulator"])
    right = rung_limits(counts, False)
    for name in (
        "thread_fma",
        "shared_loads",
        "shared_load_passes",
        "shared_load_conflicts",
        "shared_stores",
        "shared_store_passes",
        "global_loads",
        "global_load_sectors",
        "global_store_sectors",
        "local_loads",
        "copies",
    ):
        drifted = rung_limits(defaultdict(int, {**counts, name: counts[name] + 1}), False)
        assert any(drifted[figure][0] > right[figure][0] for figure in right), name
