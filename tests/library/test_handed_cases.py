"""Faults that users of other libraries met (handed_cases.json): values, layouts, sizes, special numbers.

`test_hNNN_...` is the test of case HNNN, on the host and through the product's kernels in the emulator where
the case can run there; test_handed_cases_of_launching.py has streams, threads, schedules and devices, and
tests/gpu/test_handed_cases_on_gpu.py what only a GPU shows. test_handed_list.py holds all of them against the
list.
"""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest
from host_gpu import ExchangedArray, FakeGpu, TorchTensor
from numpy.lib.stride_tricks import as_strided
from paths import Path

import tilewave
from tilewave.errors import NotBuiltError, OperandTypeError, UsageError
from tilewave.kernels.arguments import GEMM_ARGS_BYTES, Pointers, pack_arguments
from tilewave.normalise import normalise
from tilewave.planner.gemm import GemmPlan, PlanOptions, plan_gemm
from tilewave.precision import error_in_bounds, ieee_bound
from tilewave.problem import GemmProblem, MatrixLayout

Rng = np.random.Generator
F = np.float32
Array = np.ndarray[Any, Any]
EMULATED_MODES = ("bf16x6", "bf16x9", "tf32x3")


def normal(rng: Rng, *shape: int) -> Array:
    return rng.standard_normal(shape, dtype=F)


def test_h001_empty_k_writes_zeros(path: Path, rng: Rng) -> None:
    a, b = np.empty((10, 1, 0), F), np.empty((10, 0, 43200), F)
    out = normal(rng, 10, 1, 43200)
    path.matmul(a, b, out=out)
    assert not out.any()
    assert not np.signbit(out).any()
    given = path.matmul(np.empty((3, 2, 0), F), np.empty((3, 0, 3), F))
    assert np.array_equal(given, np.zeros((3, 2, 3), F))


def test_h002_k_of_one_is_the_outer_product_to_the_bit(path: Path, rng: Rng) -> None:
    for m, n in ((1, 128), (128, 1), (1, 1)):
        a, b = normal(rng, m, 1), normal(rng, 1, n)
        assert np.array_equal(path.matmul(a, b), a * b)


def test_h006_a_size_just_under_a_tile(path: Path, rng: Rng) -> None:
    a, b = normal(rng, 511, 96), normal(rng, 96, 1024)
    assert error_in_bounds(path.matmul(a, b), a, b) <= 1


def test_h006_every_selectable_tile(kernels: Path, rng: Rng) -> None:
    """Each instance that the planner weighs for 511 x 1024 x 96, on as many columns as its tile needs."""
    whole = GemmProblem(511, 1024, 96, (), *(MatrixLayout(row, 1) for row in (96, 1024, 1024)))
    spec = kernels.executor.spec
    candidates = plan_gemm(whole, spec).considered
    names = {candidate.instance.name for candidate in candidates if candidate.estimate is not None}
    assert len(names) > 3
    from tilewave.runtime.emulated import emulate_plan

    instances = {candidate.instance.name: candidate.instance for candidate in candidates}
    for name in sorted(names):
        instance = instances[name]
        n = instance.bn
        a, b, out = normal(rng, 511, 96), normal(rng, 96, n), np.full((511, n), np.nan, F)
        problem = GemmProblem(511, n, 96, (), MatrixLayout(96, 1), MatrixLayout(n, 1), MatrixLayout(n, 1))
        plan = only(problem, name, spec)
        # The last tile, ragged in m, and its neighbour; whole ones besides are like it.
        last = plan.blocks - 1
        emulate_plan(plan, {"a": a, "b": b, "out": out}, blocks=[max(0, last - 1), last], count=False)
        rows = slice(511 // instance.bm * instance.bm, 511)
        assert error_in_bounds(out[rows], a[rows], b) <= 1, name


def only(problem: GemmProblem, name: str, spec: Any) -> GemmPlan:
    """The plan for a problem by one instance, uncut."""
    from tilewave.kernels.families import FAMILIES
    from tilewave.planner.gemm import GemmPlanner

    class One:
        def __init__(self, family: Any) -> None:
            self.name, self.family = family.name, family

        def instances(self) -> tuple[Any, ...]:
            return tuple(each for each in self.family.instances() if each.name == name)

        def matching(self, problem: GemmProblem) -> tuple[Any, ...]:
            return self.instances()

        def refuses(self, instance: Any, problem: GemmProblem) -> str | None:
            refusal: str | None = self.family.refuses(instance, problem)
            return refusal

    family = next(each for each in FAMILIES if name in {instance.name for instance in each.instances()})
    planner = GemmPlanner(spec, [One(family)], new_loops=True)  # as the library's own on this GPU
    return planner.plan(problem, PlanOptions(schedule="data_parallel"))


def test_h007_small_squares_and_neighbours_of_tiles(path: Path, rng: Rng) -> None:
    sizes = [*range(1, 41), 63, 65, 127, 129, 255, 257]
    if path.emulated:  # the GPU's test has all of them
        sizes = [3, 9, 16, *rng.choice(sizes[:40], 2).tolist(), 63, 129]
    for n, transpose_a, transpose_b in itertools.product(sizes, (False, True), (False, True)):
        a, b = normal(rng, n, n), normal(rng, n, n)
        storage = np.full((n + 4, n + 4), np.nan, F)
        out = storage[2:-2, 2:-2]
        path.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b, out=out)
        x, y = a.T if transpose_a else a, b.T if transpose_b else b
        assert error_in_bounds(out.copy(), x, y) <= 1, (n, transpose_a, transpose_b)
        out[...] = np.nan
        assert np.isnan(storage).all()


def test_h008_n_of_eight_modulo_sixteen(path: Path, rng: Rng) -> None:
    """The modes that the case is about are not built; FP32 itself is exact on small integers."""
    for n in (16, 24, 40, 56, 72):
        a = rng.integers(-8, 9, (64, 128)).astype(F)
        b = rng.integers(-8, 9, (128, n)).astype(F)
        assert np.array_equal(path.matmul(a, b), a.astype(np.int64) @ b.astype(np.int64))
        for mode in EMULATED_MODES:
            with pytest.raises(NotBuiltError):
                path.matmul(a, b, precision=mode)


def test_h011_operands_of_stride_zero(path: Path, rng: Rng) -> None:
    x = normal(rng, 2, 2)
    incoming = np.broadcast_to(np.ones((), F), (2,))  # the gradient of a sum
    assert np.array_equal(path.matmul(x.T, incoming), x.sum(0))
    grad = np.broadcast_to(F(0.5), (33, 20))
    a, b = normal(rng, 33, 17), normal(rng, 17, 20)
    assert error_in_bounds(path.matmul(grad, b.T), grad, b.T) <= 1
    assert error_in_bounds(path.matmul(a.T, grad), a.T, grad) <= 1


def test_h012_strides_of_axes_of_length_one_mean_nothing(path: Path, rng: Rng) -> None:
    base, other = normal(rng, 4, 4), normal(rng, 4, 4)
    odd = as_strided(base, (1, 1, 4, 4), (7 * 4, 999 * 4, 16, 4))
    assert np.array_equal(path.matmul(odd, other)[0, 0], path.matmul(base, other))
    rows = normal(rng, 5, 1, 24)
    spread = as_strided(rows, rows.shape, (rows.strides[0], 12345 * 4, 4))
    b = normal(rng, 24, 6)
    assert np.array_equal(path.matmul(spread, b), path.matmul(rows, b))
    column = as_strided(normal(rng, 24), (24, 1), (4, -77 * 4))
    assert error_in_bounds(path.matmul(b.T.copy(), column), b.T, column) <= 1


def test_h013_leading_dimensions(path: Path, rng: Rng) -> None:
    flat = np.arange(1, 9, dtype=F)
    view = as_strided(flat, (2, 2), (16, 4))
    assert np.array_equal(path.matmul(view, np.eye(2, dtype=F)), [[1, 2], [5, 6]])
    wide = np.full((20, 30), np.nan, F)
    a, b = wide[:9, 3:10], np.full((7, 40), np.nan, F)[:, 5:16]
    a[...], b[...] = normal(rng, 9, 7), normal(rng, 7, 11)
    storage = np.full((9, 25), 7, F)
    path.matmul(a, b, out=storage[:, 4:15])
    assert error_in_bounds(storage[:, 4:15].copy(), a, b) <= 1
    assert np.all(storage[:, :4] == 7)
    assert np.all(storage[:, 15:] == 7)


def test_h014_a_matrix_broadcast_over_a_batch_is_not_copied(path: Path, rng: Rng) -> None:
    size, batch = (128, 24) if path.emulated else (512, 100)  # the GPU's test has the case's own 4096
    a, b = normal(rng, size, size), normal(rng, batch, size, 1)
    wide = np.broadcast_to(a, (batch, size, size))
    tracemalloc.start()
    got = path.matmul(wide, b)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert error_in_bounds(got[..., 0].T, a, b[..., 0].T) <= 1
    if path.emulated:
        assert [plan.problem.batch for plan in path.plans] == [()]  # one product
    else:
        assert peak < 2 * a.nbytes


def test_h020_any_alignment(path: Path, rng: Rng) -> None:
    names = ("a", "b", "c", "bias")
    shapes = {"a": (32, 16), "b": (16, 24), "c": (32, 24), "bias": (24,)}
    together = [tuple(offset for _ in names) for offset in (1, 2, 3)]
    alone = [tuple(offset * (i == j) for j in range(4)) for i in range(4) for offset in (1, 2, 3)]
    for offsets in [*together, *alone]:
        arrays = {}
        for name, offset in zip(names, offsets, strict=True):
            count = int(np.prod(shapes[name]))
            storage = np.full(count + 8, np.nan, F)
            start = (-storage.ctypes.data % 16) // 4 + offset
            arrays[name] = storage[start : start + count].reshape(shapes[name])
            arrays[name][...] = normal(rng, *shapes[name])
        got = path.gemm(**arrays, beta=0.5)
        exact = arrays["a"].astype(np.float64) @ arrays["b"] + 0.5 * arrays["c"] + arrays["bias"]
        assert np.allclose(got, exact, rtol=1e-5, atol=1e-5), offsets


def test_h021_odd_numbers_of_partial_sums(kernels: Path, rng: Rng) -> None:
    for m, n, k in ((33, 17, 3000), (65, 129, 700), (1, 1, 9000)):
        a, b = normal(rng, m, k), normal(rng, k, n)
        got = kernels.matmul(a, b, schedule="split_k:3")
        assert kernels.plans[-1].cut.pieces == 3
        assert error_in_bounds(got, a, b) <= 1


def test_h024_more_than_65535_items(path: Path) -> None:
    for batch in (65537,) if path.emulated else (65535, 65536, 65537, 100_000, 131_072):
        ones = np.ones((batch, 1, 1), F)
        assert path.matmul(ones, ones).sum(dtype=np.float64) == batch


def test_h025_offsets_beyond_two_to_the_31(kernels: Path) -> None:
    """K = 16,909,322 in steps of 127: the plan and what the kernel receives; the GPU's test computes it."""
    k = 16_909_322
    column = MatrixLayout(127, 127, (), 4)
    problem = GemmProblem(1, 1, k, (), MatrixLayout(0, 127, (), 4), column, MatrixLayout(0, 0))
    plan = plan_gemm(normalise(problem).problem, kernels.executor.spec)
    packed = pack_arguments(plan.problem, plan.cut, plan.raster, Pointers(0, 4, 16), 1.0, 0.0)
    assert len(packed) == GEMM_ARGS_BYTES
    assert 127 * k > 2**31
    assert 0 < plan.blocks < 2**31


def test_h026_more_than_two_to_the_31_outputs(kernels: Path) -> None:
    plan = tilewave.plan(46341, 46341, 64, device=kernels.executor.spec)
    assert 46341 * 46341 > 2**31
    assert 0 < plan.blocks < 2**31
    tiles = plan.raster.tiles_m * plan.raster.tiles_n
    assert plan.cut.tiles == tiles
    assert plan.raster.tiles_m * plan.instance.bm >= 46341
    assert plan.raster.tiles_n * plan.instance.bn >= 46341
    assert plan.estimate.total > 0


def test_h027_millions_of_tiles_in_one_direction(kernels: Path) -> None:
    """Grids have one dimension, so that no direction has a limit of 65,535 blocks."""
    n = 65536 * 128 + 1
    for m, columns in ((8, n), (n, 8)):
        plan = tilewave.plan(m, columns, 4, device=kernels.executor.spec)
        assert 0 < plan.blocks < 2**31
        covered = plan.raster.tiles_m * plan.instance.bm * plan.raster.tiles_n * plan.instance.bn
        assert covered >= m * columns


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_h032_beta_zero_does_not_read_c(path: Path, rng: Rng, value: float) -> None:
    for schedule, (m, n, k) in itertools.product((None, "split_k:3"), ((33, 35, 200), (64, 64, 128))):
        a, b, c = normal(rng, m, k), normal(rng, k, n), np.full((m, n), value, F)
        assert error_in_bounds(path.gemm(a, b, c, beta=0.0, schedule=schedule), a, b) <= 1
        path.gemm(a, b, c, beta=0.0, schedule=schedule, out=c)
        assert error_in_bounds(c, a, b) <= 1


def test_h033_out_and_workspace_may_hold_anything(path: Path, rng: Rng) -> None:
    """The emulator poisons workspace and shared memory; K is smaller than a slice."""
    for k in (1, 3, 7):
        a, b, out = normal(rng, 70, k), normal(rng, k, 70), np.full((70, 70), np.nan, F)
        path.matmul(a, b, out=out)
        assert error_in_bounds(out, a, b) <= 1
    a, b, out = normal(rng, 20, 300), normal(rng, 300, 20), np.full((20, 20), np.nan, F)
    path.matmul(a, b, out=out, schedule="split_k:2")
    assert error_in_bounds(out, a, b) <= 1


def test_h036_infinities(path: Path, rng: Rng) -> None:
    """FP32 gives each output the class that IEEE arithmetic gives it; the splitting modes are not built."""
    infinite = np.full((5, 40), np.inf, F)
    assert np.all(path.matmul(infinite, infinite.T) == np.inf)
    a, b = np.abs(normal(rng, 5, 40)), np.abs(normal(rng, 40, 6))
    a[2, 7] = np.inf
    assert error_in_bounds(path.matmul(a, b), a, b) <= 1
    b[7, 3] = -1
    assert error_in_bounds(path.matmul(a, b), a, b) <= 1
    b[7, 4] = 0
    assert np.isnan(path.matmul(a, b)[2, 4])
    for mode in EMULATED_MODES:
        with pytest.raises(NotBuiltError):
            path.matmul(a, b, precision=mode)


def test_h037_subnormals_are_kept(path: Path) -> None:
    def product(x: float, y: float) -> Any:
        return path.matmul(np.array([[x]], F), np.array([[y]], F))[0, 0]

    tiny = float(np.finfo(F).tiny)
    assert product(tiny, 0.5) == F(tiny / 2)
    assert product(2.0**-149, 2) == F(2.0**-148)
    assert product(2.0**-140, 1) == F(2.0**-140)
    a = np.full((3, 50), 2.0**-80, F)
    b = np.full((50, 4), 2.0**-65, F)
    assert np.all(path.matmul(a, b) == F(50 * 2.0**-145))


def test_h038_nan_in_the_padding(path: Path, rng: Rng) -> None:
    for pad, k in ((4, 100), (3, 37)):
        dense_a, dense_b = normal(rng, 40, k), normal(rng, k, 36)
        padded_a, padded_b = np.full((40, k + pad), np.nan, F), np.full((k, 36 + pad), np.nan, F)
        padded_a[:, :k], padded_b[:, :36] = dense_a, dense_b
        got = path.matmul(padded_a[:, :k], padded_b[:, :36], batch_invariant=True)
        assert np.array_equal(got, path.matmul(dense_a, dense_b, batch_invariant=True))


def test_h042_out_is_an_input(path: Path) -> None:
    size = 61 if path.emulated else 999
    a = np.ones((2, size, size), F)
    path.matmul(a, a, out=a)
    assert np.all(a == size)


def test_h043_chained_in_place(path: Path, rng: Rng) -> None:
    n = 60 if path.emulated else 500
    x, y, z = normal(rng, n, n), normal(rng, n, n), normal(rng, n, n)
    first = path.matmul(x, y)
    second = path.matmul(first, z)
    path.matmul(x, y, out=y)
    path.matmul(y, z, out=y)
    assert np.array_equal(y, second)


def test_h046_integers_are_refused(path: Path) -> None:
    for dtype in (np.int32, np.int64, np.bool_):
        values = np.full((3, 3), 2**24 + 1).astype(dtype)
        with pytest.raises(OperandTypeError, match=r"a is (int|bool)"):
            path.matmul(values, values)
        with pytest.raises(OperandTypeError, match=r"b is (int|bool)"):
            path.matmul(values.astype(F), values)


def test_h047_out_of_another_type_is_refused_untouched(path: Path, rng: Rng) -> None:
    a = normal(rng, 3, 3)
    for dtype in (np.float64, np.float16, np.int32):
        out = np.full((3, 3), 7, dtype)
        with pytest.raises(TypeError, match=r"out is .*; the result is float32"):
            path.matmul(a, a, out=out)
        assert np.all(out == 7)


def test_h095_nothing_is_rounded_to_ten_bits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert path.matmul(np.array([[1024.5]], F), np.array([[1.0]], F))[0, 0] == 1024.5
    a = np.eye(128, dtype=F)
    a[0, 0] = 1024.5
    assert np.array_equal(path.matmul(a, np.eye(128, dtype=F)), a)


def test_h096_the_precision_asked_for_is_what_runs(path: Path, rng: Rng) -> None:
    for n in (10, 10_000):
        a, b = rng.random((2, n), F), rng.random((n, 2), F)
        assert error_in_bounds(path.matmul(a, b, precision="ieee"), a, b) <= 1
        for mode in ("tf32x3", "bf16x6"):
            with pytest.raises(NotBuiltError):
                path.matmul(a, b, precision=mode)
        with pytest.raises(UsageError, match="accepted is 'ieee'"):
            path.matmul(a, b, precision="highest")
        (plan,) = tilewave.plan_for(a, b, device="H200")
        assert plan.problem.precision == "ieee"
        assert plan.instance.name in tilewave.explain(plan)


def test_h107_rounding_is_told_from_a_bug_as_k_grows(path: Path, rng: Rng) -> None:
    for k in (1000, 10_000) if path.emulated else (1000, 10_000, 100_000, 1_000_000, 10_000_000):
        for draw in (rng.random, rng.standard_normal)[: 1 if k > 10**6 else 2]:
            a, b = draw((1, k), dtype=F), draw((k, 1), dtype=F)
            c = path.matmul(a, b)
            verdict = tilewave.check(a, b, c)
            assert verdict.rounding
            # Far inside the worst case: about sqrt(K) for random data.
            assert verdict.error <= 8 / k**0.5
            assert f"gamma_K for K = {k:,}" in str(verdict)
            c += 4 * ieee_bound(a, b).astype(F)
            assert not tilewave.check(a, b, c).rounding


def test_h109_cancellation_is_explained(path: Path, rng: Rng) -> None:
    shape = (40, 80, 80, 80) if path.emulated else (1000, 500, 500, 500)
    first, second, third = normal(rng, *shape[:2]), normal(rng, *shape[1:3]), normal(rng, *shape[2:])
    half = path.matmul(first, second)
    whole = path.matmul(half, third)
    verdict = tilewave.check(half, third, whole)
    assert verdict.rounding
    assert verdict.relative > 4e-6  # what an elementwise comparison takes for a bug
    assert verdict.cancellation > 100
    assert "is cancellation" in str(verdict)
    assert whole.shape == (shape[0], shape[3])


def test_h115_tensors_whose_meaning_would_be_lost(gpu: FakeGpu, rng: Rng) -> None:
    """The stand-in for PyTorch; tests/pytorch has its gradients, the GPU's test a busy stream."""
    a = normal(rng, 4, 4)
    with pytest.raises(UsageError, match=r"a\.resolve_neg\(\)"):
        tilewave.matmul(TorchTensor(a, negated=True), TorchTensor(a))
    assert gpu.run.submissions == []
    produced = ExchangedArray(a)
    tilewave.matmul(produced, produced, stream=0x77)
    assert produced.streams == [0x77, 0x77]  # the producer orders our stream behind its own


def test_h116_negative_strides(path: Path, rng: Rng) -> None:
    a, b = normal(rng, 20, 30), normal(rng, 30, 10)
    for flipped in (np.flip(a), np.flip(a, 0), np.flip(a, 1)):
        assert error_in_bounds(path.matmul(flipped, np.flip(b)), flipped, np.flip(b)) <= 1


def test_h129_bias_follows_its_axis_in_every_layout(path: Path, rng: Rng) -> None:
    bias = np.arange(1, 9, dtype=F)
    for order_a, order_b, order_out in itertools.product("CF", repeat=3):
        a = np.asarray(rng.integers(-4, 5, (8, 8)), F, order=order_a)
        b = np.asarray(rng.integers(-4, 5, (8, 8)), F, order=order_b)
        for axis in (-1, -2):
            out = np.full((8, 8), np.nan, F, order=order_out)
            path.gemm(a, b, bias=bias, bias_axis=axis, out=out)
            assert np.array_equal(out, a @ b + (bias if axis == -1 else bias[:, np.newaxis]))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_h130_activation_waits_for_the_last_partial_sum(path: Path, rng: Rng, activation: str) -> None:
    k = 256
    a = np.abs(normal(rng, 12, k))
    a[:, : k // 2] *= -1  # the first half sums to below 0, the whole to above
    b = np.abs(normal(rng, k, 12))
    b[k // 2 :] *= 2
    bias = normal(rng, 12)
    results = [
        path.gemm(
            a, b, bias=bias, activation=activation, schedule=f"split_k:{pieces}" if pieces > 1 else None
        )
        for pieces in (1, 2, 8)
    ]
    exact = a.astype(np.float64) @ b + bias
    assert (exact > 0).all()
    for got in results:
        assert np.allclose(got, exact, rtol=1e-5)  # both activations are the identity up here
