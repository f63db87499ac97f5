"""Hundreds of thousands of tiny products in one call: rotate every point of a cloud by its own matrix.

    python examples/tiny_products.py

Batch axes broadcast as in NumPy, so that one matrix for all items (stride 0) or one for each is the same
call, and nothing is repeated in memory. A loop would launch a kernel an item.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import tilewave


def rotations(angles: Any) -> Any:
    """One matrix (3, 3) about the z axis for each angle."""
    cosine, sine, zero = np.cos(angles), np.sin(angles), np.zeros_like(angles)
    rows = [[cosine, -sine, zero], [sine, cosine, zero], [zero, zero, zero + 1]]
    return np.ascontiguousarray(np.moveaxis(np.array(rows, np.float32), 2, 0))


def rotated(matrices: Any, points: Any) -> Any:
    """Each point by its matrix: (..., 3, 3) and (..., 3) give (..., 3); batch axes broadcast."""
    return tilewave.matmul(matrices, points[..., np.newaxis])[..., 0]


def main() -> None:
    """A turn and its inverse give every point back; lengths stay."""
    rng = np.random.default_rng()
    points = rng.standard_normal((200_000, 3), dtype=np.float32)
    turns = rotations(rng.uniform(0, 2 * np.pi, len(points)))

    there = rotated(turns, points)
    back = rotated(turns.swapaxes(1, 2), there)
    quarter = rotated(rotations(np.array([np.pi / 2])), points)  # one matrix for all of them
    print(f"{len(points):,} turns and back: off by {np.abs(back - points).max():.1e}")
    assert np.allclose(back, points, atol=1e-5)
    assert np.allclose(quarter, points[:, [1, 0, 2]] * [-1, 1, 1], atol=1e-5)

    print(tilewave.plan(3, 1, 3, batch=len(points), device="H200"))


if __name__ == "__main__":
    main()
