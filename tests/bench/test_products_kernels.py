"""The kernels that check answers on a GPU, in the emulator and beside NumPy; and what they decide."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from tilewave.bench.products.answers import COMPARED, check_answer
from tilewave.bench.products.gpu import ENTRIES, SOURCE
from tilewave.bench.suite import SuiteProduct
from tilewave.compiler import Program, Source, compile_source
from tilewave.emulator import Memory, launch
from tilewave.precision import error_in_bounds
from tilewave.precision.bounds import SMALLEST_SUBNORMAL, gamma
from tilewave.runtime.driver import NAN_PATTERN


@cache
def program() -> Program:
    return compile_source(Source.packaged(SOURCE), ENTRIES, "sm_80")


def run(name: str, arguments: list[object], memory: Memory) -> None:
    symbol = program().kernels[name].symbol
    launch(program().ptx, symbol, (3, 1, 1), (64, 1, 1), arguments, memory, count=False)


@pytest.mark.parametrize("count", [1, 2, 777, 4000])
def test_random_data_is_normal_and_fills_all(count: int, rng: np.random.Generator) -> None:
    memory = Memory()
    out = memory.empty((count,), np.float32)
    run("fill_normal", [out, count, int(rng.integers(2**63))], memory)
    found = memory.get(out)
    assert np.isfinite(found).all()
    if count == 4000:
        assert abs(found.mean()) < 6 / math.sqrt(count)
        assert found.std() == pytest.approx(1, abs=6 / math.sqrt(2 * count))
        assert len(np.unique(found)) > 0.99 * count
        assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 6 / math.sqrt(count)


def test_poison_is_counted(rng: np.random.Generator) -> None:
    data = rng.standard_normal(1000, dtype=np.float32)
    places = rng.choice(1000, int(rng.integers(1, 999)), replace=False)
    data.view(np.uint32)[places] = NAN_PATTERN
    data[places[0]] = np.nan  # another NaN is a result, if a wrong one
    memory = Memory()
    found = memory.put(np.zeros(1, np.uint64))
    run("count_poison", [memory.put(data), 1000, NAN_PATTERN, found], memory)
    assert memory.get(found)[0] == len(places) - 1


class EmulatedResults:
    """Results in emulated memory: what `tilewave.bench.products.gpu.Operands` does, on the same kernels."""

    def __init__(self, product: SuiteProduct, a: NDArray, b: NDArray, c: NDArray) -> None:
        self.product, self.elements = product, c.size
        self._a, self._b, self._c = a, b, c

    def unwritten(self) -> int:
        return int((self._c.view(np.uint32) == NAN_PATTERN).sum())

    def compare_rows(self, place: int, rows: NDArray[np.uint64] | None) -> tuple[float, float]:
        product, memory = self.product, Memory()
        m, n, k = product.m, product.n, product.k
        totals = memory.put(np.zeros(3))
        listed = 0 if rows is None else memory.put(rows)
        count = m * product.batch if rows is None else len(rows)
        a_strides = (1, m) if product.transposed_a else (k, 1)
        b_strides = (1, k) if product.transposed_b else (n, 1)
        run(
            "compare_rows",
            [memory.put(self._a), memory.put(self._b), memory.put(self._c), listed, count, m, n, k,
             *a_strides, 0 if product.shared_a else m * k, *b_strides, 0 if product.shared_b else k * n,
             gamma(k), k * SMALLEST_SUBNORMAL / 2, totals],
            memory,
        )  # fmt: skip
        worst, errors, references = memory.get(totals)
        return float(worst), math.sqrt(errors / references)

    def freivalds(self, place: int, seed: int) -> float:
        return math.inf


CASES = [
    SuiteProduct("plain", "t", 9, 13, 70),
    SuiteProduct("tt", "t", 7, 10, 33, True, True),
    SuiteProduct("batch", "t", 5, 4, 31, False, True, 6),
    SuiteProduct("shared-a", "t", 3, 5, 4, True, False, 8, shared_a=True),
    SuiteProduct("shared-b", "t", 6, 5, 40, False, True, 3, shared_b=True),
]


def drawn(product: SuiteProduct, rng: np.random.Generator) -> tuple[NDArray, NDArray, NDArray, NDArray]:
    """A and B as stored, and as (items, m, k) and (items, k, n)."""
    m, n, k = product.m, product.n, product.k
    a = rng.standard_normal((1 if product.shared_a else product.batch, m, k), dtype=np.float32)
    b = rng.standard_normal((1 if product.shared_b else product.batch, k, n), dtype=np.float32)
    stored = [
        np.ascontiguousarray(x.swapaxes(1, 2)) if transposed else x
        for x, transposed in ((a, product.transposed_a), (b, product.transposed_b))
    ]
    return stored[0], stored[1], a, b


@pytest.mark.parametrize("product", CASES, ids=lambda one: one.name)
def test_rows_are_compared_as_numpy_compares_them(product: SuiteProduct, rng: np.random.Generator) -> None:
    a_stored, b_stored, a, b = drawn(product, rng)
    c = np.matmul(a, b)
    found = check_answer(EmulatedResults(product, a_stored, b_stored, c), 0, rng)
    assert found.wrong is None
    assert found.checked == "all elements against float64"
    assert found.error_in_bounds == pytest.approx(error_in_bounds(c, a, b), rel=1e-6)
    place = tuple(int(rng.integers(extent)) for extent in c.shape)
    for damage in (c[place] + 1, np.float32(np.nan), np.float32(np.inf)):
        damaged = c.copy()
        damaged[place] = damage
        wrong = check_answer(EmulatedResults(product, a_stored, b_stored, damaged), 0, rng).wrong
        assert wrong is not None
        assert wrong.startswith("wrong by")
        row = np.array([place[0] * product.m + place[1]], np.uint64)
        assert EmulatedResults(product, a_stored, b_stored, damaged).compare_rows(0, row)[0] > 1
        if product.m > 1:
            other = np.array([place[0] * product.m + (place[1] + 1) % product.m], np.uint64)
            assert EmulatedResults(product, a_stored, b_stored, damaged).compare_rows(0, other)[0] <= 1


@pytest.mark.parametrize("k", [16, 1024, 20_000])
def test_tf32_is_found_out_whatever_k_is(k: int, rng: np.random.Generator) -> None:
    product = SuiteProduct("p", "t", 4, 8, k)
    a_stored, b_stored, a, b = drawn(product, rng)
    rounded = [((x.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32) for x in (a, b)]
    c = np.matmul(*(x.astype(float) for x in rounded)).astype(np.float32)
    wrong = check_answer(EmulatedResults(product, a_stored, b_stored, c), 0, rng).wrong
    assert wrong is not None
    assert "no float32 product's (TF32" in wrong or "wrong by" in wrong
    right = np.matmul(a, b)
    assert check_answer(EmulatedResults(product, a_stored, b_stored, right), 0, rng).wrong is None


def test_a_sum_that_nearly_vanishes_is_no_lower_precision(rng: np.random.Generator) -> None:
    _, _, a, b = drawn(SuiteProduct("p", "t", 1, 1, 5000), rng)
    b[0, 0, 0] = -float(a[0, 0, 1:].astype(float) @ b[0, 1:, 0].astype(float)) / float(a[0, 0, 0])
    c = np.cumsum(a[0, 0] * b[0, :, 0], dtype=np.float32)[-1:].reshape(1, 1, 1)  # one after the other
    assert check_answer(EmulatedResults(SuiteProduct("p", "t", 1, 1, 5000), a, b, c), 0, rng).wrong is None


def test_an_element_never_written_is_found(rng: np.random.Generator) -> None:
    product = CASES[0]
    a_stored, b_stored, a, b = drawn(product, rng)
    c = np.matmul(a, b)
    c[0, 3, 2:5].view(np.uint32)[...] = NAN_PATTERN
    found = check_answer(EmulatedResults(product, a_stored, b_stored, c), 0, rng)
    assert found.wrong == f"3 of {c.size} elements were never written"


def freivalds(product: SuiteProduct, a: NDArray, b: NDArray, c: NDArray, seed: int) -> float:
    """Freivalds' test as `Operands.freivalds` strings the kernels together."""
    memory = Memory()
    m, n, k, items = product.m, product.n, product.k, product.batch
    b_items = 1 if product.shared_b else items

    def times(x: NDArray, rows: int, columns: int, transposed: bool, shared: bool, count: int, v, stride):
        y = memory.empty((rows * count,), np.float64)
        squares = memory.empty((rows * count,), np.float64)
        strides = (1, rows) if transposed else (columns, 1)
        step = 0 if shared else rows * columns
        arguments = [memory.put(x), rows, columns, *strides, step, count, v, stride, seed, y, squares]
        run("times_vector", arguments, memory)
        return y, squares

    cr, _ = times(c, m, n, False, False, items, 0, 0)
    br, b_rows = times(b, k, n, product.transposed_b, product.shared_b, b_items, 0, 0)
    stride = 0 if product.shared_b else k
    abr, a_squares = times(a, m, k, product.transposed_a, product.shared_a, items, br, stride)
    sums = memory.empty((b_items,), np.float64)
    run("sum_items", [b_rows, k, b_items, sums], memory)
    worst = memory.put(np.zeros(1))
    factor = 8 * (1 + 6 * math.sqrt(k)) * 2.0**-24
    run("worst_row", [cr, abr, a_squares, m, items, sums, b_items, factor, worst], memory)
    return float(memory.get(worst)[0])


@pytest.mark.parametrize("product", CASES, ids=lambda one: one.name)
def test_freivalds_passes_right_products_and_finds_one_wrong_element(
    product: SuiteProduct, rng: np.random.Generator
) -> None:
    a_stored, b_stored, a, b = drawn(product, rng)
    c = np.matmul(a, b)
    seed = int(rng.integers(2**40))
    assert freivalds(product, a_stored, b_stored, c, seed) <= 1
    place = tuple(int(rng.integers(extent)) for extent in c.shape)
    for damage in (c[place] + np.float32(0.1), np.float32(np.nan)):
        damaged = c.copy()
        damaged[place] = damage
        assert not freivalds(product, a_stored, b_stored, damaged, seed) <= 1


class Pretended:
    """A product too large to compare whole; remembers which rows were asked for."""

    def __init__(self, product: SuiteProduct, residue: float) -> None:
        self.product, self.elements, self._residue = product, 1, residue
        self.rows: list[NDArray[np.uint64] | None] = []

    def unwritten(self) -> int:
        return 0

    def compare_rows(self, place: int, rows: NDArray[np.uint64] | None) -> tuple[float, float]:
        self.rows.append(rows)
        return 0.5, 1e-7

    def freivalds(self, place: int, seed: int) -> float:
        return self._residue


def test_large_products_are_sampled_and_put_to_freivalds_test(rng: np.random.Generator) -> None:
    product = SuiteProduct("large", "t", 4096, 8192, 4096, batch=3)
    good, bad = Pretended(product, 0.3), Pretended(product, 2.0)
    answer = check_answer(good, 0, rng)
    assert answer.wrong is None
    assert "of 12,288 rows against float64, all by Freivalds' test" in answer.checked
    (rows,) = good.rows
    assert rows is not None
    assert len(set(rows.tolist())) == len(rows) == COMPARED // (8192 * 4096)
    assert rows.max() < 12_288
    wrong = check_answer(bad, 0, rng).wrong
    assert wrong is not None
    assert wrong.startswith("fails Freivalds' test by 2")
