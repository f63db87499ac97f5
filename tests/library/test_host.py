"""Products of host arrays without a GPU: values, what is read, what is written."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import tilewave
from tilewave.errors import UsageError
from tilewave.precision import error_in_bounds

Rng = np.random.Generator
F = np.float32


def normal(rng: Rng, *shape: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape, dtype=F)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about the path that a machine without a GPU takes, on every machine."""
    monkeypatch.setattr("tilewave.api.gpu_for_host_operands", lambda: None)


def activated(name: str | None, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Each activation by its definition, in float64, element by element."""
    one = {
        None: lambda v: v,
        "relu": lambda v: max(v, 0.0),
        "gelu": lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2))),
        "gelu_tanh": lambda v: 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
        "silu": lambda v: v / (1 + math.exp(-v)),
    }[name]
    return np.array([one(v) for v in x.astype(np.float64).ravel().tolist()]).reshape(x.shape)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_whole_epilogue(rng: Rng, activation: str | None, axis: int) -> None:
    a, b, c = normal(rng, 3, 7, 33), normal(rng, 33, 5), normal(rng, 3, 7, 5)
    bias = normal(rng, 5 if axis == -1 else 7)
    alpha, beta = 0.75, -1.25
    got, before = tilewave.gemm(
        a,
        b,
        c,
        alpha=alpha,
        beta=beta,
        bias=bias,
        bias_axis=axis,
        activation=activation,
        return_preactivation=True,
    )
    exact = alpha * (a.astype(np.float64) @ b) + beta * c + (bias if axis == -1 else bias[:, np.newaxis])
    # Rounding of the product by its bound, then three more operations on numbers of this size.
    scale = alpha * (np.abs(a).astype(np.float64) @ np.abs(b)) + np.abs(beta * c) + np.abs(bias).max()
    assert np.all(np.abs(before - exact) <= (33 + 4) * 2.0**-24 * scale)
    assert np.allclose(got, activated(activation, before), rtol=1e-6, atol=1e-7)
    assert got.dtype == before.dtype == np.float32


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_beta_zero_does_not_read_c(rng: Rng, value: float) -> None:
    """Case H032."""
    a, b = normal(rng, 9, 8), normal(rng, 8, 7)
    c = np.full((9, 7), value, F)
    assert np.array_equal(tilewave.gemm(a, b, c), a @ b)
    out = c.copy()
    assert tilewave.gemm(a, b, out, out=out) is out
    assert np.array_equal(out, a @ b)


def test_alpha_zero_does_not_read_a_and_b(rng: Rng) -> None:
    a, b = np.full((9, 8), np.nan, F), np.full((8, 7), np.inf, F)
    c = normal(rng, 9, 7)
    assert np.array_equal(tilewave.gemm(a, b, alpha=0.0), np.zeros((9, 7), F))
    assert np.array_equal(tilewave.gemm(a, b, c, alpha=0.0, beta=2.0), 2 * c)
    # What rounds to 0 in float32 is 0.
    assert np.array_equal(tilewave.gemm(a, b, alpha=1e-60), np.zeros((9, 7), F))


def test_nan_and_infinity_go_where_ieee_takes_them() -> None:
    a = np.array([[np.inf, 1], [np.nan, 1], [3e38, 3e38]], F)
    b = np.array([[1, 0], [1, 1]], F)
    got = tilewave.matmul(a, b)
    assert np.array_equal(
        got, np.array([[np.inf, np.nan], [np.nan, np.nan], [np.inf, 3e38]], F), equal_nan=True
    )


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_activations_keep_nan_and_saturate(activation: str) -> None:
    values = np.array([[np.nan, 1e30, -1e30, 0.0, np.inf]], F)
    got = tilewave.gemm(values, np.eye(5, dtype=F) * 0, values, beta=1.0, activation=activation, alpha=0.0)
    assert np.isnan(got[0, 0])
    assert got[0, 1] == F(1e30)
    assert got[0, 2] == 0
    assert got[0, 3] == 0
    assert got[0, 4] == np.inf


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_activations_of_results_that_numpy_would_not_lay_out_in_c_order(rng: Rng, activation: str) -> None:
    """A ufunc's result follows the order of its operands' batch axes unless it is told not to."""
    a, b = normal(rng, 3, 2, 1, 4).swapaxes(0, 1), normal(rng, 4, 5)
    got, before = tilewave.gemm(a, b, activation=activation, return_preactivation=True)
    assert np.allclose(got, activated(activation, before), rtol=1e-6, atol=1e-7)


def test_k_zero_writes_zeros_and_beta_c(rng: Rng) -> None:
    a, b, c = np.empty((10, 1, 0), F), np.empty((10, 0, 43), F), normal(rng, 10, 1, 43)
    out = np.full((10, 1, 43), np.nan, F)
    tilewave.matmul(a, b, out=out)
    assert not out.any()
    assert not np.signbit(out).any()
    assert not np.signbit(tilewave.gemm(a, b, alpha=-1.0)).any()
    assert np.array_equal(tilewave.gemm(a, b, c, beta=3.0), 3 * c)


def layouts(rng: Rng, rows: int, columns: int) -> dict[str, np.ndarray[Any, Any]]:
    """The same kind of matrix in every layout that NumPy can express."""
    base = normal(rng, 4 * rows + 4, 4 * columns + 4)
    odd = np.zeros((rows, columns), [("pad", "u1"), ("value", "<f4")])
    odd["value"] = normal(rng, rows, columns)
    return {
        "rows": np.ascontiguousarray(base[:rows, :columns]),
        "columns": np.asfortranarray(base[:rows, :columns]),
        "padded": base[1 : rows + 1, 1 : columns + 1],
        "every other": base[: 2 * rows : 2, : 3 * columns : 3],
        "flipped": base[:rows, :columns][::-1, ::-1],
        "flipped rows": base[:rows, :columns][::-1],
        "one row repeated": np.broadcast_to(base[0, :columns], (rows, columns)),
        "one column repeated": np.broadcast_to(base[:rows, :1], (rows, columns)),
        "one element": np.broadcast_to(base[0, 0], (rows, columns)),
        "overlapping rows": as_strided(base, (rows, columns), (4, 4)),
        "misaligned": odd["value"],
    }


def test_every_layout(rng: Rng) -> None:
    for (name_a, a), (name_b, b) in itertools.product(
        layouts(rng, 13, 11).items(), layouts(rng, 11, 17).items()
    ):
        got = tilewave.matmul(a, b)
        assert error_in_bounds(got, a, b) <= 1, (name_a, name_b)
        transposed = tilewave.gemm(b.T, a.T, transpose_a=False, transpose_b=False)
        assert error_in_bounds(transposed.T, a, b) <= 1, (name_a, name_b)
        assert error_in_bounds(tilewave.gemm(a.T, b, transpose_a=True), a, b) <= 1
        assert error_in_bounds(tilewave.gemm(a, b.T, transpose_b=True), a, b) <= 1


def test_strided_out_leaves_its_gaps_alone(rng: Rng) -> None:
    """Case H013."""
    a, b = normal(rng, 6, 5), normal(rng, 5, 4)
    for step_rows, step_columns in itertools.product((1, 2, -1, -2), (1, 3, -1, -3)):
        storage = np.full((20, 20), np.nan, F)
        out = storage[::step_rows, ::step_columns][:6, :4]
        tilewave.matmul(a, b, out=out)
        assert np.array_equal(out, a @ b)
        out[...] = np.nan
        assert np.isnan(storage).all()


def test_out_may_overlap_operands(rng: Rng) -> None:
    """Cases H042 and H043."""
    ones = np.ones((2, 99, 99), F)
    tilewave.matmul(ones, ones, out=ones)
    assert np.array_equal(ones, np.full((2, 99, 99), 99, F))
    storage = normal(rng, 40, 30)
    a, b = storage[:20, :20], normal(rng, 20, 30)
    expected = a.copy() @ b
    tilewave.matmul(a, b, out=storage[10:30])
    assert np.array_equal(storage[10:30], expected)
    c = normal(rng, 20, 20)
    shifted = np.concatenate([c, c])
    expected = tilewave.gemm(storage[:20, :20], storage[:20, :20], shifted[1:21].copy(), beta=0.5)
    tilewave.gemm(storage[:20, :20], storage[:20, :20], shifted[1:21], beta=0.5, out=shifted[:20])
    assert np.array_equal(shifted[:20], expected)


def test_out_that_overlaps_itself_is_refused(rng: Rng) -> None:
    out = np.broadcast_to(np.zeros(4, F), (6, 4))
    writable = as_strided(np.zeros(4, F), (6, 4), (0, 4))
    with pytest.raises(UsageError, match="out is read-only"):
        tilewave.matmul(normal(rng, 6, 5), normal(rng, 5, 4), out=out)
    with pytest.raises(UsageError, match="several of its elements share memory"):
        tilewave.matmul(normal(rng, 6, 5), normal(rng, 5, 4), out=writable)


def test_huge_batch_of_tiny_products(rng: Rng) -> None:
    """Case H024: beyond 65535 items."""
    for batch in (65535, 65536, 65537, 131072):
        ones = np.ones((batch, 1, 1), F)
        assert tilewave.matmul(ones, ones).sum(dtype=np.float64) == batch
    a, b = normal(rng, 100_000, 3, 3), normal(rng, 100_000, 3, 1)
    assert error_in_bounds(tilewave.matmul(a, b), a, b) <= 1


def test_subnormals_are_kept() -> None:
    """Case H037."""
    smallest = np.finfo(F).tiny
    assert tilewave.matmul(np.array([[smallest]], F), np.array([[0.5]], F))[0, 0] == F(smallest / 2)
    tiny = np.array([[2.0**-149]], F)
    assert tilewave.matmul(tiny, np.array([[2]], F))[0, 0] == F(2.0**-148)


@pytest.mark.parametrize("positive", [False, True])
def test_error_is_within_the_bound_as_k_grows(rng: Rng, positive: bool) -> None:
    """Case H107."""
    for k in (1, 100, 10_000, 300_000):
        a, b = normal(rng, 3, k), normal(rng, k, 2)
        if positive:
            a, b = np.abs(a), np.abs(b)
        assert error_in_bounds(tilewave.matmul(a, b), a, b) <= 1
