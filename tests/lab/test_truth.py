"""The truth table's machinery, and the committed readings of an H200 as a test of the emulator."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewave.emulator import Buffer, Counters, Memory, launch
from tilewave.errors import UsageError
from tilewave.lab.ncu import KernelCounters
from tilewave.lab.probes.maps import GLOBAL_BYTES, KINDS, SHARED_BYTES, LaneMap, named_maps, random_maps
from tilewave.lab.truth import (
    METRICS,
    Plan,
    Planned,
    combined,
    digits_of,
    group_of,
    map_from_json,
    map_to_json,
    overhead,
    plan_maps,
    readings,
    run_launches,
    select_metrics,
)
from tilewave.lab.truth_emulated import COUNTERS, emulate_maps, probe_module

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
    assert len(names) == len(set(names)) == sum(len(list(named_maps(kind))) + 5 for kind in KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
def test_the_tables_cost_what_the_overhead_says(kind: str) -> None:
    """A probe none of whose lanes takes part costs an instruction and nothing else."""
    off = [lane_map for lane_map in named_maps(kind) if lane_map.mask_bits == 0]
    assert off
    for lane_map in off:
        figures = emulate_maps([lane_map])
        assert figures.pop("instructions") == 1
        assert not any(figures.values())
    assert overhead(group_of(kind), "passes") == 0


def test_copies_add_their_two_ways() -> None:
    figures = {"passes": 0, "passes_access": 0, "passes_bypass": 4, "sectors_access": 3, "sectors_bypass": 2}
    assert combined(figures)["passes"] == 4
    assert combined(figures)["sectors"] == 5


class EmulatedGpu:
    """Stands in for the driver layer: device memory and launches are the emulator's."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.memory = Memory()
        self.counters: list[KernelCounters] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = self

        class Array:
            def __init__(self, buffer: Buffer) -> None:
                self.buffer = buffer

            @classmethod
            def empty(cls, device: object, shape: tuple[int, ...], dtype: type = np.float32) -> Array:
                return cls(gpu.memory.empty(shape, dtype))

            @classmethod
            def from_numpy(cls, device: object, array: np.ndarray) -> Array:
                return cls(gpu.memory.put(array))

            def poison(self) -> None:
                pass

        class Function:
            def __init__(self, module: object, symbol: str) -> None:
                self.symbol = symbol

            def prepare(self, grid: Any, block: Any, arguments: list[Any], stream: object) -> Any:
                values = [value.buffer if isinstance(value, Array) else value for value in arguments]

                def submit() -> None:
                    result = launch(probe_module(), self.symbol, grid, block, values, gpu.memory)
                    gpu.record(self.symbol, result.counters)

                return submit

        class Module:
            def __init__(self, device: object, cubin: bytes) -> None:
                assert cubin == b"cubin"

            def function(self, symbol: str) -> Function:
                return Function(self, symbol)

        class Device:
            def synchronize(self) -> None:
                pass

        for name, fake in (("Device", Device), ("DeviceArray", Array), ("Module", Module)):
            monkeypatch.setattr(f"tilewave.runtime.driver.{name}", fake)
        monkeypatch.setattr("tilewave.runtime.driver.Stream", lambda device: None)

    def record(self, symbol: str, counters: Counters) -> None:
        group = group_of(symbol.removeprefix("probe_"))
        names = {figure: METRICS[group][figure][0] for figure in COUNTERS[group] if figure in METRICS[group]}
        values = {names[f]: getattr(counters, c) for f, c in COUNTERS[group].items() if f in names}
        self.counters.append(KernelCounters(symbol, {name: float(value) for name, value in values.items()}))


def test_launches_read_back_the_figures_of_every_map(
    rng: Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way to the GPU and back: tables, repeats, overhead and digits, with the emulator as the GPU."""
    kinds = ("shared_load_16", "shared_store_8", "global_load_8", "global_store_4", "copy_ca_4")
    maps: list[LaneMap] = []
    launches = []
    for index, kind in enumerate(kinds):
        some = list(random_maps(kind, 1 if kind.startswith("copy") else 3, rng))
        indices = tuple(range(len(maps), len(maps) + len(some)))
        maps += some
        shape = (len(some), 1, 1)
        launches.append(
            Planned(index, group_of(kind), "a.cubin", f"probe_{kind}", shape, (32, 1, 1), kind, indices)
        )
    plan = Plan("", "sm_90a", 1, tuple(maps), tuple(launches))
    (tmp_path / "a.cubin").write_bytes(b"cubin")
    gpu = EmulatedGpu(plan)
    gpu.install(monkeypatch)
    run_launches(tmp_path, plan, launches)
    for planned, counters in zip(launches, gpu.counters, strict=True):
        names = {figure: METRICS[planned.group][figure][0] for figure in METRICS[planned.group]}
        for map_index, figures in zip(planned.maps, readings(planned, counters, names), strict=True):
            expected = emulate_maps([plan.maps[map_index]])
            assert figures == {figure: expected[figure] for figure in figures}
            assert {"instructions"} < set(figures)


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
    for entry in entries:
        hardware = combined(entry["hardware"])
        for figure, value in emulate_maps([map_from_json(entry)]).items():
            if figure in hardware and hardware[figure] != value:
                wrong[figure].append(f"{entry['name']}: H200 {hardware[figure]}, emulator {value}")
    assert not wrong, dict(wrong)
