"""The kernels of fp16x3 on a Hopper GPU: layouts, batches, epilogues, operands packed ahead, captures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewave
from tilewave.device import DeviceSpec
from tilewave.kernels import fp16x3 as kernels
from tilewave.kernels.arguments import Pointers
from tilewave.planner.fp16x3 import plan_on
from tilewave.planning import LAYOUTS
from tilewave.precision import error_in_mode_bounds
from tilewave.runtime.driver import Device, DeviceArray, Stream
from tilewave.runtime.fp16x3 import launch_fp16x3, prepare_fp16x3

pytestmark = pytest.mark.gpu

Rng = np.random.Generator
F = np.float32


@pytest.fixture
def hopper(spec: DeviceSpec) -> DeviceSpec:
    if spec.compute_capability != (9, 0):
        pytest.skip(f"fp16x3 has kernels for Hopper; this is {spec.name}")
    return spec


def product(a: Any, b: Any, c: Any = None, **options: Any) -> Any:
    """By the mode's kernels, also where ieee is predicted to be faster."""
    return tilewave.gemm(a, b, c, precision="fp16x3", batch_invariant=True, **options)


def on(device: Device, array: np.ndarray) -> DeviceArray:
    return DeviceArray.from_numpy(device, array)


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("instance", kernels.MAIN_INSTANCES, ids=str)
def test_layouts_ragged_sizes_and_batches(
    instance: Any, layouts: str, hopper: DeviceSpec, device: Device, stream: Stream, rng: Rng
) -> None:
    for _ in range(4):
        # One column would be planned as a row, its operands in each other's place.
        m, n, k = (int(size) for size in rng.integers((2, 2, 1), 700))
        batch = int(rng.integers(1, 4))
        a = rng.random((batch, *((k, m) if layouts[0] == "T" else (m, k))), F)
        b = rng.random((batch, *((n, k) if layouts[1] == "T" else (k, n))), F)
        problem = tilewave.plan(
            m, n, k, batch=batch, layouts=layouts, device=hopper, precision="fp16x3", batch_invariant=True
        ).problem
        plan = plan_on(problem, instance, hopper, int(rng.integers(2, hopper.sms + 1)))
        left, right = on(device, a), on(device, b)
        out = DeviceArray.empty(device, (batch, m, n))
        out.poison()
        pointers = Pointers(left.address, right.address, out.address)
        launch_fp16x3(plan, pointers, device=device.ordinal, stream=stream.handle)
        stream.synchronize()
        plain = a.swapaxes(1, 2) if layouts[0] == "T" else a
        other = b.swapaxes(1, 2) if layouts[1] == "T" else b
        for item, found in enumerate(out.to_numpy()):
            error = error_in_mode_bounds("fp16x3", found, plain[item], other[item])
            assert error <= 1, (m, n, k, item)


@pytest.mark.parametrize("blocks", range(1, 10))
def test_k_shared_by_the_blocks_of_a_cluster(
    blocks: int, hopper: DeviceSpec, device: Device, rng: Rng
) -> None:
    """Columns are packed by clusters of every size; of nine blocks there is none, and they are scanned."""
    k = 1024 * blocks - int(rng.integers(0, 900))
    m, n = (int(size) for size in rng.integers(2, 150, 2))
    a, b = rng.standard_normal((k, m), F), rng.standard_normal((k, n), F)
    left, right = on(device, a), on(device, b)
    for _ in range(3):
        found = product(left, right, transpose_a=True).to_numpy()
        assert error_in_mode_bounds("fp16x3", found, np.ascontiguousarray(a.T), b) <= 1, (m, n, k)


def test_tiles_of_equal_sums_and_packed_operands_give_the_same_bits(
    hopper: DeviceSpec, device: Device, stream: Stream, rng: Rng
) -> None:
    a, b = rng.standard_normal((300, 500), F), rng.standard_normal((500, 260), F)
    a[7, 3], b[11, 200] = np.inf, np.nan
    left, right = on(device, a), on(device, b)
    expected = product(a, b)
    for one, other in (
        (left, tilewave.prepack(right)),
        (tilewave.prepack(left, operand="a"), right),
        (tilewave.prepack(left, operand="a"), tilewave.prepack(right)),
    ):
        found = product(one, other).to_numpy()
        assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))
    problem = tilewave.plan(300, 260, 500, device=hopper, precision="fp16x3", batch_invariant=True).problem
    by_tile = {}
    for instance in kernels.MAIN_INSTANCES:
        out = DeviceArray.empty(device, (300, 260))
        out.poison()
        pointers = Pointers(left.address, right.address, out.address)
        plan = plan_on(problem, instance, hopper, hopper.sms)
        launch_fp16x3(plan, pointers, device=device.ordinal, stream=stream.handle)
        stream.synchronize()
        by_tile[instance.name] = out.to_numpy().view(np.uint32)
    # Fine sums are those of the smaller tile, coarse ones of both others.
    assert np.array_equal(by_tile[kernels.SMALL.name], expected.view(np.uint32))
    assert np.array_equal(by_tile[kernels.LARGE.name], by_tile[kernels.PAIRS.name])


def test_all_of_a_product_is_computed_that_ieee_would_leave_in_part_to_other_launches(
    hopper: DeviceSpec, device: Device, rng: Rng
) -> None:
    m = n = k = 2049
    assert tilewave.plan(m, n, k, device=hopper, precision="fp16x3").problem.precision == "fp16x3"
    a, b = rng.standard_normal((m, k), F), rng.standard_normal((k, n), F)
    out = DeviceArray.empty(device, (m, n))
    out.poison()
    found = tilewave.matmul(on(device, a), on(device, b), out=out, precision="fp16x3").to_numpy()
    assert np.isfinite(found).all()
    rows = np.r_[0:3, m - 3 : m]
    error = error_in_mode_bounds("fp16x3", np.ascontiguousarray(found[rows]), a[rows], b)
    assert error <= 1


def test_c_in_place_survives_recomputing(hopper: DeviceSpec, device: Device, rng: Rng) -> None:
    a, b = rng.standard_normal((200, 300), F), rng.standard_normal((300, 150), F)
    a[5] *= np.ldexp(F(1), rng.integers(-60, 0, 300)).astype(F)  # a row that is left to ieee
    c = rng.standard_normal((200, 150), F)
    out = on(device, c)
    for _ in range(3):  # the flag and the ticket are as a product must find them, each time
        out.copy_from(c)
        product(on(device, a), on(device, b), out, beta=0.5, alpha=-2.0, out=out)
        expected = -2.0 * (a.astype(float) @ b) + 0.5 * c
        size = 2 * (np.abs(a).astype(float) @ np.abs(b)) + np.abs(c)
        assert (np.abs(out.to_numpy() - expected) <= 1e-5 * size).all()
        plain = product(on(device, a[6:]), on(device, b)).to_numpy()
        assert error_in_mode_bounds("fp16x3", plain, a[6:], b) <= 1


def test_the_epilogue(hopper: DeviceSpec, device: Device, rng: Rng) -> None:
    a, b = rng.standard_normal((129, 640), F) / 25, rng.standard_normal((640, 257), F)
    bias = rng.standard_normal(257, F)
    for activation in ("relu", "gelu", "gelu_tanh", "silu"):
        options: dict[str, Any] = {"activation": activation, "return_preactivation": True}
        found, before = product(on(device, a), on(device, b), bias=on(device, bias), **options)
        plain, plain_before = tilewave.gemm(a, b, bias=bias, **options)
        np.testing.assert_allclose(before.to_numpy(), plain_before, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.to_numpy(), plain, rtol=1e-4, atol=1e-5)


def test_a_captured_product_follows_its_operands(hopper: DeviceSpec, device: Device, rng: Rng) -> None:
    stream = Stream(device)
    a, b = on(device, rng.standard_normal((300, 200), F)), on(device, rng.standard_normal((200, 300), F))
    out = DeviceArray.empty(device, (300, 300))
    (plan,) = tilewave.plan_for(a, b, out=out, precision="fp16x3", batch_invariant=True)
    prepare_fp16x3(plan, device=device.ordinal)
    graph = stream.capture(lambda: product(a, b, out=out, stream=stream.handle))
    for special in (False, True, False):
        x = rng.standard_normal((300, 200), F)
        if special:
            x[3, 4] = np.inf
        a.copy_from(x)
        out.poison()
        graph.launch()
        stream.synchronize()
        found = out.to_numpy()
        assert np.isfinite(found).all() != special
        assert error_in_mode_bounds("fp16x3", found[4:], x[4:], b.to_numpy()) <= 1


def test_same_bits_in_every_run(hopper: DeviceSpec, device: Device, rng: Rng) -> None:
    a, b = on(device, rng.random((1500, 3000), F)), on(device, rng.random((3000, 1001), F))
    first = product(a, b).to_numpy()
    for _ in range(20):
        assert np.array_equal(product(a, b).to_numpy(), first)
