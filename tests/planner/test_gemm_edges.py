"""Plans that leave a few last rows and columns to launches of their own: all of C, once, and right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gemm_fakes import product
from numpy.random import Generator
from numpy.typing import NDArray

from tilewave.device import get_spec
from tilewave.kernels.arguments import Pointers
from tilewave.kernels.families import FAMILIES
from tilewave.planner.gemm import GemmPlan, GemmPlanner, PlanOptions
from tilewave.planner.gemm.edges import MOST, UNIT, peeled, pointers_of
from tilewave.planner.gemm.explain import explain_plan
from tilewave.precision import error_in_bounds
from tilewave.problem import Activation, GemmProblem, MatrixLayout
from tilewave.runtime.emulated import emulate_plan

Floats = NDArray[np.float32]
H200 = GemmPlanner(get_spec("H200"), FAMILIES)
FOUR_SMS = GemmPlanner(replace(get_spec("H200"), sms=4), FAMILIES)


def rectangles(plan: GemmPlan) -> list[tuple[int, int, int, int]]:
    """First row and column, rows and columns of what each launch computes."""
    parts = [(0, 0, plan.problem.m, plan.problem.n)]
    for edge in plan.edges:
        m, n = edge.plan.problem.m, edge.plan.problem.n
        parts.append((edge.row, edge.column, *((n, m) if edge.swapped else (m, n))))
    return parts


def layout_of(array: Floats) -> MatrixLayout:
    row, column = (stride // 4 for stride in array.strides[-2:])
    return MatrixLayout(row, column, tuple(stride // 4 for stride in array.strides[:-2]), 4)


def draw(rng: Generator, *shape: int) -> Floats:
    """Random numbers, sometimes all positive, stored by rows or by columns, sometimes with gaps of NaN."""
    transposed = bool(rng.integers(2))
    stored = (*shape[:-2], *(shape[:-3:-1] if transposed else shape[-2:]))
    memory = np.full((*stored[:-1], stored[-1] + int(rng.integers(3))), np.nan, np.float32)
    view = memory[..., : stored[-1]]
    view[...] = rng.standard_normal(stored)
    if rng.integers(2):
        np.abs(view, out=view)
    return view.swapaxes(-1, -2) if transposed else view


def drawn(rng: Generator) -> tuple[GemmProblem, dict[str, Floats]]:
    """A product a few rows or columns beyond whole tiles, with any layouts and epilogue, and its operands."""
    rests = [(int(rng.integers(1, MOST + 1)), 0), (0, 1), (1, int(rng.integers(1, MOST + 1)))]
    rows, columns = rests[rng.integers(3)]
    m, n, k = UNIT + rows, UNIT + columns, int(rng.integers(1, 40))
    batch = (2,) if rng.integers(3) == 0 else ()
    operands = {"a": draw(rng, *batch, m, k), "b": draw(rng, *batch, k, n)}
    for name in ("c", "preactivation"):
        if rng.integers(2):
            operands[name] = draw(rng, *batch, m, n)
    # The front door hands out on in rows (`normalise`).
    operands["out"] = np.full((*batch, m, n + int(rng.integers(3))), np.nan, np.float32)[..., :n]
    layouts: dict[str, Any] = {name: layout_of(array) for name, array in operands.items()}
    if rng.integers(2):
        vector = draw(rng, 1, n) if rng.integers(2) else draw(rng, m, 1)
        operands["bias"] = np.broadcast_to(vector, (*batch, m, n))
        layouts["bias"] = layout_of(operands["bias"])
    activation = [Activation.NONE, Activation.RELU][rng.integers(2)]
    return GemmProblem(m, n, k, batch, activation=activation, **layouts), operands


def expected_parts(
    operands: dict[str, Floats], alpha: float, beta: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The value before the activation in float64, and the sum of the terms' sizes."""
    a, b = operands["a"].astype(np.float64), operands["b"].astype(np.float64)
    value, size = alpha * (a @ b), abs(alpha) * (np.abs(a) @ np.abs(b))
    if "c" in operands:
        value, size = value + beta * operands["c"], size + np.abs(beta * operands["c"])
    if "bias" in operands:
        value, size = value + operands["bias"], size + np.abs(operands["bias"])
    return value, size


@pytest.mark.parametrize("turn", range(3))
def test_strips_and_tiles_compute_the_product(turn: int, rng: Generator) -> None:
    problem, operands = drawn(rng)
    rows, columns = problem.m % UNIT, problem.n % UNIT
    plan = peeled(problem, rows, columns, PlanOptions(), FOUR_SMS.plan_in_one)
    assert plan is not None
    assert len(plan.edges) == (rows > 0) + (columns > 0)
    alpha, beta = 1.5, -0.5 if "c" in operands else 0.0
    value, size = expected_parts(operands, alpha, beta)
    bits = []
    for order in (1, 2):
        for name in ("out", "preactivation"):
            if name in operands:
                operands[name][...] = np.nan
        emulate_plan(plan, operands, alpha=alpha, beta=beta, resident=3, order=order)
        bits.append(operands["out"].copy())
    assert np.array_equal(bits[0].view(np.uint32), bits[1].view(np.uint32))
    # Sums of K products in any order, and the epilogue's few roundings: relative to the terms' sizes.
    bound = (problem.k + 8) * 2.0**-24 * size * 1.01 + 1e-40
    assert (np.abs(operands.get("preactivation", value) - value) <= bound).all()
    wanted = np.maximum(value, 0) if problem.activation is Activation.RELU else value
    assert (np.abs(operands["out"] - wanted) <= bound).all()


def test_a_plain_product_is_within_the_bound_of_its_length(rng: Generator) -> None:
    problem = product(UNIT + 1, UNIT + 2, 70)
    a, b = (rng.random(shape, np.float32) for shape in ((problem.m, 70), (70, problem.n)))
    out = np.full((problem.m, problem.n), np.nan, np.float32)
    plan = peeled(problem, 1, 2, PlanOptions(), FOUR_SMS.plan_in_one)
    assert plan is not None
    emulate_plan(plan, {"a": a, "b": b, "out": out})
    assert error_in_bounds(out, a, b) <= 1


@pytest.mark.parametrize("extent", range(2040, 2073))
def test_every_element_is_computed_by_one_launch(extent: int) -> None:
    for m, n in ((extent, extent), (extent, 1024), (2048, extent)):
        plan = H200.plan(product(m, n, 512))
        whole = H200.plan_in_one(product(m, n, 512))
        assert plan.estimate.total <= whole.estimate.total
        assert (plan.covers.m, plan.covers.n) == (m, n)
        count = np.zeros((m, n), np.uint8)
        for row, column, rows, columns in rectangles(plan):
            assert row + rows <= m
            assert column + columns <= n
            count[row : row + rows, column : column + columns] += 1
        assert (count == 1).all()


def test_one_row_and_column_beyond_the_tiles_cost_less_than_a_row_of_tiles() -> None:
    for size in (2049, 2056, 4097):
        plan = H200.plan(product(size, size, size))
        whole = H200.plan_in_one(product(size, size, size))
        assert plan.edges
        assert plan.estimate.total < 0.98 * whole.estimate.total
        assert f"{whole.estimate.total:.4g} us" in str(plan)
        assert plan.workspace_bytes >= max(edge.plan.workspace_bytes for edge in plan.edges)


def test_small_products_are_not_cut() -> None:
    for size in (65, 129, 257, 1025):
        assert not H200.plan(product(size, size, size)).edges


@pytest.mark.parametrize(
    "options",
    [PlanOptions(batch_invariant=True), PlanOptions(max_sms=64), PlanOptions(schedule="data_parallel")],
    ids=str,
)
def test_what_is_asked_for_is_one_launch(options: PlanOptions) -> None:
    assert not H200.plan(product(2049, 2049, 2049), options).edges


def test_addresses_of_strips() -> None:
    problem = replace(product(66, 65, 8, transpose_a=True), bias=MatrixLayout(0, 1), c=MatrixLayout(70, 1))
    plan = peeled(problem, 2, 1, PlanOptions(), FOUR_SMS.plan_in_one)
    assert plan is not None
    below, beside = plan.edges
    given = Pointers(1 << 20, 2 << 20, 3 << 20, c=4 << 20, bias=5 << 20)
    at = pointers_of(replace(below, swapped=False), problem, given)
    assert (at.a - given.a, at.b - given.b, at.out - given.out) == (4 * 64, 0, 4 * 64 * 65)
    assert (at.c - given.c, at.bias - given.bias, at.preactivation) == (4 * 64 * 70, 0, 0)
    at = pointers_of(replace(beside, swapped=False), problem, given)
    assert (at.a - given.a, at.b - given.b, at.out - given.out) == (0, 4 * 64, 4 * 64)
    assert (at.c - given.c, at.bias - given.bias, at.preactivation) == (4 * 64, 4 * 64, 0)
    exchanged = pointers_of(replace(beside, swapped=True), problem, given)
    assert (exchanged.a, exchanged.b) == (at.b, at.a)


def test_strips_know_how_their_addresses_are_aligned() -> None:
    """What a part claims of its addresses must hold wherever the whole's do."""
    for rest in range(1, MOST + 1):
        problem = product(UNIT + rest, UNIT + rest, 24, lda=25)
        plan = peeled(problem, rest, rest, PlanOptions(), FOUR_SMS.plan_in_one)
        assert plan is not None
        for edge in plan.edges:
            at = pointers_of(edge, problem, Pointers(1 << 20, 1 << 20, 1 << 20))
            for name in ("a", "b", "out"):
                assert getattr(at, name) % getattr(edge.plan.problem, name).alignment == 0


def test_candidates_are_told_to_be_those_of_the_tiles_alone() -> None:
    """The choice's time among them is that of the tiles without the strips, which no candidate has."""
    plan = H200.plan(product(2049, 2049, 2049))
    rows, columns = plan.problem.m, plan.problem.n
    assert plan.edges
    assert (rows, columns) != (2049, 2049)
    alone = H200.plan_in_one(plan.problem).estimate.total
    text = explain_plan(plan)
    assert f" cover {rows:,} x {columns:,} of the output" in text
    assert f"for {plan.problem} alone, for which the choice is predicted to take {alone:.4g} us" in text
