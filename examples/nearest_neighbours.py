"""k nearest neighbours from one matrix product: |x - y|^2 = |x|^2 - 2 x.y + |y|^2.

    python examples/nearest_neighbours.py

For the ranking |x|^2 does not matter, so that `alpha=-2` and the points' squared lengths as a `bias` give all
that is needed in one kernel. A block of queries at a time keeps the matrix of distances small.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import tilewave


def nearest(queries: Any, points: Any, count: int, block: int = 1024) -> Any:
    """Indices of the `count` points nearest to each query, nearest first: (queries, count)."""
    squares = np.einsum("nd,nd->n", points, points)
    found = np.empty((len(queries), count), np.int64)
    for begin in range(0, len(queries), block):
        rows = queries[begin : begin + block]
        distances = tilewave.gemm(rows, points, alpha=-2, transpose_b=True, bias=squares)
        some = np.argpartition(distances, count, axis=1)[:, :count]
        order = np.take_along_axis(distances, some, axis=1).argsort(axis=1)
        found[begin : begin + block] = np.take_along_axis(some, order, axis=1)
    return found


def main() -> None:
    """Noisy copies of points find their originals."""
    rng = np.random.default_rng()
    points = rng.standard_normal((20_000, 64), dtype=np.float32)
    chosen = rng.integers(len(points), size=2000)
    queries = points[chosen] + 0.1 * rng.standard_normal((len(chosen), 64), dtype=np.float32)
    found = nearest(queries, points, 5)
    hits = int((found[:, 0] == chosen).sum())
    print(f"{hits} of {len(chosen)} noisy copies have their original as nearest of {len(points):,} points")
    assert hits == len(chosen)


if __name__ == "__main__":
    main()
