"""Plans of the product's own kernels, run in the emulator: right, and the bits that options promise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gemm_fakes import product
from numpy.random import Generator
from numpy.typing import NDArray

from tilewave.device import get_spec
from tilewave.planner.gemm import GemmPlan, PlanOptions, plan_gemm
from tilewave.precision import error_in_bounds
from tilewave.problem import GemmProblem
from tilewave.runtime.emulated import emulate_plan

FOUR_SMS = replace(get_spec("H200"), sms=4)
Floats = NDArray[np.float32]


def run(plan: GemmPlan, a: Floats, b: Floats) -> Floats:
    """The product of rows laid out contiguously, the output poisoned."""
    problem = plan.problem
    out = np.full((*problem.batch, problem.m, problem.n), np.nan, np.float32)
    emulate_plan(plan, {"a": a, "b": b, "out": out}, resident=2, order=1)
    assert not np.isnan(out).any()
    return out


def draw(rng: Generator, problem: GemmProblem) -> tuple[Floats, Floats]:
    sign = np.abs if rng.random() < 0.5 else np.asarray
    return tuple(  # type: ignore[return-value]
        sign(rng.standard_normal((*problem.batch, *shape))).astype(np.float32)
        for shape in ((problem.m, problem.k), (problem.k, problem.n))
    )


@pytest.mark.parametrize(
    "sizes",
    [(130, 66, 20, ()), (129, 130, 9, ()), (3, 3, 3, (300,)), (30, 9, 21, (2, 5))],
    ids=str,
)
def test_a_cap_on_sms_keeps_the_bits(sizes: tuple[int, int, int, tuple[int, ...]], rng: Generator) -> None:
    """Blocks that walk over whole tiles sum as a block a tile does."""
    problem = product(*sizes)
    a, b = draw(rng, problem)
    free = plan_gemm(problem, FOUR_SMS, PlanOptions(batch_invariant=True))
    capped = plan_gemm(problem, FOUR_SMS, PlanOptions(batch_invariant=True, max_sms=2))
    assert free.blocks > 2 >= capped.blocks
    assert np.array_equal(run(free, a, b), run(capped, a, b))


@pytest.mark.parametrize("schedule", ["data_parallel", "split_k:3", "stream_k:2", "stream_k_walk"])
@pytest.mark.parametrize("max_sms", [None, 3])
def test_schedules_asked_for_compute_the_product(schedule: str, max_sms: int | None, rng: Generator) -> None:
    problem = product(130, 140, 100) if max_sms is None else product(64, 60, 100)
    options = PlanOptions(schedule=schedule, max_sms=max_sms)
    a, b = draw(rng, problem)
    plan = plan_gemm(problem, FOUR_SMS, options)
    assert plan.schedule.kind == schedule.partition(":")[0]
    assert error_in_bounds(run(plan, a, b), a, b) <= 1


@pytest.mark.parametrize("schedule", ["split_k", "split_k:3", "split_k:5", "stream_k", "stream_k:3"])
@pytest.mark.parametrize("max_sms", [1, 3])
@pytest.mark.sampled(4)
def test_pieces_asked_for_are_walked_where_blocks_are_fewer(
    schedule: str, max_sms: int, rng: Generator
) -> None:
    """More pieces than there may be blocks: each block has an even run of them."""
    problem = product(*(int(size) for size in rng.integers(130, 160, 2)), int(rng.integers(90, 150)))
    a, b = draw(rng, problem)
    free = plan_gemm(problem, FOUR_SMS, PlanOptions(schedule=schedule))
    plan = plan_gemm(problem, FOUR_SMS, PlanOptions(schedule=schedule, max_sms=max_sms))
    assert free.blocks > max_sms >= plan.blocks
    assert plan.schedule.kind == schedule.partition(":")[0]
    assert error_in_bounds(run(plan, a, b), a, b) <= 1


def test_a_row_has_the_same_bits_whatever_m_and_the_batch(rng: Generator) -> None:
    """As batch_invariant promises, m = 1 and tiny and large kernels included."""
    options = PlanOptions(batch_invariant=True)
    k, n = 30, 31
    whole = product(140, n, k)
    a, b = draw(rng, whole)
    expected = run(plan_gemm(whole, FOUR_SMS, options), a, b)
    names = set()
    for m, batch in ((1, ()), (2, ()), (33, ()), (70, (2,)), (7, (20,)), (1, (140,))):
        items = int(np.prod(batch))
        some = product(m, n, k, batch)
        rows = a[: m * items].reshape(*batch, m, k)
        plan = plan_gemm(some, FOUR_SMS, options)
        names.add(plan.instance.family)
        out = run(plan, rows, np.ascontiguousarray(np.broadcast_to(b, (*batch, k, n))))
        assert np.array_equal(out.reshape(-1, n), expected[: m * items])
    assert len(names) > 1
