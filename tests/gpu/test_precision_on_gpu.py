"""The mode fp16x3 on a Hopper GPU against its model and its bound."""

from __future__ import annotations

import numpy as np
import pytest

import tilewave
from tilewave.bench.accuracy.contenders import on_gpu
from tilewave.device import DeviceSpec
from tilewave.errors import UsageError
from tilewave.precision import error_in_mode_bounds, fp16x3, fp16x3_bound
from tilewave.precision.data_sets import DATA_SETS, draw

pytestmark = pytest.mark.gpu

Rng = np.random.Generator
F = np.float32


@pytest.fixture
def hopper(spec: DeviceSpec) -> DeviceSpec:
    if spec.compute_capability != (9, 0):
        pytest.skip(f"fp16x3 has kernels for Hopper; this is {spec.name}")
    return spec


def in_mode(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product by the mode's own kernels, also where ieee is faster."""
    product: np.ndarray = tilewave.gemm(a, b, precision="fp16x3", batch_invariant=True)
    return product


@pytest.mark.parametrize("name", DATA_SETS)
def test_gpu_and_model_agree_within_the_bound(hopper: DeviceSpec, rng: Rng, name: str) -> None:
    for k in (1, 63, 64, 65, int(rng.integers(1, 3000))):
        m, n = (int(size) for size in rng.integers(1, 300, 2))
        a, b = draw(name, rng, m, k, n)
        found = in_mode(a, b)
        assert error_in_mode_bounds("fp16x3", found, a, b) <= 1, (m, k, n)
        few = np.s_[: min(m, 20)], np.s_[: min(n, 20)]
        model = fp16x3.multiply(a[few[0]], b[:, few[1]])
        kept = ~model.recomputed & np.isfinite(model.values)
        with np.errstate(all="ignore"):
            apart = np.abs(found[few].astype(float) - model.values)
        assert (apart <= fp16x3_bound(a[few[0]], b[:, few[1]]))[kept].all(), (m, k, n)


def test_nan_and_infinities_come_out_as_in_ieee(hopper: DeviceSpec, rng: Rng) -> None:
    for special in (np.nan, np.inf, -np.inf):
        a, b = draw("normal", rng, 70, 130, 90)
        a[0], b[:, 1] = 0, 0
        a[rng.integers(70), rng.integers(130)] = special
        b[rng.integers(130), rng.integers(90)] = special
        with np.errstate(invalid="ignore"):
            plain = a @ b
        found = in_mode(a, b)
        wrong = ~np.isfinite(plain)
        assert np.array_equal(found[wrong], plain[wrong], equal_nan=True)
        assert np.isfinite(found[~wrong]).all()


@pytest.mark.parametrize("name", ["normal", "uniform"])
def test_at_most_the_error_of_cublas(hopper: DeviceSpec, rng: Rng, name: str) -> None:
    contenders, _ = on_gpu()
    if "cublas" not in contenders:
        pytest.skip("no cuBLAS to compare with")
    for k in (1024, 4096, 16384):
        a, b = draw(name, rng, 512, k, 512)
        exact = a.astype(float) @ b.astype(float)
        ours, theirs = (
            np.linalg.norm(c - exact) for c in (in_mode(a, b), contenders["cublas"].multiply(a, b))
        )
        assert ours <= theirs, k
    for k in (1, 16, 100, 1023):
        a, b = draw(name, rng, 512, k, 512)
        exact = a.astype(float) @ b.astype(float)
        assert np.linalg.norm(in_mode(a, b) - exact) <= 3e-7 * np.linalg.norm(exact), k


def test_other_architectures_refuse(spec: DeviceSpec, rng: Rng) -> None:
    if spec.compute_capability == (9, 0):
        pytest.skip("this is a Hopper")
    with pytest.raises(UsageError, match=r"compute capability 9\.0"):
        in_mode(rng.standard_normal((300, 300), F), rng.standard_normal((300, 300), F))
