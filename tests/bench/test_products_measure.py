"""Measuring one product, on a bench of the tests' own: host memory for a GPU's, a simulated clock."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tilewave.bench.environment import GpuState
from tilewave.bench.products import measure as measuring
from tilewave.bench.products.contenders import (
    Contestant,
    Entry,
    OurContestant,
    contestants,
    own_views,
    strict_float32,
)
from tilewave.bench.products.gpu import stored_shapes
from tilewave.bench.products.measure import MOST_SETS, Setting, measure, sets_for
from tilewave.bench.products.records import COLD, WARM, Result
from tilewave.bench.suite import SuiteProduct
from tilewave.device import get_spec
from tilewave.errors import ToolchainError, UsageError
from tilewave.precision import error_in_bounds
from tilewave.runtime.driver import NAN_PATTERN

H200 = get_spec("H200")
PRODUCT = SuiteProduct("p", "t", 48, 32, 64, transposed_b=True)


class Clock:
    """GPU time in ms, which work adds to."""

    now = 0.0


class FakeEvent:
    def __init__(self, device: object) -> None:
        self._at = 0.0

    def record(self, stream: object) -> None:
        self._at = Clock.now

    def synchronize(self) -> None: ...

    def milliseconds_since(self, start: FakeEvent) -> float:
        return self._at - start._at


class FakeGraph:
    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def launch(self) -> None:
        self._work()


class FakeStream:
    handle = 1
    capturing = False

    def synchronize(self) -> None:
        assert not self.capturing, "a capture does not allow that"

    def capture(self, work: Callable[[], None]) -> FakeGraph:
        self.capturing, before = True, Clock.now
        try:
            work()
        finally:
            self.capturing, Clock.now = False, before
        return FakeGraph(work)


class HostResults:
    """Operands in host memory."""

    def __init__(self, product: SuiteProduct, sets: int, rng: np.random.Generator) -> None:
        self.product = product
        shapes = stored_shapes(product)
        self.sets: list[Any] = [
            SimpleNamespace(
                a=rng.standard_normal(shapes[0], dtype=np.float32),
                b=rng.standard_normal(shapes[1], dtype=np.float32),
                out=np.zeros(shapes[2], np.float32),
            )
            for _ in range(sets)
        ]
        self.elements = sets * self.sets[0].out.size

    def poison(self) -> None:
        for one in self.sets:
            one.out.view(np.uint32)[...] = NAN_PATTERN

    def unwritten(self) -> int:
        return sum(int((one.out.view(np.uint32) == NAN_PATTERN).sum()) for one in self.sets)

    def compare_rows(self, place: int, rows: Any) -> tuple[float, float]:
        one = self.sets[place]
        a, b = matrices(self.product, one)
        exact = a.astype(float) @ b.astype(float)
        relative = math.sqrt(((one.out - exact) ** 2).sum() / (exact**2).sum())
        return error_in_bounds(one.out, a, b), relative

    def freivalds(self, place: int, seed: int) -> float:
        return 0.0


def matrices(product: SuiteProduct, one: Any) -> tuple[Any, Any]:
    return (
        one.a.swapaxes(1, 2) if product.transposed_a else one.a,
        one.b.swapaxes(1, 2) if product.transposed_b else one.b,
    )


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(measuring, "Event", FakeEvent)
    made = SimpleNamespace(spec=H200, stream=FakeStream(), device=SimpleNamespace(ordinal=0), made=[])

    def operands(product: SuiteProduct, sets: int, rng: np.random.Generator) -> HostResults:
        made.made.append(HostResults(product, sets, rng))
        return made.made[-1]

    made.operands = operands
    return made


class Fake:
    """Computes with NumPy and takes ``microseconds``; ``change`` spoils what it computed."""

    def __init__(
        self,
        microseconds: float,
        change: Callable[[Any], None] = lambda out: None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self._ms, self._change, self._before = "fake", microseconds / 1e3, change, before

    def enter(self, bench: Any, product: SuiteProduct, sets: Sequence[Any]) -> list[Entry]:
        def entry(one: Any) -> Entry:
            def work() -> None:
                self._before()
                if one.out.view(np.uint32)[0, 0, 0] == NAN_PATTERN:  # once is enough to be looked at
                    np.matmul(*matrices(product, one), out=one.out)
                    self._change(one.out)
                Clock.now += self._ms

            return Entry(work)

        return [entry(one) for one in sets]


def setting(bench: Any, contenders: dict[str, Any], mode: str = WARM) -> Setting:
    state = GpuState(sm_clock_mhz=1980.0, power_w=123.4)
    return Setting(bench, contenders, mode, 4, 1.5, lambda: state)


def rejected(result: Result, word: str) -> str:
    (reading,) = [one for one in result.readings if one.contender == word]
    assert result.reading(word) is None
    return reading.rejected or ""


def leave_a_corner(out: Any) -> None:
    out[0, -1, -3:].view(np.uint32)[...] = NAN_PATTERN


def nudge(out: Any) -> None:
    out[0, 1, 2] += 0.1


def test_honest_contenders_are_timed_and_all_else_is_rejected(bench: Any, rng: np.random.Generator) -> None:
    def fail() -> None:
        raise RuntimeError("no\nsuch algorithm")

    result = measure(
        PRODUCT,
        setting(
            bench,
            {
                "ours": Fake(20.0),
                "torch": Fake(25.0),
                "poison": Fake(20.0, leave_a_corner),
                "wrong": Fake(20.0, nudge),
                "floor": Fake(0.9),
                "fails": Fake(20.0, before=fail),
            },
        ),
        rng,
    )
    assert result.graph
    assert (result.mode, result.buffers) == (WARM, 1)
    for word, microseconds in (("ours", 20.0), ("torch", 25.0)):
        reading = result.reading(word)
        assert reading is not None
        assert reading.rounds_us == pytest.approx((microseconds,) * 4)
        assert reading.clocks_mhz == (1980.0,) * 4
        assert reading.power_w == (123.4,) * 4
        assert reading.host_us is not None
        assert reading.host_us > 0
        assert 0 <= (reading.error_in_bounds or 0) <= 1
    assert rejected(result, "poison") == f"3 of {48 * 32:,} elements were never written"
    assert rejected(result, "wrong").startswith("wrong by")
    assert "less than an empty launch takes" in rejected(result, "floor")
    assert rejected(result, "fails") == "RuntimeError: no such algorithm"
    assert result.flags == ()


def test_a_rate_above_the_peak_is_rejected(bench: Any, rng: np.random.Generator) -> None:
    product = SuiteProduct("p", "t", 600, 600, 600)
    result = measure(product, setting(bench, {"ours": Fake(5.0)}), rng)
    assert "above the FP32 peak of 66.9" in rejected(result, "ours")


def test_a_contender_that_cannot_be_captured_takes_all_out_of_graphs(
    bench: Any, rng: np.random.Generator
) -> None:
    result = measure(
        PRODUCT,
        setting(bench, {"ours": Fake(20.0), "other": Fake(30.0, before=bench.stream.synchronize)}),
        rng,
    )
    assert not result.graph
    assert any(flag.startswith("no graph: ") for flag in result.flags)
    for word, microseconds in (("ours", 20.0), ("other", 30.0)):
        reading = result.reading(word)
        assert reading is not None
        assert reading.microseconds == pytest.approx(microseconds)


def test_cold_sets_rotate_and_every_one_is_checked(bench: Any, rng: np.random.Generator) -> None:
    product = SuiteProduct("p", "t", 512, 256, 4096)
    spoilt = iter(range(10_000))
    result = measure(product, setting(bench, {"ours": Fake(50.0)}, COLD), rng)
    (operands,) = bench.made
    assert len(operands.sets) == result.buffers == sets_for(product, COLD, H200.l2_bytes)
    assert result.buffers * product.nbytes >= 2 * H200.l2_bytes
    assert result.reading("ours") is not None

    def now_and_then(out: Any) -> None:
        if next(spoilt) % result.buffers == 3:
            leave_a_corner(out)

    result = measure(product, setting(bench, {"ours": Fake(50.0, now_and_then)}, COLD), rng)
    assert "never written" in rejected(result, "ours")


def test_sets_are_enough_for_twice_the_cache_or_one_when_warm() -> None:
    for product in (PRODUCT, SuiteProduct("big", "t", 4096, 4096, 4096)):
        count = sets_for(product, COLD, H200.l2_bytes)
        assert (
            count - 1
        ) * product.nbytes < 2 * H200.l2_bytes <= count * product.nbytes or count == MOST_SETS
        assert sets_for(product, WARM, H200.l2_bytes) == 1
    assert sets_for(SuiteProduct("tiny", "t", 1, 1, 1), COLD, H200.l2_bytes) == MOST_SETS


@pytest.mark.parametrize(
    "product",
    [
        SuiteProduct("p", "t", 3, 5, 7, True, False),
        SuiteProduct("p", "t", 3, 5, 7, False, True, 4, shared_a=True),
        SuiteProduct("p", "t", 3, 5, 7, True, True, 4, shared_b=True),
    ],
)
def test_views_show_the_product_s_matrices(product: SuiteProduct, rng: np.random.Generator) -> None:
    made = HostResults(product, 1, rng).sets[0]
    for memory in (made.a, made.b, made.out):
        assert memory.flags.c_contiguous
    addressed = [
        SimpleNamespace(address=memory.ctypes.data, shape=memory.shape)
        for memory in (made.a, made.b, made.out)
    ]
    seen = own_views(product, SimpleNamespace(a=addressed[0], b=addressed[1], out=addressed[2]))  # type: ignore[arg-type]
    expected = (*matrices(product, made), made.out)
    for view, memory, whole in zip(seen, (made.a, made.b, made.out), expected, strict=True):
        interface = view.__cuda_array_interface__
        array = np.lib.stride_tricks.as_strided(memory, interface["shape"], interface["strides"])
        wanted = whole[0] if product.batch == 1 else np.broadcast_to(whole, array.shape)
        assert np.array_equal(array, wanted)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ours", "ours"], "named twice"),
        (["mkl"], "'mkl' is unknown; accepted are ours"),
        (["ours:fast"], "schedule must be"),
        (["ours:tile@"], "needs a schedule"),
        (["ours:tile@split_k"], "needs a schedule with its number of pieces"),
    ],
)
def test_contenders_that_make_no_sense_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        contestants(words)


def test_ours_goes_by_what_was_asked_for_and_missing_libraries_say_so() -> None:
    found: dict[str, Contestant] = contestants(["ours", "ours:split_k:8", "ours:tile@data_parallel"])
    assert [one.name for one in found.values()] == [
        "tilewave",
        "tilewave split_k:8",
        "tilewave tile@data_parallel",
    ]
    assert isinstance(found["ours"], OurContestant)
    modules = {"torch": "torch", "cupy": "cupy", "cublaslt": "nvmath"}
    for word in (word for word, module in modules.items() if importlib.util.find_spec(module) is None):
        with pytest.raises(ToolchainError, match="installed"):
            contestants([word])


class OldSwitch:
    """torch before 2.9."""

    def __init__(self, allowed: bool) -> None:
        self.allow_tf32 = allowed


class NewSwitch:
    """torch from 2.9 on after only the new switch was used: the old one refuses."""

    def __init__(self, precision: str) -> None:
        self.fp32_precision = precision

    @property
    def allow_tf32(self) -> bool:
        raise RuntimeError("mix of the legacy and new APIs")


class BothSwitches:
    """torch from 2.9 on: the old switch sets both."""

    def __init__(self, allowed: bool, precision: str) -> None:
        self._allowed, self.fp32_precision = allowed, precision

    @property
    def allow_tf32(self) -> bool:
        return self._allowed

    @allow_tf32.setter
    def allow_tf32(self, allowed: bool) -> None:
        self._allowed, self.fp32_precision = allowed, "tf32" if allowed else "ieee"


@pytest.mark.parametrize(
    ("switch", "off"),
    [
        (OldSwitch(True), {"allow_tf32": False}),
        (OldSwitch(False), {"allow_tf32": False}),
        (NewSwitch("tf32"), {"fp32_precision": "ieee"}),
        (BothSwitches(True, "tf32"), {"_allowed": False, "fp32_precision": "ieee"}),
        (BothSwitches(False, "none"), {"_allowed": False, "fp32_precision": "ieee"}),
    ],
)
def test_tf32_is_off_inside_and_as_it_was_afterwards(
    switch: Any, off: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = SimpleNamespace(
        backends=SimpleNamespace(cuda=SimpleNamespace(matmul=switch)),
        get_float32_matmul_precision=lambda: "highest",
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setenv("CUPY_TF32", "1")
    before = dict(vars(switch))

    def inside() -> None:
        with strict_float32():
            assert vars(switch) == off
            assert "CUPY_TF32" not in os.environ
            raise KeyError

    with pytest.raises(KeyError):
        inside()
    assert vars(switch) == before
    assert os.environ["CUPY_TF32"] == "1"
