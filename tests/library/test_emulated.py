"""The front door on the product's own kernels, in the emulator."""

from __future__ import annotations

import numpy as np
import pytest
from emulated_gpu import EmulatedExecutor
from host_gpu import CupyArray, FakeGpu
from hypothesis import HealthCheck, given, settings
from test_api import Drawn, calls, check_call

import tilewave
from tilewave.precision import error_in_bounds

Rng = np.random.Generator
F = np.float32


@pytest.fixture
def emulated(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> EmulatedExecutor:
    executor = EmulatedExecutor()
    monkeypatch.setattr("tilewave.on_device.executor", lambda: executor)
    return executor


def random_calls(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@random_calls(20)
@given(drawn=calls())
def test_gemm_by_kernels_is_right(emulated: EmulatedExecutor, drawn: Drawn) -> None:
    check_call(drawn, CupyArray)


@pytest.mark.long
@random_calls(500)
@given(drawn=calls())
def test_many_gemms_by_kernels_are_right(emulated: EmulatedExecutor, drawn: Drawn) -> None:
    check_call(drawn, CupyArray)


@pytest.mark.long
@random_calls(250)
@given(drawn=calls((1, 2, 7, 16, 33, 40, 64, 71, 130), batch_axes=1))
def test_many_larger_gemms_by_kernels_are_right(emulated: EmulatedExecutor, drawn: Drawn) -> None:
    check_call(drawn, CupyArray)


def test_ragged_sizes(emulated: EmulatedExecutor, rng: Rng) -> None:
    for m, n, k in ((1, 1, 1), (1, 128, 1), (17, 33, 65), (129, 5, 40), (3, 70, 300)):
        a, b = (rng.standard_normal(shape, dtype=F) for shape in ((m, k), (k, n)))
        got = tilewave.matmul(CupyArray(a), CupyArray(b))
        assert error_in_bounds(got.host, a, b) <= 1, emulated.plans[-1]
