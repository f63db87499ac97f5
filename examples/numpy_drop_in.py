"""A NumPy program with one line changed: every product goes through tilewave.

    python examples/numpy_drop_in.py

`tilewave.matmul` follows the rules of `numpy.matmul`: vectors, batch axes that broadcast, `out=`, views of
any strides. On a machine with a GPU the products run there; without one, through NumPy's own BLAS. The one
difference is deliberate: only float32 is taken, and nothing is cast in silence.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import tilewave

matmul = tilewave.matmul  # was: matmul = np.matmul


def leading_eigenpair(matrix: Any, steps: int = 500) -> tuple[float, Any]:
    """Power iteration: a matrix by a vector, and a vector by a vector."""
    vector = np.full(matrix.shape[0], matrix.shape[0] ** -0.5, np.float32)
    product = np.empty_like(vector)
    for _ in range(steps):
        matmul(matrix, vector, out=product)
        vector = product / np.linalg.norm(product)
    return float(matmul(vector, matmul(matrix, vector))), vector


def covariances(samples: Any) -> Any:
    """One covariance matrix for each group: samples is (groups, n, d), the result (groups, d, d)."""
    centred = samples - samples.mean(axis=1, keepdims=True)
    return matmul(centred.swapaxes(1, 2), centred) / np.float32(samples.shape[1])  # a view, not a copy


def main() -> None:
    """Compare both with what float64 says."""
    rng = np.random.default_rng()
    samples = rng.standard_normal((3, 500, 40), dtype=np.float32) * np.linspace(1, 3, 40, dtype=np.float32)
    found = covariances(samples)
    expected = [np.cov(group.astype(np.float64), rowvar=False, bias=True) for group in samples]
    print(f"covariances of 3 groups, shape {found.shape}: off by {np.abs(found - expected).max():.1e}")

    value, _ = leading_eigenpair(found[0])
    exact = np.linalg.eigvalsh(expected[0])[-1]
    print(f"largest eigenvalue of the first: {value:.4f}, by float64 {exact:.4f}")
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert abs(value - exact) < 1e-2 * exact


if __name__ == "__main__":
    main()
