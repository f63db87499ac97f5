"""Host arrays through the real stager, on a driver whose device memory is this process's own."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from host_gpu import FakeExecutor
from tests.runtime.conftest import gpu as driver_gpu
from tests.runtime.fake_gpu import FakeGpu

import tilewave
from tilewave.errors import DeviceError
from tilewave.precision import error_in_bounds
from tilewave.runtime import staging

__all__ = ["driver_gpu"]

Rng = np.random.Generator
F = np.float32


@pytest.fixture
def executor(driver_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeExecutor:
    """The executor behind a stager that moves small pieces."""
    run = FakeExecutor()
    monkeypatch.setattr("tilewave.on_device.executor", lambda: run)
    monkeypatch.setattr("tilewave.api.gpu_for_host_operands", lambda: 0)
    monkeypatch.setattr(staging, "PIECE_BYTES", 4096)
    return run


def held(driver: FakeGpu) -> int:
    """Blocks of device and pinned memory that are not freed: two are the stager's own."""
    return len(driver.memory)


def test_operands_travel_and_the_result_comes_back(
    executor: FakeExecutor, driver_gpu: FakeGpu, rng: Rng
) -> None:
    a, b, c = (rng.standard_normal(shape, dtype=F) for shape in ((70, 90), (90, 40), (70, 40)))
    bias = rng.standard_normal(70, dtype=F)
    storage = np.full((70, 80), np.nan, F)
    got, before = tilewave.gemm(
        a[::-1],
        b,
        c,
        beta=2.0,
        bias=bias,
        bias_axis=-2,
        activation="relu",
        return_preactivation=True,
        out=storage[:, ::2],
    )
    exact = a[::-1].astype(np.float64) @ b + 2.0 * c + bias[:, np.newaxis]
    assert np.allclose(before, exact, rtol=1e-5, atol=1e-4)
    assert np.array_equal(got, np.maximum(before, 0))
    assert np.isnan(storage[:, 1::2]).all()
    (submission,) = executor.submissions
    assert submission.stream == staging.stager(0).stream
    assert held(driver_gpu) == 2


def test_what_repeats_travels_once(executor: FakeExecutor, driver_gpu: FakeGpu, rng: Rng) -> None:
    a, b = rng.standard_normal((6, 50), dtype=F), rng.standard_normal((50, 30), dtype=F)
    wide = np.broadcast_to(b, (1000, 50, 30))
    got = tilewave.matmul(np.broadcast_to(a, (1000, 6, 50)), wide)
    assert got.shape == (1000, 6, 30)
    assert error_in_bounds(got[::333].copy(), np.broadcast_to(a, (4, 6, 50)), wide[:4]) <= 1
    sent = sum(arguments[2] for name, arguments in driver_gpu.calls if name == "cuMemcpyHtoDAsync")
    assert sent == a.nbytes + b.nbytes


def test_operands_that_are_not_read_stay_at_home(
    executor: FakeExecutor, driver_gpu: FakeGpu, rng: Rng
) -> None:
    a, c = np.full((40, 40), np.nan, F), rng.standard_normal((40, 40), dtype=F)
    assert np.array_equal(tilewave.gemm(a, a, c, alpha=0.0, beta=1.0), c)
    sent = sum(arguments[2] for name, arguments in driver_gpu.calls if name == "cuMemcpyHtoDAsync")
    assert sent == c.nbytes


def test_out_may_be_an_operand(executor: FakeExecutor, rng: Rng) -> None:
    a = rng.standard_normal((50, 50), dtype=F)
    expected = a.astype(np.float64) @ a
    tilewave.matmul(a, a, out=a)
    assert np.allclose(a, expected, rtol=1e-5, atol=1e-4)


def test_a_failure_frees_everything_and_leaves_out_alone(
    executor: FakeExecutor, driver_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, rng: Rng
) -> None:
    a = rng.standard_normal((50, 50), dtype=F)
    tilewave.matmul(a, a)  # makes the stager

    def fail(*arguments: object, **keywords: object) -> None:
        raise DeviceError("no kernel today")

    monkeypatch.setattr("tilewave.on_device.executor", lambda: fail)
    out = np.full((50, 50), 7, F)
    with pytest.raises(DeviceError, match="no kernel today"):
        tilewave.matmul(a, a, out=out)
    assert np.all(out == 7)
    assert held(driver_gpu) == 2
    monkeypatch.setattr("tilewave.on_device.executor", lambda: executor)
    assert error_in_bounds(tilewave.matmul(a, a), a, a) <= 1  # the lock was let go


def test_threads_take_turns(executor: FakeExecutor, driver_gpu: FakeGpu, rng: Rng) -> None:
    inputs = [rng.standard_normal((30 + i, 40), dtype=F) for i in range(6)]
    right = [False] * len(inputs)

    def work(index: int) -> None:
        a = inputs[index]
        right[index] = all(error_in_bounds(tilewave.matmul(a, a.T), a, a.T) <= 1 for _ in range(10))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(right)
    assert held(driver_gpu) == 2


def test_empty_products(executor: FakeExecutor, driver_gpu: FakeGpu, rng: Rng) -> None:
    assert tilewave.matmul(np.empty((0, 4), F), np.empty((4, 3), F)).shape == (0, 3)
    assert executor.submissions == []
    assert np.array_equal(tilewave.matmul(np.empty((5, 0), F), np.empty((0, 3), F)), np.zeros((5, 3), F))
    assert held(driver_gpu) == 2
