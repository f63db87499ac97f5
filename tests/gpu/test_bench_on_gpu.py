"""`tilewave bench` on a real GPU: right answers pass, cheats of every kind are rejected, cold is not warm."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewave.bench.products.answers import check_answer
from tilewave.bench.products.command import bench_command
from tilewave.bench.products.contenders import (
    Contestant,
    Entry,
    OurContestant,
    default_contestants,
    strict_float32,
    views,
)
from tilewave.bench.products.gpu import Buffers, Workbench
from tilewave.bench.products.measure import Setting, measure
from tilewave.bench.products.records import COLD, WARM, Result, load_run
from tilewave.bench.products.shapes import parse_shape
from tilewave.bench.suite import SuiteProduct
from tilewave.device import DeviceSpec
from tilewave.precision import error_in_bounds
from tilewave.runtime.driver import Device, DeviceArray

pytestmark = pytest.mark.gpu

PRODUCTS = [
    SuiteProduct("plain", "t", 65, 130, 77),
    SuiteProduct("tt", "t", 33, 18, 200, True, True),
    SuiteProduct("batch", "t", 17, 9, 31, False, True, 7),
    SuiteProduct("shared-a", "t", 3, 5, 4, True, False, 50, shared_a=True),
    SuiteProduct("shared-b", "t", 12, 5, 40, False, True, 6, shared_b=True),
]


@pytest.fixture(scope="module")
def bench(device: Device, spec: DeviceSpec) -> Workbench:
    return Workbench(device, spec)


def setting(bench: Workbench, contestants: dict[str, Contestant], mode: str = COLD) -> Setting:
    return Setting(bench, contestants, mode, 3, bench.launch_floor_us(), None)


def operand(memory: DeviceArray, transposed: bool) -> np.ndarray:
    stored = memory.to_numpy()
    return stored.swapaxes(1, 2) if transposed else stored


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda one: one.name)
def test_the_checks_agree_with_numpy(
    bench: Workbench, product: SuiteProduct, rng: np.random.Generator
) -> None:
    operands = bench.operands(product, 2, rng)
    operands.poison()
    assert operands.unwritten() == operands.elements == 2 * product.batch * product.m * product.n
    one = operands.sets[1]
    a, b = operand(one.a, product.transposed_a), operand(one.b, product.transposed_b)
    for stored in (a, b):
        assert abs(stored.mean()) < 6 / np.sqrt(stored.size)
        assert np.isfinite(stored).all()
    exact = a.astype(float) @ b.astype(float)
    c = exact.astype(np.float32)
    for each in operands.sets:
        each.out.copy_from(c)
    answer = check_answer(operands, 1, rng)
    assert answer.wrong is None
    assert answer.error_in_bounds == pytest.approx(error_in_bounds(c, a, b), rel=1e-6)
    assert operands.freivalds(1, 7) < 1
    item, row, column = (int(rng.integers(extent)) for extent in c.shape)
    for damage in (c[item, row, column] + 8 * np.float32(product.k), np.float32(np.nan)):
        damaged = c.copy()
        damaged[item, row, column] = damage
        one.out.copy_from(damaged)
        assert not operands.freivalds(1, int(rng.integers(2**40))) <= 1
        found = check_answer(operands, 1, rng).wrong
        assert found is not None
        assert found.startswith("wrong by")
    few = np.array([row + product.m * item], np.uint64)
    assert operands.compare_rows(1, few)[0] > 1


class Cheat:
    """Does something else than the product."""

    name = "cheat"

    def __init__(self, kind: str) -> None:
        self._ours, self._kind = OurContestant(), kind

    def enter(self, bench: Workbench, product: SuiteProduct, sets: Sequence[Buffers]) -> list[Entry]:
        if self._kind == "nothing":
            return [Entry(lambda: None) for _ in sets]
        half = dataclasses.replace(product, m=product.m - 1)
        cut = [
            Buffers(one.a.view(0, (1, half.m, product.k)), one.b, one.out.view(0, (1, half.m, product.n)))
            for one in sets
        ]
        return self._ours.enter(bench, half, cut)


class Tf32:
    """torch with TF32 switched on behind the bench's back."""

    name = "tf32"

    def enter(self, bench: Workbench, product: SuiteProduct, sets: Sequence[Buffers]) -> list[Entry]:
        import torch

        stream = torch.cuda.ExternalStream(bench.stream.handle)

        def entry(one: Buffers) -> Entry:
            a, b, out = views("torch", product, one, bench.device.ordinal)

            def work() -> None:
                matmul = torch.backends.cuda.matmul
                before, matmul.allow_tf32 = matmul.allow_tf32, True
                with torch.cuda.stream(stream):
                    torch.matmul(a, b, out=out)
                matmul.allow_tf32 = before

            return Entry(work)

        return [entry(one) for one in sets]


def reason(result: Result, word: str) -> str:
    (found,) = [one.rejected for one in result.readings if one.contender == word]
    return found or ""


@pytest.mark.filterwarnings("ignore")
def test_cheats_are_rejected_and_honest_contenders_are_not(
    bench: Workbench, rng: np.random.Generator
) -> None:
    contestants: dict[str, Contestant] = {
        "ours": OurContestant(),
        "ours:split_k:4": OurContestant("split_k:4"),
        "nothing": Cheat("nothing"),
        "half": Cheat("half"),
    }
    if importlib.util.find_spec("torch"):
        contestants["tf32"] = Tf32()
    result = measure(parse_shape("512,512,1024"), setting(bench, contestants), rng)
    assert result.reading("ours") is not None, reason(result, "ours")
    assert result.reading("ours:split_k:4") is not None, reason(result, "ours:split_k:4")
    assert "never written" in reason(result, "nothing")
    missing = 512 * result.buffers
    assert f"{missing:,} of " in reason(result, "half")
    if "tf32" in contestants:
        assert "TF32" in reason(result, "tf32") or "wrong by" in reason(result, "tf32")


def test_cold_is_slower_than_warm_and_said(bench: Workbench, rng: np.random.Generator) -> None:
    """Case H088: a working set of 4 MiB, which the L2 cache holds."""
    product = parse_shape("1,1024,1023")
    times = {}
    for mode in (COLD, WARM):
        found = measure(product, setting(bench, {"ours": OurContestant()}, mode), rng)
        reading = found.reading("ours")
        assert reading is not None, reason(found, "ours")
        assert found.mode == mode
        assert (found.buffers * product.nbytes >= 2 * bench.spec.l2_bytes) == (mode == COLD)
        times[mode] = reading.microseconds
    assert times[WARM] < times[COLD]


def test_a_forced_plan_runs_as_told(bench: Workbench, rng: np.random.Generator) -> None:
    product = parse_shape("257,130,1000,NT")
    plain = measure(product, setting(bench, {"ours": OurContestant()}, WARM), rng).reading("ours")
    assert plain is not None
    assert plain.plan is not None
    forced = f"{plain.plan.split()[0]}@split_k:3"
    result = measure(product, setting(bench, {"forced": OurContestant(forced)}, WARM), rng)
    reading = result.reading("forced")
    assert reading is not None, reason(result, "forced")
    assert reading.plan == f"{plain.plan.split()[0]} split-K 3 ways"


def test_the_command_measures_and_resumes(device: Device, tmp_path: Path, capsys: Any) -> None:
    path, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    arguments: dict[str, Any] = {
        "contenders": None, "mode": COLD, "rounds": 3, "budget": 60.0, "path": path, "picture": picture,
        "saved": None,
    }  # fmt: skip
    bench_command(["64,64,64,300,NT", "300,301,302"], **arguments)
    first = load_run(path)
    assert [one.product.name for one in first.results] == ["64,64,64,300,NT", "300,301,302,NN"]
    contestants, _ = default_contestants()
    assert first.contenders == tuple(contestants)
    for result in first.results:
        for word in first.contenders:
            reading = result.reading(word)
            assert reading is not None, reason(result, word)
            assert len(reading.rounds_us) == 3
            assert reading.host_us is not None
            assert reading.error_in_bounds is not None
            assert 0 < reading.error_in_bounds <= 1
        assert result.graph
    assert 0.2 < first.launch_floor_us < 10
    bench_command(["300,301,302", "5,6,7"], **arguments)
    second = load_run(path)
    assert second.results[:2] == first.results
    assert len(second.results) == 3
    assert picture.stat().st_size > 10_000
    assert "5 x 6 x 7" in capsys.readouterr().out


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.filterwarnings("ignore")
def test_the_setting_of_tf32_is_as_it_was_afterwards(device: Device) -> None:
    import torch

    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for wanted in (True, False):
            torch.backends.cuda.matmul.allow_tf32 = wanted
            with strict_float32():
                assert not torch.backends.cuda.matmul.allow_tf32
            assert torch.backends.cuda.matmul.allow_tf32 == wanted
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
