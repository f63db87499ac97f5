"""The rungs that deal tiles by a schedule: no block waits, bits are fixed, launches are the planner's."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import resources
from typing import Any

import numpy as np
import pytest
from rung_helpers import GPU, Float32, changed, draw_both, program

from tilewave.compiler import Program, compile_source
from tilewave.device import get_spec
from tilewave.emulator import Memory, launch
from tilewave.errors import EmulationError, MemoryFault, UsageError
from tilewave.lab import emulate
from tilewave.lab.launches import launch_of
from tilewave.lab.registry import Prediction, Rung, get_rung, load_rungs, parse_rungs
from tilewave.precision import error_in_bounds

SCHEDULED = [rung for rung in load_rungs() if rung.schedule is not None]
every_scheduled_rung = pytest.mark.parametrize("rung", SCHEDULED, ids=lambda rung: rung.name)
# 4 large tiles or 6 small ones, of 5 and 7 slices, ragged everywhere.
SHAPES = ((150, 301, 75), (140, 300, 100))


class Bench:
    """One product of a rung on ``sms`` SMs: operands and workspace stay between launches."""

    def __init__(self, rung: Rung, a: Float32, b: Float32, sms: int, built: Program | None = None) -> None:
        (m, k), n = a.shape, b.shape[1]
        self.built = built or program(rung)
        self.planned = launch_of(rung, m, n, k, replace(GPU, sms=sms))
        self.memory = Memory()
        self.a, self.b = self.memory.put(a, name="A"), self.memory.put(b, name="B")
        self.sizes = (m, n, k)
        self.workspace = emulate.workspace_arguments(self.planned, self.memory)

    def run(self, **options: Any) -> Float32:
        m, n, k = self.sizes
        out = self.memory.empty((m, n), np.float32, name="C")
        launch(
            self.built.ptx,
            self.built.kernels[self.planned.entry].symbol,
            self.planned.grid,
            self.planned.block,
            [self.a, self.b, out, m, n, k, *self.workspace],
            self.memory,
            count=False,
            **options,
        )
        assert not self.memory.get(self.workspace[1]).any(), "a ticket is left over"  # type: ignore[arg-type]
        return self.memory.get(out)


@every_scheduled_rung
@pytest.mark.parametrize("shape", [SHAPES[0], pytest.param(SHAPES[1], marks=pytest.mark.long)], ids=str)
def test_same_bits_however_many_blocks_are_resident(
    rung: Rung, shape: tuple[int, int, int], rng: np.random.Generator
) -> None:
    """1, 2 and 7 resident blocks in random order, and all at once: the kernel ends, with the same bits."""
    m, n, k = shape
    a, b = draw_both(rng, m, n, k)
    bench = Bench(rung, a, b, sms=int(rng.choice([3, 5, 7])))
    expected = bench.run()
    assert error_in_bounds(expected, a, b) <= rung.tolerance
    for resident in (1, 2, 7):
        found = bench.run(resident=resident, order=int(rng.integers(2**31)))
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@every_scheduled_rung
@pytest.mark.parametrize("sms", [1, 2, 3, 11, 64])
def test_every_number_of_sms(rung: Rung, sms: int, rng: np.random.Generator) -> None:
    m, n, k = SHAPES[0]
    a, b = draw_both(rng, m, n, k)
    assert error_in_bounds(Bench(rung, a, b, sms).run(), a, b) <= rung.tolerance


@pytest.mark.parametrize("number", [18, 19, 20, 21])
def test_the_cases_above_do_cut_tiles(number: int) -> None:
    for shape in SHAPES:
        for sms in (3, 5, 7, 64):
            planned = launch_of(get_rung(number), *shape, replace(GPU, sms=sms))
            assert planned.partial_floats > 0
            assert planned.tickets > 0


@every_scheduled_rung
def test_no_race_in_shared_memory(rung: Rung, rng: np.random.Generator) -> None:
    """Three SMs, four tiles: two are cut, and a walker does two, one after the other."""
    a, b = draw_both(rng, *SHAPES[1])
    Bench(rung, a, b, sms=3).run(detect_races=True)


@pytest.mark.parametrize("number", [18, 19, 21])
def test_the_emulator_would_see_a_block_that_waits(number: int, rng: np.random.Generator) -> None:
    rung = get_rung(number)
    text = rung.source().text
    leave = re.search(r" *if \(!\*last\) \w+;\n", text)
    ticket = re.search(r"atomicInc\((tickets \+ \w+),", text)
    assert leave is not None
    assert ticket is not None
    wait = f"if (!*last) while (*(volatile unsigned*)({ticket[1]}) != 0) {{}}\n"
    waiting = compile_source(changed(rung, (leave[0], wait + leave[0])), rung.entries, "sm_121")
    a, b = draw_both(rng, *SHAPES[0])
    with pytest.raises(EmulationError):
        Bench(rung, a, b, 5, waiting).run(resident=1, order=0, step_limit=20_000)


@pytest.mark.parametrize(
    ("number", "old", "new"),
    [
        (18, "piece * base + min(piece, longer)", "piece * base"),
        (18, "tickets + tile", "tickets"),
        (18, "int p = 1;", "int p = 2;"),
        (18, "blockIdx.x % tiles, piece = blockIdx.x / tiles", "blockIdx.x / pieces, piece = 0"),
        (19, "2 * owner + (piece", "owner + (piece"),
        (19, "min(block, longer)", "0"),
        (19, "first > 0 || end < slices", "first > 0"),
        (20, "min(K, k_begin + (base + (piece < longer)) * BK)", "k_begin + base * BK"),
        (21, "tile = whole_tiles + cut;", "tile = cut;"),
        (21, "(size_t)piece * BM * BN", "(size_t)0"),
        (22, "i * (WM / TM) + ly", "i * TM + ly"),
        (23, "kLarge ? As[stage][k][r] : As[stage][r][k]", "kLarge ? As[stage][k][r] : As[stage][r][0]"),
    ],
)
def test_these_tests_see_a_planted_fault(number: int, old: str, new: str, rng: np.random.Generator) -> None:
    rung = get_rung(number)
    broken = compile_source(changed(rung, (old, new)), rung.entries, "sm_121")
    seen = []
    for sms in (3, 5, 64):  # a selector takes its large tile for the first, its small one for the last
        a, b = draw_both(rng, *SHAPES[0])
        try:
            found = Bench(rung, a, b, sms, broken).run()
            seen.append(error_in_bounds(found, a, b) > rung.tolerance)
        except (MemoryFault, AssertionError):
            seen.append(True)
    assert any(seen)


@pytest.mark.parametrize(
    ("number", "n", "kernel", "blocks", "integers", "partial_bytes"),
    [
        (18, 1024, "18_split_k", 192, (3,), 192 * 65536),
        (19, 2048, "19_stream_k_walk", 48, (), 96 * 131072),
        (20, 1025, "20_stream_k_pieces", 720, (0, 16), 720 * 131072),
        (21, 2048, "21_stream_k", 192, (96, 3), 96 * 131072),
        (21, 2049, "21_stream_k", 180, (144, 4), 36 * 131072),
        (22, 1024, "22_selector<false, true>", 192, (3,), 192 * 65536),
        (22, 2048, "22_selector<true, true>", 128, (1,), 0),
        (22, 2049, "22_selector<false, false>", 867, (3,), 867 * 65536),
        (23, 2048, "23_selector_stream_k<true, true>", 192, (96, 3), 96 * 131072),
        (23, 1025, "23_selector_stream_k<true, false>", 45, (45, 1), 0),
    ],
)
def test_launches_on_the_gb10(
    number: int, n: int, kernel: str, blocks: int, integers: tuple[int, ...], partial_bytes: int
) -> None:
    planned = launch_of(get_rung(number), n, n, n, GPU)
    assert planned.entry.startswith(f"sgemm_{kernel}")
    assert planned.grid == (blocks, 1, 1)
    assert planned.integers == integers
    assert 4 * planned.partial_floats == partial_bytes


def test_a_gpu_without_asynchronous_copies_gets_the_large_tile() -> None:
    planned = launch_of(get_rung(22), 1024, 1024, 1024, get_spec("T4"))
    assert (planned.entry, planned.integers) == ("sgemm_22_selector<true, true>", (1,))


def test_a_grid_that_no_launch_can_have_is_refused() -> None:
    with pytest.raises(UsageError, match=r"rung 18 split k: it needs .* blocks"):
        launch_of(get_rung(18), 2**30, 2**24, 64, GPU)


@pytest.mark.parametrize("number", [18, 21, *(pytest.param(n, marks=pytest.mark.long) for n in (20, 22, 23))])
def test_sampled_counters_equal_those_of_every_block(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulate, "FULL_THREADS", 0)
    rung, size, spec = get_rung(number), 3 * 256 + 16, replace(GPU, sms=10)
    built, kernel, _ = emulate.build(rung, spec, "sm_121", size)
    sampled = emulate.count(rung, built, kernel, size, spec)
    planned = launch_of(rung, size, size, size, spec)
    assert sampled.blocks_run < sampled.blocks_total == planned.blocks
    memory = Memory()
    matrix = np.zeros((size, size), np.float32)
    arguments = [memory.put(matrix), memory.put(matrix), memory.empty((size, size), np.float32)]
    arguments += [size, size, size]
    arguments += emulate.workspace_arguments(planned, memory)
    symbol = built.kernels[planned.entry].symbol
    whole = launch(built.ptx, symbol, planned.grid, planned.block, arguments, memory)
    for name, value in emulate._flat(whole.counters).items():
        # How often a 4-byte copy's lanes meet depends on where its rows start, which differs between tiles.
        tolerance = 1e-3 if name in ("copy_passes", "copy_conflicts") else 0
        assert getattr(sampled, name) == pytest.approx(value, rel=tolerance), name


@pytest.mark.parametrize(
    ("rung", "prediction"),
    [
        pytest.param(rung, prediction, marks=pytest.mark.long if prediction.size > 1025 else ())
        for rung in SCHEDULED
        for prediction in rung.predictions
    ],
    ids=lambda item: item.name if isinstance(item, Rung) else f"{item.counter} at {item.size}",
)
def test_every_prediction_comes_true(rung: Rung, prediction: Prediction) -> None:
    spec = get_spec("H200") if prediction.sms == 132 else GPU
    assert prediction.sms in (None, spec.sms)

    def figure(number: int) -> float:
        built, kernel, _ = emulate.build(get_rung(number), spec, "sm_121", prediction.size)
        counted = emulate.count(get_rung(number), built, kernel, prediction.size, spec)
        return float(getattr(counted, prediction.counter))

    found = figure(rung.number)
    if prediction.value is not None:
        assert found == prediction.value
    else:
        assert rung.builds_on is not None
        assert found / figure(rung.builds_on) == pytest.approx(prediction.ratio, rel=1e-6)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('split_k", pieces', 'split_q", pieces', "schedule 'split_q' is none of split_k"),
        ("pieces = 3", "pieces = 1", "at least 2 pieces"),
        ('split_k", pieces = 3', 'stream_k", pieces = 3', "pieces belong to a split_k"),
        ('split_k", pieces = 3', 'select", family = "three"', "an alternative belongs to a select"),
        ("size = 1024, why", "size = 1024, sms = 0, why", "sms should be at least 1"),
        ("schedule = {", "schedule = 3 #", "schedule of rung 18 .* should be a table"),
    ],
)
def test_a_damaged_schedule_is_refused(old: str, new: str, message: str) -> None:
    text = (resources.files("tilewave") / "lab" / "rungs.toml").read_text(encoding="utf-8")
    start = text.index("[[rung]]\nnumber = 18")
    end = text.index("[[rung]]\nnumber = 19")
    damaged = text[start:end].replace(old, new)
    assert damaged != text[start:end]
    with pytest.raises(UsageError, match=message):
        parse_rungs(text[:start] + damaged)
