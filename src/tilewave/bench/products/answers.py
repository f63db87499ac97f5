"""Is an answer right? What is asked of every contender's result before it is timed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tilewave.bench.suite import SuiteProduct

COMPARED = 2**32
"""Multiply-adds up to which all elements are compared with float64; of larger products as many rows as
come to so many, and all elements by Freivalds' test."""

LOWER_PRECISION = 1e-4
"""Root of squared errors over that of expected squares, on N(0,1) data, from which on a product was not made
in float32. TF32 leaves 2.8e-4 or more whatever K is; float32 leaves 1.9e-5 at K = 10^6, summed in sequence.
"""


class Checkable(Protocol):
    """Results of a product that can be looked at."""

    product: SuiteProduct
    elements: int

    def unwritten(self) -> int:
        """Elements that still hold the poison, over all sets."""
        ...

    def compare_rows(self, place: int, rows: NDArray[np.uint64] | None) -> tuple[float, float]:
        """Largest error in bounds and relative root mean square error of these rows, or of all."""
        ...

    def freivalds(self, place: int, seed: int) -> float:
        """Largest residue of a row in Freivalds' test, 1 being what is allowed."""
        ...


@dataclass(frozen=True)
class Answer:
    """The largest error in units of what float32 may leave, how it was found, and why it is wrong if so."""

    error_in_bounds: float
    checked: str
    wrong: str | None


def check_answer(results: Checkable, place: int, rng: np.random.Generator) -> Answer:
    """Check set ``place`` of poisoned and recomputed results, and that no element of any set was left."""
    product = results.product
    unwritten = results.unwritten()
    if unwritten:
        return Answer(
            math.inf, "poison", f"{unwritten:,} of {results.elements:,} elements were never written"
        )
    total = product.m * product.batch
    row_cost = product.n * product.k
    if total * row_cost <= COMPARED:
        rows, how = None, "all elements against float64"
    else:
        count = min(total, max(1, COMPARED // row_cost))
        rows = np.sort(rng.choice(total, count, replace=False)).astype(np.uint64)
        how = f"{count:,} of {total:,} rows against float64, all by Freivalds' test"
    error, relative = results.compare_rows(place, rows)
    if not error <= 1:
        return Answer(error, how, f"wrong by {error:.3g} times what float32 may leave")
    if not relative <= LOWER_PRECISION:
        return Answer(
            error,
            how,
            f"a relative error of {relative:.2g} is no float32 product's (TF32 or another lower precision?)",
        )
    if rows is not None:
        residue = results.freivalds(place, int(rng.integers(2**63)))
        if not residue <= 1:
            return Answer(
                error, how, f"fails Freivalds' test by {residue:.3g}: some row outside the sample is wrong"
            )
    return Answer(error, how, None)
