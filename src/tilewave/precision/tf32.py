"""The mode ``tf32``, low precision and for comparison only: what a call for FP32 gets where a library cheats.

The arithmetic. Every element is rounded to TF32, 11 significant bits and float32's exponents, to nearest with
ties away from zero (``cvt.rna.tf32.f32``); an element that would round beyond float32 becomes an infinity.
The products are summed by the tensor core alone, in one accumulator, in groups of 8 in ascending k
(`tensor_core`): nothing is promoted. Its bound is `tilewave.precision.tf32_bound`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tilewave.precision.tensor_core import HOPPER_TF32, multiply_accumulate

Float32 = NDArray[np.float32]

_HALF = np.uint32(1 << 12)
_DROPPED = np.uint32((1 << 13) - 1)


def round_to_tf32(x: Float32) -> Float32:
    """The nearest values of 11 significant bits, ties away from zero; NaN and infinities stay."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded: Float32 = ((bits + _HALF) & ~_DROPPED).view(np.float32)  # a carry into the exponent is right
    return np.where(np.isfinite(x), rounded, x)


def multiply(a: Float32, b: Float32) -> Float32:
    """The product of ``a`` (..., M, K) and ``b`` (..., K, N), leading axes broadcasting."""
    return multiply_accumulate(round_to_tf32(a), round_to_tf32(b), core=HOPPER_TF32)
