"""Checking and timing the kernels of a probe on a GPU that is made up of NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilewave.bench.gpu
import tilewave.runtime.driver
from tilewave.device import get_spec
from tilewave.errors import MeasurementError
from tilewave.lab import probe as running
from tilewave.lab.probe import run_probes, time_variants
from tilewave.lab.probe_catalog import PROBES
from tilewave.lab.probe_records import Probe, Timed
from tilewave.lab.workers import Budget

SPEC = get_spec("H200")
SIZE = 48
Product = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


class FakeArray:
    """Device memory that is a NumPy array."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    @classmethod
    def from_numpy(cls, device: object, array: np.ndarray) -> FakeArray:
        return cls(array.copy())

    @classmethod
    def empty(cls, device: object, shape: tuple[int, ...]) -> FakeArray:
        return cls(np.zeros(shape, np.float32))

    def poison(self) -> None:
        self.values.fill(np.nan)

    def to_numpy(self) -> np.ndarray:
        return self.values.copy()


def right(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    c[...] = a @ b


def wrong(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    c[...] = a @ b
    c[:, 0] += 1


def unwritten(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """Leaves C as it was, which must not be the product of the kernel before."""


class Stopwatch:
    """Each kernel takes as long as the test says."""

    milliseconds: dict[Product, float]

    def __init__(self, *_: object, graphs: bool) -> None:
        pass

    def elapsed_ms(self, work: Any, repeats: int) -> float:
        return self.milliseconds[work.product] * repeats


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> Callable[..., dict[str, Timed]]:
    kernels: dict[str, Product] = {}

    def prepare(
        variant: Any, program: Any, spec: Any, device: Any, stream: Any, a: Any, b: Any, c: Any
    ) -> Any:
        product = kernels.get(variant.key, right)

        def launch() -> None:
            product(a.values, b.values, c.values)

        launch.product = product  # type: ignore[attr-defined]
        return launch

    monkeypatch.setattr(tilewave.runtime.driver, "DeviceArray", FakeArray)
    monkeypatch.setattr(tilewave.bench.gpu, "EventStopwatch", Stopwatch)
    monkeypatch.setattr(tilewave.bench.gpu, "can_capture", lambda stream, works: True)
    monkeypatch.setattr(running, "compile_variant", lambda variant, arch: None)
    monkeypatch.setattr(running, "prepare_variant", prepare)

    def run(
        probe: Probe, products: dict[str, Product], times: dict[Product, float], **options: Any
    ) -> dict[str, Timed]:
        kernels.update(products)
        Stopwatch.milliseconds = {right: 1.0} | times
        return time_variants(probe, SIZE, None, None, SPEC, "sm_90", rng, **options)  # type: ignore[arg-type]

    return run


def test_products_are_checked_and_timed(timed: Callable[..., dict[str, Timed]]) -> None:
    def fast(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        right(a, b, c)

    found = timed(PROBES["padding"], {"padding": fast}, {fast: 0.5})
    assert found.keys() == {"rung-08", "padding", "splitting"}
    for one in found.values():
        assert one.check is not None
        assert one.check.holds
        assert one.check.where == "GPU"
    assert [found[key].ratio for key in ("rung-08", "padding", "splitting")] == [None, 2.0, 1.0]
    assert found["padding"].speed is not None
    assert found["padding"].speed.tflops == pytest.approx(2 * SIZE**3 / 0.5e-3 / 1e12)


@pytest.mark.parametrize("product", [wrong, unwritten])
def test_a_wrong_product_is_not_timed(product: Product, timed: Callable[..., dict[str, Timed]]) -> None:
    found = timed(PROBES["padding"], {"padding": product}, {product: 0.1})
    assert found["padding"].check is not None
    assert not found["padding"].check.holds
    assert (found["padding"].speed, found["padding"].ratio) == (None, None)
    assert found["splitting"].ratio == 1.0


def test_nothing_is_compared_with_a_wrong_product(timed: Callable[..., dict[str, Timed]]) -> None:
    found = timed(PROBES["padding"], {"rung-08": wrong}, {wrong: 0.1})
    assert found["rung-08"].speed is None
    assert (found["padding"].ratio, found["splitting"].ratio) == (None, None)
    assert found["padding"].speed is not None


def test_what_is_no_product_is_timed_unchecked(timed: Callable[..., dict[str, Timed]]) -> None:
    found = timed(PROBES["no-loads"], {"no-loads": wrong}, {wrong: 0.8})
    assert found["no-loads"].check is None
    assert found["no-loads"].ratio == pytest.approx(1.25)
    assert found["rung-12"].check is not None


def test_each_is_compared_with_its_own(timed: Callable[..., dict[str, Timed]]) -> None:
    def slow(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        right(a, b, c)

    found = timed(PROBES["lane-maps"], {"own-16x8": slow}, {slow: 2.0})
    assert {key: one.ratio for key, one in found.items()} == {
        "rung-12": None,
        "own-8x8": 1.0,
        "best-8x8": 1.0,
        "rung-15": None,
        "own-16x8": 0.5,
        "best-16x8": 2.0,
    }
    found = timed(PROBES["same-slice"], {"masked": slow}, {slow: 2.0})
    assert {key: one.ratio for key, one in found.items()} == {
        "rung-12": None,
        "masked": 0.5,
        "same-slice": 2.0,
    }


def test_a_rate_above_the_peak_is_refused_even_of_what_is_no_product(
    timed: Callable[..., dict[str, Timed]],
) -> None:
    peak_ms = 2e-9 * SIZE**3 / SPEC.peak_fp32_tflops
    with pytest.raises(MeasurementError, match="no-loads"):
        timed(PROBES["no-loads"], {"no-loads": wrong}, {wrong: 0.9 * peak_ms})


def test_sizes_that_a_budget_leaves_no_time_for_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilewave.runtime.driver, "Stream", lambda device: None)
    monkeypatch.setattr(running, "time_variants", lambda *_: pytest.fail("nothing may start"))
    monkeypatch.setattr(Budget, "left", property(lambda self: 0.0))
    gpu = type("Gpu", (), {"device": None})()
    (found,) = run_probes([PROBES["padding"]], SPEC, gpu=gpu, sizes=[64, 96])
    assert found.notes[:2] == [
        "N = 64 was not timed: the budget was used up",
        "N = 96 was not timed: the budget was used up",
    ]
    assert all(not at.timed for at in found.sizes)


def test_a_variant_is_launched_as_its_rung_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the grid, arguments and image of the rung, and the shared memory that holds blocks back."""
    from tilewave.lab import measure
    from tilewave.lab.probe import compile_variant, prepare_variant

    launches: list[tuple[Any, ...]] = []

    class FakeModule:
        def __init__(self, device: object, image: bytes) -> None:
            self.image = image

        def function(self, symbol: str) -> FakeModule:
            return self

        def prepare(self, *launch: Any) -> None:
            launches.append((self.image, *launch))

    monkeypatch.setattr(measure, "Module", FakeModule)
    matrix = type("Matrix", (), {"shape": (256, 256), "address": 0})()
    for key in ("one", "two"):
        variant = PROBES["resident-blocks"].variant(key)
        program = compile_variant(variant, "sm_90")
        prepare_variant(variant, program, SPEC, None, None, matrix, matrix, matrix)  # type: ignore[arg-type]
    (image, grid, block, arguments, _, held), (_, _, _, _, _, free) = launches
    assert image == program.cubin
    assert (grid, block) == ((2, 2, 1), variant.rung.block)
    assert arguments == [matrix] * 3 + [256] * 3
    assert free == 0
    assert held > 0
    fit = running.occupancy(program.kernels[variant.rung.entry].resources, 256, SPEC, held)
    assert fit.blocks_per_sm == 1
