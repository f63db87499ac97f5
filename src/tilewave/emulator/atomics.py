"""Atomic operations of many lanes: who goes first, and what each operation does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewave.errors import EmulationError

Array = npt.NDArray[Any]


def turns(addresses: Array) -> Iterator[npt.NDArray[np.intp]]:
    """Split lanes into rounds, none of which holds two lanes of one address; earlier lanes go first."""
    if not len(addresses):
        return
    order = np.argsort(addresses, kind="stable")
    ordered = addresses[order]
    first = np.ones(len(ordered), dtype=np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(first)
    rank = np.arange(len(ordered)) - np.repeat(starts, np.diff([*starts, len(ordered)]))
    for turn in range(int(rank.max()) + 1):
        yield order[rank == turn]


def combine(operation: str, old: Array, values: list[Array]) -> Array:
    """The value that an atomic operation leaves in memory."""
    value = values[0].astype(old.dtype, copy=False)
    result: Array
    if operation == "add":
        result = old + value
    elif operation == "exch":
        result = value
    elif operation == "cas":
        result = np.where(old == value, values[1].astype(old.dtype, copy=False), old)
    elif operation == "min":
        result = np.minimum(old, value)
    elif operation == "max":
        result = np.maximum(old, value)
    elif operation == "inc":
        result = np.where(old >= value, old.dtype.type(0), old + old.dtype.type(1))
    elif operation == "dec":
        result = np.where((old == 0) | (old > value), value, old - old.dtype.type(1))
    elif operation in ("and", "or", "xor"):
        function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[operation]
        result = function(old, value)
    else:
        raise EmulationError(f"unknown atomic operation {operation}")
    return result
