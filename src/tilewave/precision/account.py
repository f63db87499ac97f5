"""The bound of a mode in words, for the operands at hand."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tilewave.precision.fp16x3 import COARSE
from tilewave.precision.mode_bounds import mode_coefficient, recomputed

_FORMULAS = {
    "ieee": "gamma_K",
    "fp16x3": f"(12 + 2 L) u + gamma_P, L = {COARSE.interval}",
    "tf32": "2^-10 + 2^-22 + gamma_K: low precision",
}


def account_of_bound(precision: str, a: NDArray[np.float32], b: NDArray[np.float32]) -> str:
    """What a mode promises for a @ b, with ``a`` (..., M, K) and ``b`` (..., K, N) on the host.

    Raises ``UsageError`` for a mode without a bound, and for K of 2^24 and more.
    """
    k = a.shape[-1]
    said = (
        f"Precision {precision}: every element is within {mode_coefficient(precision, k):.3g} of sum |a||b| "
        f"({_FORMULAS[precision]}; K = {k:,})"
    )
    if precision != "fp16x3":
        return f"{said}."
    outside = recomputed(a, b)
    count = int(np.count_nonzero(outside))
    if count == 0:
        return f"{said}. All {outside.size:,} are in the mode's range."
    return (
        f"{said}, but for {count:,} of {outside.size:,} ({count / outside.size:.2g} of all) whose row or "
        f"column spreads over too many orders of magnitude or holds an infinity or NaN: they are computed as "
        f"ieee, within {mode_coefficient('ieee', k):.3g}."
    )
