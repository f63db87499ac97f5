"""What changed kernels compute: a product where a probe says so, and something else where it does not."""

from __future__ import annotations

import numpy as np
import pytest
from probe_helpers import CHANGED, named
from rung_helpers import draw_both, multiply

from tilewave.lab.probe_records import Probe, Variant
from tilewave.precision import error_in_bounds

PRODUCTS = [pair for pair in CHANGED if pair[1].rung.product]
OTHERS = [pair for pair in CHANGED if not pair[1].rung.product]


@pytest.mark.parametrize("pair", PRODUCTS, ids=named)
@pytest.mark.parametrize(
    "shape", [(150, 70, 75), (135, 264, 44), pytest.param((257, 515, 131), marks=pytest.mark.long)], ids=str
)
def test_products_are_right(
    pair: tuple[Probe, Variant], shape: tuple[int, int, int], rng: np.random.Generator
) -> None:
    """Ragged in everything, and ragged where wide loads still fit; both kernels of a rung run."""
    m, n, k = shape
    a, b = draw_both(rng, m, n, k)
    c = multiply(pair[1].rung, a, b)
    assert error_in_bounds(c, a, b) <= pair[1].rung.tolerance


def test_what_is_no_product_is_marked() -> None:
    assert [variant.key for _, variant in OTHERS] == ["no-loads", "stores-only", "same-slice"]


@pytest.mark.parametrize("pair", OTHERS, ids=named)
@pytest.mark.parametrize("shape", [(130, 132, 80), (37, 61, 48)], ids=str)
def test_what_is_no_product_multiplies_the_first_slice_again_and_again(
    pair: tuple[Probe, Variant], shape: tuple[int, int, int], rng: np.random.Generator
) -> None:
    """Work on real numbers, and as much of it; only the data is that of the first slice."""
    rung, (m, n, k) = pair[1].rung, shape
    depth = rung.tile.bk
    assert k % depth == 0
    a, b = draw_both(rng, m, n, k)
    c = multiply(rung, a, b)
    assert not error_in_bounds(c, a, b) <= rung.tolerance
    again = k // depth
    repeated = np.tile(a[:, :depth], again), np.tile(b[:depth], (again, 1))
    assert error_in_bounds(c, *repeated) <= rung.tolerance
