"""CuPy arrays through BLAS's full form: alpha * A B + beta * C, in place.

    python examples/cupy_drop_in.py

Newton and Schulz's iteration makes the columns of a matrix orthonormal with nothing but products, which is
why GPUs like it: X <- 1.5 X - 0.5 X (X^T X). The second product scales, subtracts and writes in one kernel.
Needs CuPy and a GPU.
"""

from __future__ import annotations

from typing import Any

import tilewave


def orthonormalised(x: Any, steps: int = 12) -> Any:
    """The orthonormal matrix that is nearest to x, whose singular values lie between 0 and 1.7."""
    for _ in range(steps):
        gram = tilewave.gemm(x, x, transpose_a=True)
        x = tilewave.gemm(x, gram, x, alpha=-0.5, beta=1.5)  # c = x: read once more, not overwritten
    return x


def main() -> None:
    """Orthonormalise a random tall matrix and look at its Gram matrix."""
    import cupy

    x = cupy.random.standard_normal((3000, 200), dtype=cupy.float32)
    q = orthonormalised(x / cupy.linalg.norm(x, 2))
    error = float(abs(tilewave.matmul(q.T, q) - cupy.eye(200, dtype=cupy.float32)).max())
    print(f"Q^T Q of 3000 x 200 differs from 1 by {error:.1e}")
    assert error < 1e-4


if __name__ == "__main__":
    main()
