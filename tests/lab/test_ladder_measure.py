"""Checking and timing on a GPU that is made up of NumPy arrays: what may be timed, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tilewave.bench.environment import GpuState
from tilewave.compiler import choose_arch, compile_source
from tilewave.device import get_spec
from tilewave.errors import MeasurementError
from tilewave.lab import measure
from tilewave.lab.measure import Candidate, Measurer
from tilewave.lab.registry import get_rung

SPEC = get_spec("GB10")
SIZE = 48


class FakeArray:
    """Device memory that is a NumPy array."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.poisoned = 0

    @classmethod
    def from_numpy(cls, device: object, array: np.ndarray) -> FakeArray:
        return cls(array.copy())

    @classmethod
    def empty(cls, device: object, shape: tuple[int, ...]) -> FakeArray:
        return cls(np.zeros(shape, np.float32))  # zeros, so that only poison can show what is not written

    def poison(self) -> None:
        self.values.fill(np.nan)
        self.poisoned += 1

    def to_numpy(self) -> np.ndarray:
        return self.values.copy()


class FakeStopwatch:
    """Every call takes the same time."""

    milliseconds = 1.0

    def __init__(self, *_: object, graphs: bool) -> None:
        self.graphs = graphs

    def elapsed_ms(self, work: Callable[[], None], repeats: int) -> float:
        return self.milliseconds * repeats


Product = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


def right(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    c[...] = a @ b


def unwritten_corner(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    c[:-1], c[-1, :-1] = (a @ b)[:-1], (a @ b)[-1, :-1]


def like_tf32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    def cut(x: np.ndarray) -> np.ndarray:
        return (x.view(np.uint32) & 0xFFFFE000).view(np.float32)

    c[...] = cut(a) @ cut(b)


class FakeBaseline:
    name = "cuBLAS of the tests"

    def __init__(self, product: Product) -> None:
        self.product = product

    def prepare(self, a: FakeArray, b: FakeArray, c: FakeArray, stream: object) -> Callable[[], None]:
        return lambda: self.product(a.values, b.values, c.values)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> Callable[..., Any]:
    monkeypatch.setattr(measure, "DeviceArray", FakeArray)
    monkeypatch.setattr(measure, "Stream", lambda device: object())
    monkeypatch.setattr(measure, "EventStopwatch", FakeStopwatch)
    monkeypatch.setattr(measure, "can_capture", lambda stream, works: True)
    monkeypatch.setattr(GpuState, "read", classmethod(lambda cls, device: cls(sm_clock_mhz=1980.0)))
    monkeypatch.setattr(
        measure,
        "prepare",
        lambda candidate, device, stream, a, b, c: (
            lambda: candidate.program.product(a.values, b.values, c.values)
        ),
    )

    def run(
        products: dict[int, Product],
        baseline: Product | None = right,
        shape: tuple[int, int, int] = (SIZE, SIZE, SIZE),
    ) -> measure.MeasuredSize:
        candidates = [
            Candidate(get_rung(number), SimpleNamespace(product=product), None)  # type: ignore[arg-type]
            for number, product in products.items()
        ]
        library = None if baseline is None else FakeBaseline(baseline)
        measurer = Measurer(object(), SPEC, library)  # type: ignore[arg-type]
        if shape == (SIZE, SIZE, SIZE):
            return measurer.measure(SIZE, candidates, rng)
        return measurer.measure_shape(shape, candidates, rng)

    return run


def test_right_results_are_timed_and_compared(measured: Callable[..., Any]) -> None:
    found = measured({1: right, 5: right})
    for number in (1, 5):
        rung = found.rungs[number]
        assert rung.check.holds
        assert 0 < rung.check.error_in_bounds <= 1
        assert rung.difference == 0
        assert rung.speed.tflops == pytest.approx(2e-9 * SIZE**3)
        assert rung.speed.over_baseline == pytest.approx(1)
        assert len(rung.speed.milliseconds) == measure.ROUNDS
    assert found.baseline.over_baseline is None
    assert found.graphs
    assert found.before.sm_clock_mhz == 1980.0


def test_a_rectangle_has_its_own_rate(measured: Callable[..., Any]) -> None:
    found = measured({1: right, 2: unwritten_corner}, shape=(24, 40, 56))
    assert found.rungs[1].check.shape == (24, 40, 56)
    assert found.rungs[1].speed.tflops == pytest.approx(2e-9 * 24 * 40 * 56)
    assert found.baseline.tflops == pytest.approx(2e-9 * 24 * 40 * 56)
    assert not found.rungs[2].check.holds


def test_an_element_never_written_is_found_and_the_rung_not_timed(measured: Callable[..., Any]) -> None:
    # The rung before leaves a right result in the same memory: only the poison shows the missing element.
    found = measured({1: right, 2: unwritten_corner})
    assert found.rungs[2].check.error_in_bounds == float("inf")
    assert found.rungs[2].speed is None
    assert found.rungs[1].speed is not None


def test_a_rung_of_too_little_precision_is_not_timed(measured: Callable[..., Any]) -> None:
    found = measured({3: like_tf32})
    assert found.rungs[3].check.error_in_bounds > 1
    assert found.rungs[3].speed is None
    assert found.rungs[3].difference > 0


def test_a_baseline_in_tf32_is_refused(measured: Callable[..., Any]) -> None:
    with pytest.raises(MeasurementError, match="did not compute in FP32"):
        measured({1: right}, baseline=like_tf32)


def test_without_a_baseline_there_are_times_only(measured: Callable[..., Any]) -> None:
    found = measured({1: right}, baseline=None)
    assert found.baseline is None
    assert found.rungs[1].difference is None
    assert found.rungs[1].speed.over_baseline is None


def test_a_rate_above_the_peak_is_refused(
    measured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeStopwatch, "milliseconds", 1e-9)
    with pytest.raises(MeasurementError, match="above the FP32 peak"):
        measured({1: right})


def test_large_sizes_check_rows_drawn_afresh(
    measured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "FULLY_CHECKED", SIZE - 1)
    monkeypatch.setattr(measure, "CHECKED_ROWS", SIZE // 2)
    asked = []
    original = measure.error_in_bounds

    def spy(c: Any, a: Any, b: Any, rows: Any) -> float:
        asked.append(tuple(rows))
        return original(c, a, b, rows)

    monkeypatch.setattr(measure, "error_in_bounds", spy)
    measured({1: right})
    measured({1: right})
    assert all(len(set(rows)) == SIZE // 2 for rows in asked)
    assert asked[0] != asked[-1]


@pytest.mark.parametrize(("capability", "loads_ptx"), [((9, 0), False), ((99, 0), True)])
def test_what_is_loaded_runs_on_the_gpu_at_hand(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], loads_ptx: bool
) -> None:
    """Machine code of an older major version does not run on a newer GPU; PTX does."""
    images: list[bytes] = []

    class FakeModule:
        def __init__(self, device: object, image: bytes) -> None:
            images.append(image)

        def function(self, symbol: str) -> FakeModule:
            return self

        def prepare(self, *launch: object) -> None:
            """Nothing is launched."""

    monkeypatch.setattr(measure, "Module", FakeModule)
    spec = replace(get_spec("H200"), compute_capability=capability)
    rung, arch = get_rung(1), choose_arch(capability).arch
    program = compile_source(rung.source(), rung.entries, arch)
    matrices = [SimpleNamespace(shape=(8, 8), address=256 * i) for i in range(3)]
    candidate = Candidate(rung, program, next(iter(program.kernels.values())), spec)
    measure.prepare(candidate, None, None, *matrices)
    assert images == [program.ptx.encode() + b"\0" if loads_ptx else program.cubin]
