"""Principal components of tall data, many samples of few features, from one product.

    python examples/principal_components.py

The covariance X^T X / (n - 1) is a product with a huge K and a small result: too few tiles to fill a GPU, so
that the planner cuts K into pieces (split-K). `transpose_a` reads X as it lies.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import tilewave


def principal_components(samples: Any, count: int) -> tuple[Any, Any]:
    """Variances and directions (count, d) of the strongest components, strongest first."""
    centred = samples - samples.mean(axis=0)
    covariance = tilewave.gemm(centred, centred, transpose_a=True, alpha=1 / (len(samples) - 1))
    variances, directions = np.linalg.eigh(covariance.astype(np.float64))
    return variances[: -count - 1 : -1], directions.T[: -count - 1 : -1]


def main() -> None:
    """Data with three strong directions; then how an H200 would compute its covariance."""
    rng = np.random.default_rng()
    samples, features = 100_000, 64
    axes = np.linalg.qr(rng.standard_normal((features, 3)))[0]
    strong = rng.standard_normal((samples, 3)) * [9, 6, 3]
    noise = rng.standard_normal((samples, features))
    data = (strong @ axes.T + noise).astype(np.float32)

    variances, directions = principal_components(data, 3)
    cosines = np.abs((directions * axes.T).sum(axis=1))
    print(f"variances {np.round(variances, 1)}, made with 82, 37 and 10")
    print(f"cosines to the true directions {np.round(cosines, 4)}")
    assert (cosines > 0.99).all()

    print(tilewave.plan(features, features, samples, layouts="TN", device="H200"))


if __name__ == "__main__":
    main()
