"""The mode fp16x3 on a Hopper GPU against its model and its bound."""

from __future__ import annotations

import numpy as np
import pytest

import tilewave
from tilewave.bench.accuracy.contenders import Contender, by_kernel, on_gpu
from tilewave.device import DeviceSpec
from tilewave.errors import UsageError
from tilewave.kernels import fp16x3 as kernels
from tilewave.kernels.instances import Instance
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
        model = fp16x3.multiply(a[few[0]], b[:, few[1]])  # with fine sums, as with batch_invariant
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


@pytest.fixture
def cublas(hopper: DeviceSpec) -> Contender:
    contenders, notes = on_gpu()
    if "cublas" not in contenders:
        pytest.skip(f"no cuBLAS to compare with: {notes}")
    return contenders["cublas"]


def errors(products: list[np.ndarray], a: np.ndarray, b: np.ndarray) -> list[float]:
    """Relative errors in Frobenius's norm."""
    exact = a.astype(float) @ b.astype(float)
    return [float(np.linalg.norm(c - exact) / np.linalg.norm(exact)) for c in products]


@pytest.mark.parametrize("name", ["normal", "uniform"])
@pytest.mark.parametrize("k", [1024, 1536, 2048, 4096, 16384])
def test_at_most_the_error_of_cublas(cublas: Contender, rng: Rng, name: str, k: int) -> None:
    """Also where the output is so small that cuBLAS cuts K, and the mode would run as ieee."""
    for size in (256, 512, 1024):
        a, b = draw(name, rng, size, k, size)
        ours, theirs = errors([in_mode(a, b), cublas.multiply(a, b)], a, b)
        assert ours <= theirs, size


@pytest.mark.parametrize("name", ["normal", "uniform"])
@pytest.mark.parametrize(
    ("m", "n", "k", "precision"),
    [
        (512, 512, 1024, "ieee"),
        (256, 1024, 1500, "ieee"),
        (512, 512, 4096, "ieee"),
        (1024, 1024, 1024, "fp16x3"),
        (1408, 1536, 1024, "fp16x3"),
        (1536, 1536, 1024, "fp16x3"),
        (2048, 2048, 2048, "fp16x3"),
    ],
)
def test_what_the_planner_chooses_is_at_most_as_far_off_as_cublas(
    cublas: Contender, hopper: DeviceSpec, rng: Rng, name: str, m: int, n: int, k: int, precision: str
) -> None:
    assert tilewave.plan(m, n, k, device=hopper, precision="fp16x3").problem.precision == precision
    a, b = draw(name, rng, m, k, n)
    ours, theirs = errors([tilewave.matmul(a, b, precision="fp16x3"), cublas.multiply(a, b)], a, b)
    assert ours <= theirs


@pytest.mark.parametrize("name", ["normal", "uniform"])
@pytest.mark.parametrize("instance", [kernels.SMALL, kernels.LARGE], ids=str)
def test_at_most_3e_7_for_a_small_k(hopper: DeviceSpec, rng: Rng, name: str, instance: Instance) -> None:
    for k in (1, 16, 100, 1023):
        a, b = draw(name, rng, 512, k, 512)
        assert errors([by_kernel(a, b, instance)], a, b)[0] <= 3e-7, k


def test_other_architectures_refuse(spec: DeviceSpec, rng: Rng) -> None:
    if spec.compute_capability == (9, 0):
        pytest.skip("this is a Hopper")
    with pytest.raises(UsageError, match=r"compute capability 9\.0"):
        in_mode(rng.standard_normal((300, 300), F), rng.standard_normal((300, 300), F))
