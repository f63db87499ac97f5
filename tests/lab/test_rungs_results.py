"""Every rung computes the product, at all kinds of sizes and of values, and touches nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from rung_helpers import changed, draw_both, multiply, program

from tilewave.compiler import compile_source
from tilewave.errors import MemoryFault
from tilewave.lab.registry import Rung, get_rung, load_rungs
from tilewave.precision import error_in_bounds

every_rung = pytest.mark.parametrize("rung", load_rungs(), ids=lambda rung: rung.name)


def shapes(rung: Rung) -> dict[str, tuple[int, int, int]]:
    """M, N, K around the rung's tile: exact, ragged in each direction alone and in all, tiny, prime."""
    bm, bn = rung.tile.bm, rung.tile.bn
    bk = max(rung.tile.bk, 4)
    return {
        "exact": (bm, bn, 2 * bk),
        "M below": (bm - 1, bn, bk),
        "M above": (bm + 1, bn, bk),
        "N below": (bm, bn - 1, bk),
        "N above": (bm, bn + 1, bk),
        "K below": (bm, bn, bk - 1),
        "K above": (bm, bn, bk + 1),
        "K of four": (5, 8, bk + 4),
        "N of four": (9, bn + 4, 2 * bk),
        "all below": (bm - 1, bn - 1, 2 * bk - 1),
        "all above": (bm + 1, bn + 1, 2 * bk + 1),
        "one": (1, 1, 1),
        "row": (1, bn + 3, bk + 2),
        "column": (bm + 3, 1, bk + 2),
        "K of one": (bm + 1, 7, 1),
        "inner product": (1, 1, 3 * bk + 1),
        "primes": (67, 71, 73),
    }


# Each edge alone from the other side, which "all below" covers in one run.
ONLY_IN_ALL = {"M below", "N below", "K below", "inner product"}
KINDS = [
    pytest.param(kind, marks=pytest.mark.long if kind in ONLY_IN_ALL else ())
    for kind in shapes(load_rungs()[0])
]


@every_rung
@pytest.mark.parametrize("kind", KINDS)
def test_result_is_within_the_bound(rung: Rung, kind: str, rng: np.random.Generator) -> None:
    m, n, k = shapes(rung)[kind]
    a, b = draw_both(rng, m, n, k)
    assert error_in_bounds(multiply(rung, a, b), a, b) <= rung.tolerance


@every_rung
def test_small_sizes_at_random(rung: Rung, rng: np.random.Generator) -> None:
    for m, n, k in rng.integers(1, 40, (2, 3)):
        a, b = draw_both(rng, m, n, k)
        assert error_in_bounds(multiply(rung, a, b), a, b) <= rung.tolerance, (m, n, k)


@every_rung
@pytest.mark.parametrize("multiple", [1, 4])
def test_special_values_go_where_they_belong(rung: Rung, multiple: int, rng: np.random.Generator) -> None:
    m, n, k = 21, 6 * multiple, 10 * multiple
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    for matrix in (a, b):
        for value in (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-42):
            matrix[rng.integers(matrix.shape[0]), rng.integers(matrix.shape[1])] = value
    # The bound's check demands NaN and Inf, with its sign, exactly where the reference has them.
    assert error_in_bounds(multiply(rung, a, b), a, b) <= rung.tolerance


@every_rung
def test_subnormals_are_kept(rung: Rung, rng: np.random.Generator) -> None:
    a = (rng.integers(1, 8, (5, 3)) * np.float32(2.0**-149)).astype(np.float32)
    b = np.eye(3, dtype=np.float32)
    np.testing.assert_array_equal(multiply(rung, a, b), a)


@pytest.mark.parametrize("rung", [r for r in load_rungs() if r.schedule is None], ids=lambda rung: rung.name)
def test_result_does_not_depend_on_the_arrangement_of_blocks(rung: Rung, rng: np.random.Generator) -> None:
    """An element's bits are those it has when its row and column are computed alone."""
    m, n, k = rung.tile.bm + 2, rung.tile.bn + 2, rung.tile.bk + 3
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    whole = multiply(rung, a, b)
    for row, col in ((0, 0), (m - 1, n - 1), (m // 2, n // 3)):
        alone = multiply(rung, a[row : row + 1], b[:, col : col + 1].copy())
        assert alone[0, 0] == whole[row, col]


@pytest.mark.parametrize(
    ("number", "old", "new"),
    [
        (1, "row >= M ||", "row > M ||"),
        (3, "row < M && k0 + tx < K", "k0 + tx < K"),
        (5, "k0 + c < K", "k0 + c <= K"),
        (5, "if (row < M)", "if (row <= M)"),
        (5, "if (col < N)", "if (col <= N)"),
        (7, "col + 3 < cols", "col + 2 < cols"),
        (8, "As[c + 1][r] = v.y", "As[c + 1][r] = v.z"),
        (9, "i / 4 * (BM / 2)", "i / 4 * (BM / 4)"),
        (12, "store(buffer ^ 1)", "store(buffer)"),
        (12, "k0 + BK < K;", "k0 + BK < K - 12;"),
        (13, "wait_copies<STAGES - 2>()", "wait_copies<STAGES - 1>()"),
        (14, "wait_copies<STAGES - 2>()", "wait_copies<STAGES - 1>()"),
        (14, "copy((stage + STAGES - 1) % STAGES", "copy((stage + STAGES - 2) % STAGES"),
        (15, "row0 + r < M && k0 + c < K", "row0 + r < M"),
        (17, "i * (WM / TM) + ly", "i * (WM / TM) + ly / 2"),
    ],
)
def test_these_tests_see_a_planted_fault(number: int, old: str, new: str, rng: np.random.Generator) -> None:
    rung = get_rung(number)
    broken = compile_source(changed(rung, (old, new)), rung.entries, program(rung).arch)
    m, n, k = rung.tile.bm + 3, rung.tile.bn + 3, max(2 * rung.tile.bk, 40) + 3
    a, b = draw_both(rng, m, n, k)
    try:
        result = multiply(rung, a, b, broken)
    except (MemoryFault, AssertionError):
        return
    assert error_in_bounds(result, a, b) > rung.tolerance
