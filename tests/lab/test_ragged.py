"""What makes 2049 slower than 2048: the cases, the kernels that note where they ran, and what is read off."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tilewave.bench.environment import GpuState
from tilewave.compiler import compile_source
from tilewave.device import get_spec
from tilewave.lab import ragged
from tilewave.lab.launches import launch_of
from tilewave.lab.measure import Measured, MeasuredSize
from tilewave.lab.ragged import CASES, FORCED, PLACED, RUNGS, forced, placement, stamped
from tilewave.lab.records import Check, Speed
from tilewave.lab.registry import get_rung, load_rungs
from tilewave.lab.truth import digest_of

H200 = get_spec("H200")
COUNTS = Path(__file__).parents[2] / "benchmarks" / "results" / "ragged_counts.json"


def test_all_rungs_with_two_kernels_and_a_block_a_tile_take_part() -> None:
    assert [rung.number for rung in load_rungs() if rung.ragged_entry and rung.schedule is None] == list(
        RUNGS
    )


@pytest.mark.parametrize("number", RUNGS)
def test_cases_change_one_thing_at_a_time(number: int) -> None:
    rung = get_rung(number)
    launches = {
        case.key: launch_of(forced(rung) if case.forced else rung, *case.shape, H200) for case in CASES
    }
    tiles = {key: launch.blocks for key, launch in launches.items()}
    assert tiles["wide"] == tiles["scalar"] == tiles["odd rows"] < tiles["more tiles"] == tiles["both"]
    wide = {key for key, launch in launches.items() if launch.entry == rung.entry}
    assert wide == {"wide", "more tiles"}
    slices = {case.key: -(-case.shape[2] // rung.tile.bk) for case in CASES}
    assert slices["wide"] == slices["scalar"] == slices["odd rows"] == slices["more tiles"]
    for shape in PLACED.values():
        assert launch_of(rung, *shape, H200).blocks == tiles["both"]
        assert -(-shape[2] // rung.tile.bk) == slices["wide"]
    assert launch_of(rung, *PLACED["wide"], H200).entry == rung.entry
    assert launch_of(rung, *PLACED["ragged"], H200).entry == rung.ragged_entry


def test_a_forced_rung_has_a_name_of_its_own() -> None:
    rung = forced(get_rung(9))
    assert (rung.number, rung.title) == (9 + FORCED, "109 split groups forced")
    assert rung.source().text == get_rung(9).source().text


@pytest.mark.parametrize("number", [7, *(pytest.param(n, marks=pytest.mark.long) for n in RUNGS[1:])])
def test_every_rung_can_note_where_its_blocks_ran(number: int) -> None:
    rung = stamped(number)
    program = compile_source(rung.source(), rung.entries, "sm_90a")
    for entry in rung.entries:
        ptx = program.ptx.split(program.kernels[entry].symbol, 1)[1]
        assert "%smid" in ptx
        assert "%globaltimer" in ptx
    assert not rung.product


def notes(blocks: list[tuple[int, float, float]], columns: int, tile: int = 4, offset: int = 0) -> np.ndarray:
    """A result with tiles of 4 x 4 whose blocks ran on the given SM, from and to the given microsecond."""
    rows = len(blocks) // columns
    c = np.full((rows * tile - 3, columns * tile - 1), 0.5, np.float32)  # the last tiles are ragged
    for index, (sm, begin, end) in enumerate(blocks):
        row, column = index // columns * tile, index % columns * tile
        stamps = [(offset + round(time * 1000)) % (1 << 24) for time in (begin, end)]
        c[row, column : column + 3] = [sm, *stamps]
    return c


@pytest.mark.parametrize("offset", [0, (1 << 24) - 5000])
def test_late_blocks_are_told_apart_by_whether_they_share_an_sm(offset: int) -> None:
    blocks = [(0, 0.0, 10.0), (0, 0.5, 11.0), (1, 0.0, 12.0), (1, 0.0, 12.0), (2, 1.0, 13.0), (2, 1.0, 12.5)]
    late = [(0, 10.5, 19.5), (1, 12.0, 24.0), (1, 12.5, 24.5)]
    found = placement(notes([*blocks, *late], 3, offset=offset), 4, 4)
    assert (found.sms, found.first, found.late) == (3, 6, 3)
    assert (found.late_alone, found.late_shared) == (1, 2)
    assert found.round_us == pytest.approx(11.75)
    assert found.alone_us == pytest.approx(9.0)
    assert found.shared_us == pytest.approx(12.0)
    assert found.total_us == pytest.approx(24.5)


def test_a_single_round_has_no_late_block() -> None:
    found = placement(notes([(sm, 0.0, 5.0 + sm) for sm in range(4)], 2), 4, 4)
    assert (found.first, found.late, found.alone_us, found.shared_us) == (4, 0, None, None)


def test_a_tile_without_room_for_its_notes_is_refused() -> None:
    with pytest.raises(ValueError, match="without room"):
        placement(np.zeros((8, 6), np.float32), 4, 4)


def test_slowdowns_are_for_equal_work() -> None:
    def rates(numbers: dict[int, float]) -> dict[str, dict[str, object]]:
        return {str(number): {"speed": {"tflops": rate}} for number, rate in numbers.items()}

    times = {"wide": rates({8: 40.0}), "scalar": rates({8 + FORCED: 32.0}), "both": rates({8: 20.0})}
    assert ragged.slowdown(times, "scalar", 8) == pytest.approx(1.25)
    assert ragged.slowdown(times, "both", 8) == pytest.approx(2.0)


def test_wrong_products_are_named() -> None:
    good, bad = ({"check": {"error_in_bounds": error, "allowed": 1.0}} for error in (0.5, float("inf")))
    assert ragged.wrong_rungs({"wide": {"7": good, "8": bad}, "both": {"9": bad}}) == ["wide 8", "both 9"]


def test_the_committed_counts_are_those_of_the_rungs() -> None:
    held = json.loads(COUNTS.read_text())
    assert held["sources"] == {str(n): digest_of(get_rung(n).source().text) for n in RUNGS}
    assert set(held["counts"]) == {"wide", "scalar", "odd rows", "both"}
    case = next(case for case in CASES if case.key == "scalar")
    fresh = ragged.counts(17, case, H200, "sm_90a")
    for name, value in held["counts"]["scalar"]["17"]["counted"].items():
        if name != "warp_instructions":  # the compiler's, and this test runs under any
            assert fresh["counted"][name] == value, name
    scaled = ragged.per_64_fmas(fresh["counted"])
    assert scaled["copies"] == pytest.approx(1.0, rel=0.02)  # 4 + 4 of 16 bytes are 16 + 16 of 4


def test_the_script_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """benchmarks/ragged.py on a machine whose GPU is made up."""
    path = Path(__file__).parents[2] / "benchmarks" / "ragged.py"
    described = importlib.util.spec_from_file_location("ragged_script", path)
    assert described is not None
    assert described.loader is not None
    script = importlib.util.module_from_spec(described)
    described.loader.exec_module(script)
    state = GpuState()
    measured: list[tuple[tuple[int, int, int], list[int]]] = []

    class FakeArray:
        def __init__(self, shape: tuple[int, ...]) -> None:
            self.shape = shape
            self.rung: Any = None

        @classmethod
        def from_numpy(cls, device: object, array: np.ndarray) -> FakeArray:
            return cls(array.shape)

        @classmethod
        def empty(cls, device: object, shape: tuple[int, ...]) -> FakeArray:
            return cls(shape)

        def poison(self) -> None:
            """Nothing."""

        def to_numpy(self) -> np.ndarray:
            """Block i on SM i, all at once."""
            c, tile = np.zeros(self.shape, np.float32), self.rung.tile
            corner = c[:: tile.bm, :: tile.bn]
            corner[...] = np.arange(corner.size).reshape(corner.shape)
            c[:: tile.bm, 2 :: tile.bn] = 1000.0
            return c

    class FakeMeasurer:
        def __init__(self, *_: object) -> None:
            pass

        def measure_shape(self, shape: Any, candidates: Any, rng: Any, budget_s: float) -> MeasuredSize:
            measured.append((shape, [candidate.rung.number for candidate in candidates]))
            speed = Speed((1.0,), 1, 30.0, 0.0, 1.0)
            found = {c.rung.number: Measured(Check("GPU", shape, 0.1), 0.0, speed) for c in candidates}
            return MeasuredSize(found, speed, 0.1, state, state, True)

    def fake_prepare(candidate: Any, device: object, stream: object, a: Any, b: Any, c: Any) -> Any:
        c.rung = candidate.rung
        assert not candidate.rung.product
        return lambda: None

    gpu = SimpleNamespace(device=None, baseline=None)
    monkeypatch.setattr("tilewave.lab.command.open_gpu", lambda: (gpu, H200, "a made-up GPU"))
    monkeypatch.setattr("tilewave.runtime.driver.require_gpu", lambda: None)
    monkeypatch.setattr("tilewave.runtime.driver.DeviceArray", FakeArray)
    monkeypatch.setattr(
        "tilewave.runtime.driver.Stream", lambda device: SimpleNamespace(synchronize=lambda: None)
    )
    monkeypatch.setattr("tilewave.lab.measure.Measurer", FakeMeasurer)
    monkeypatch.setattr("tilewave.lab.measure.prepare", fake_prepare)
    everything = SimpleNamespace(kernels={get_rung(number).entry: None for number in RUNGS})
    monkeypatch.setattr(
        script, "run_tasks", lambda work, tasks, jobs, budget: [(task, everything) for task in tasks]
    )
    out = tmp_path / "ragged.json"
    assert script.measure(out, 60.0)
    assert measured == [(case.shape, [number + FORCED * case.forced for number in RUNGS]) for case in CASES]
    record = json.loads(out.read_text())
    assert record["complete"]
    assert record["placements"]["ragged"]["7"]["first"] == 289
    assert record["placements"]["wide"]["15"]["late"] == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f"complete: {out}"
    assert printed[-2].split() == ["17", *["x", "1.000"] * 5]
