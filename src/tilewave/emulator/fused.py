"""The exact float32 FMA as one step of generated code: quick where float64 decides, else careful."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tilewave.emulator.fma import fma

Array = npt.NDArray[Any]

_UNUSED_BITS = np.uint64(35)
_HALFWAY = np.iinfo(np.int64).min
_SMALLEST_NORMAL = np.float32(2.0**-126)


def fused(a: Array, b: Array, c: Array, out: Array, total: Array, work: Array) -> None:
    """out = a * b + c, rounded once; `total` (float64) and `work` (uint64) are scratch space of its length.

    The float64 sum, rounded again to float32, is right unless it lies halfway between two float32 numbers, or
    is subnormal (see `fma`). If any lane may be such a case, or is NaN, all go through `fma`.
    """
    np.multiply(a, b, total, dtype=np.float64)
    np.add(total, c, total)
    # The 29 bits that float32 drops are 100...0 halfway: shifted to the top, the smallest int64.
    np.left_shift(total.view(np.uint64), _UNUSED_BITS, work)
    if work.view(np.int64).min() == _HALFWAY:
        fma(a, b, c, out)
        return
    rounded, size = work.view(np.float32)[: len(total)], work.view(np.float32)[len(total) :]
    np.copyto(rounded, total, casting="same_kind")
    np.absolute(rounded, size)
    if not size.min() > _SMALLEST_NORMAL:
        size[size == 0] = np.inf  # an exact zero is right
        if not size.min() > _SMALLEST_NORMAL:
            fma(a, b, c, out)
            return
    np.copyto(out, rounded)
