"""Standard operands for questions of accuracy: what is easy, what is biased, what is out of scale.

Each is a function of a generator and m, k, n that draws a pair of float32 matrices, m x k and k x n.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tilewave.errors import UsageError

Float32 = NDArray[np.float32]
Generator = np.random.Generator
Operands = tuple[Float32, Float32]
DataSet = Callable[[Generator, int, int, int], Operands]

WIDE_SPREAD = 60
"""Binary orders of magnitude between the exponents of the widest sets."""


def _normal(rng: Generator, m: int, k: int, n: int) -> Operands:
    return rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)


def _uniform(rng: Generator, m: int, k: int, n: int) -> Operands:
    return rng.random((m, k), np.float32), rng.random((k, n), np.float32)


def _relu(rng: Generator, m: int, k: int, n: int) -> Operands:
    a, b = _normal(rng, m, k, n)
    return np.maximum(a, 0), b


def _scaled(a_factor: float, b_factor: float) -> DataSet:
    def draw(rng: Generator, m: int, k: int, n: int) -> Operands:
        a, b = _normal(rng, m, k, n)
        with np.errstate(over="ignore", under="ignore"):
            return a * np.float32(a_factor), b * np.float32(b_factor)

    return draw


def _rows_and_columns(rng: Generator, m: int, k: int, n: int) -> Operands:
    a, b = _normal(rng, m, k, n)
    rows, columns = rng.integers(0, WIDE_SPREAD + 1, (m, 1)), rng.integers(0, WIDE_SPREAD + 1, (1, n))
    return np.ldexp(a, rows), np.ldexp(b, columns)


def _along_k(spread: int) -> DataSet:
    """Columns of A grow as rows of B shrink: all products are of one size, and no row's scale fits."""

    def draw(rng: Generator, m: int, k: int, n: int) -> Operands:
        a, b = _normal(rng, m, k, n)
        exponents = rng.integers(0, spread + 1, k)
        return np.ldexp(a, exponents), np.ldexp(b, -exponents[:, np.newaxis])

    return draw


def _elements(rng: Generator, m: int, k: int, n: int) -> Operands:
    a, b = _normal(rng, m, k, n)
    spread = WIDE_SPREAD + 1
    return np.ldexp(a, rng.integers(0, spread, a.shape)), np.ldexp(b, rng.integers(0, spread, b.shape))


def _tiny_rows(rng: Generator, m: int, k: int, n: int) -> Operands:
    a, b = _normal(rng, m, k, n)
    a[rng.random(m) < 0.5] *= np.float32(2.0**-80)
    b[:, rng.random(n) < 0.5] *= np.float32(2.0**60)
    return a, b


def _outlier(rng: Generator, m: int, k: int, n: int) -> Operands:
    a, b = _normal(rng, m, k, n)
    if a.size:
        a[rng.integers(m), rng.integers(k)] = np.float32(1e6)
    return a, b


def _heavy_tails(sigma: float) -> DataSet:
    def draw(rng: Generator, m: int, k: int, n: int) -> Operands:
        a, b = _normal(rng, m, k, n)
        return np.exp(np.float32(sigma) * a), b

    return draw


def _zero_rows(rng: Generator, m: int, k: int, n: int) -> Operands:
    a, b = _normal(rng, m, k, n)
    a[rng.random(m) < 0.5] = 0
    b[:, rng.random(n) < 0.5] = 0
    return a, b


def _integers(rng: Generator, m: int, k: int, n: int) -> Operands:
    a, b = rng.integers(-1000, 1001, (m, k)), rng.integers(-1000, 1001, (k, n))
    return a.astype(np.float32), b.astype(np.float32)


DATA_SETS: dict[str, DataSet] = {
    "normal": _normal,
    "uniform": _uniform,
    "relu": _relu,
    "integers": _integers,
    "rows-and-columns": _rows_and_columns,
    "tiny-rows": _tiny_rows,
    "zero-rows": _zero_rows,
    "outlier": _outlier,
    "heavy-tails-1": _heavy_tails(1),
    "heavy-tails-3": _heavy_tails(3),
    "along-k-10": _along_k(10),
    "along-k-20": _along_k(20),
    "along-k-30": _along_k(30),
    "along-k-60": _along_k(WIDE_SPREAD),
    "elements": _elements,
    "7e4": _scaled(7e4, 7e4),
    "1e30": _scaled(1e30, 1),
    "1e30-both": _scaled(1e30, 1e30),
    "1e-30": _scaled(1, 1e-30),
    "1e-30-both": _scaled(1e-30, 1e-30),
    "1e-40": _scaled(1e-40, 1),
    "1e-40-by-1e37": _scaled(1e-40, 1e37),
}


def draw(name: str, rng: Generator, m: int, k: int, n: int) -> Operands:
    """Operands of the data set ``name``. Raises ``UsageError`` for another name."""
    if name not in DATA_SETS:
        raise UsageError(f"there is no data set {name!r}; accepted are {', '.join(DATA_SETS)}")
    return DATA_SETS[name](rng, m, k, n)
