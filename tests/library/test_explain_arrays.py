"""explain tells the bound on the error of the operands that it is given."""

from __future__ import annotations

import numpy as np
import pytest

import tilewave
from tilewave.errors import UsageError
from tilewave.precision.account import account_of_bound

Rng = np.random.Generator
F = np.float32


def test_arrays_are_explained_with_their_bound(rng: Rng) -> None:
    a, b = rng.standard_normal((40, 300), F), rng.standard_normal((300, 50), F)
    (plan,) = tilewave.plan_for(a, b, device="H200")
    said = tilewave.explain(a, b, device="H200")
    assert said.startswith(tilewave.explain(plan))
    assert said.endswith("Precision ieee: every element is within 1.79e-05 of sum |a||b| (gamma_K; K = 300).")
    turned = tilewave.explain(a.T, b.T, transpose_a=True, transpose_b=True, device="H200")
    assert turned.endswith(said.splitlines()[-1])
    packed = tilewave.explain(a, tilewave.prepack(b), device="H200")
    assert packed == said
    vector = tilewave.explain(a[0], b, device="H200")
    assert vector.endswith(said.splitlines()[-1])


def test_the_bound_is_that_of_the_mode_that_runs(rng: Rng) -> None:
    small = rng.standard_normal((40, 300), F), rng.standard_normal((300, 50), F)
    said = tilewave.explain(*small, precision="fp16x3", device="H200")
    assert "Precision ieee: every element is within" in said
    large = rng.standard_normal((1500, 1500), F), rng.standard_normal((1500, 1500), F)
    said = tilewave.explain(*large, precision="fp16x3", device="H200", batch_invariant=True)
    assert "Precision fp16x3: every element is within 9.78e-06 of sum |a||b| ((12 + 2 L) u + gamma_P" in said
    assert said.endswith("All 2,250,000 are in the mode's range.")


def test_elements_out_of_range_are_counted(rng: Rng) -> None:
    a, b = rng.standard_normal((40, 300), F), rng.standard_normal((300, 50), F)
    a[3, 4] = np.nan
    a[7, 5] = 1e9
    said = account_of_bound("fp16x3", a, b)
    assert "but for 100 of 2,000 (0.05 of all) whose row or column spreads over too many" in said
    assert said.endswith("they are computed as ieee, within 1.79e-05.")
    assert "low precision" in account_of_bound("tf32", a, b)
    with pytest.raises(UsageError, match="accepted are ieee, fp16x3, tf32"):
        account_of_bound("auto", a, b)


def test_empty_products_have_no_bound() -> None:
    assert tilewave.explain(np.ones((0, 3), F), np.ones((3, 4), F), device="H200") == ""
    with pytest.raises(UsageError, match="explain takes two arrays"):
        tilewave.explain(np.ones((3, 4), F), 5)
    with pytest.raises(UsageError, match="K is 4 in a and 3 in b"):
        tilewave.explain(np.ones((3, 4), F), np.ones((3, 4), F), device="H200")
