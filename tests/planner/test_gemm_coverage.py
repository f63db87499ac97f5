"""Every (instance, way of dealing) that the planner weighs is one that the emulator's tests run.

`tests/lab/test_product_sanitizers.py` runs all pairs of `dealings` at ragged sizes, looking for races.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tilewave.device import get_spec, spec_names
from tilewave.kernels.families import FAMILIES
from tilewave.kernels.ship import every_instance
from tilewave.lab.product_samples import Dealing, dealing_of, dealings
from tilewave.planner.gemm.candidates import bind
from tilewave.planner.gemm.estimate import Traffic, Weigher
from tilewave.planner.gemm.options import OFFERED, PlanOptions
from tilewave.planner.gemm.select import GemmPlanner
from tilewave.problem import GemmProblem, MatrixLayout

Generator = np.random.Generator
Pair = tuple[str, Dealing]

RUN = {(instance.name, dealing) for instance in every_instance() for dealing in dealings(instance)}


def draw_layout(
    rng: Generator, rows: int, columns: int, batch: tuple[int, ...], *, tidy: bool
) -> MatrixLayout:
    """Row by row or column by column; unless ``tidy``, padded, strided, on 8 or 4 bytes."""
    pitch, step = (0, 1) if tidy else (int(rng.choice([0, 1, 4])), int(rng.choice([1, 1, 3])))
    row, column = (columns * step + pitch, step) if rng.integers(2) else (step, rows * step + pitch)
    item = rows * columns * step + pitch * max(rows, columns)
    return MatrixLayout(row, column, tuple(item for _ in batch), 16 if tidy else int(rng.choice([16, 8, 4])))


def draw_problem(rng: Generator) -> GemmProblem:
    """Of any kind that a family is there for: large, small, skinny, deep, shallow, batched, no product."""
    tidy = bool(rng.integers(2))

    def size(most: float) -> int:
        drawn = int(2 ** rng.uniform(0, np.log2(most)))
        return -(-drawn // 4) * 4 if tidy and drawn > 1 else drawn

    kinds = [(4000, 4000, 4000, 1), (300, 300, 3000, 1), (16, 3000, 3000, 1), (3000, 16, 3000, 1)]
    kinds += [(64, 64, 64, 5000), (4, 4, 4, 5000), (8, 32, 8, 5000), (20, 20, 20, 900), (50_000, 60, 30, 1)]
    kinds += [(50_000, 4, 4, 1), (2000, 2000, 16, 1), (64, 64, 50_000, 1), (16, 3000, 16, 1)]
    m, n, k, items = (size(most) for most in kinds[rng.integers(len(kinds))])
    batch = (items,) if items > 1 else ()
    shapes = ((m, k), (k, n), (m, n))
    a, b, out = (draw_layout(rng, *shape, batch, tidy=tidy) for shape in shapes)
    return GemmProblem(m, n, k, batch, a, b, out, product=bool(rng.integers(12)))


def draw_options(rng: Generator) -> PlanOptions:
    """None at all, a cap on SMs, a schedule by name, or bits that do not depend on the batch."""
    match int(rng.integers(5)):
        case 0:
            return PlanOptions(max_sms=int(rng.integers(1, 140)))
        case 1:
            return PlanOptions(schedule=str(rng.choice(OFFERED)))
        case 2:
            return PlanOptions(batch_invariant=True)
    return PlanOptions()


def weighed(planner: GemmPlanner, problem: GemmProblem, options: PlanOptions) -> Iterator[Pair]:
    """The pairs that the planner could choose for a problem."""
    sms = planner.sms(options)
    for candidate in planner.candidates(problem, options):
        if candidate.estimate is None:
            continue
        weigher = Weigher(
            planner.model(candidate.instance), problem, Traffic.of(problem), planner._rates_of(sms)
        )
        depth = problem.k if problem.product else 0
        cut = bind(weigher, depth, candidate.schedule, sms, options)
        yield candidate.instance.name, dealing_of(candidate.schedule, cut)


def pairs(rng: Generator, problems: int) -> set[Pair]:
    planners = [GemmPlanner(get_spec(name), FAMILIES, new_loops=True) for name in spec_names()]
    found: set[Pair] = set()
    for _ in range(problems):
        planner = planners[rng.integers(len(planners))]
        problem, options = draw_problem(rng), draw_options(rng)
        found.update(weighed(planner, problem, options))
    return found


def test_every_pair_that_is_weighed_is_run_in_the_emulator(rng: Generator) -> None:
    found = pairs(rng, 250)
    assert found <= RUN, f"no test runs {sorted(found - RUN)}"
    assert {dealing for _, dealing in found} == set(Dealing)
    names = {name for name, _ in found}
    assert all(any(one.name in names for one in family.instances()) for family in FAMILIES)


@pytest.mark.long
def test_every_instance_is_weighed_for_something(rng: Generator) -> None:
    """None is there for nothing."""
    missing = {instance.name for instance in every_instance()}
    for _ in range(20):
        found = pairs(rng, 2000)
        assert found <= RUN, f"no test runs {sorted(found - RUN)}"
        missing -= {name for name, _ in found}
        if not missing:
            return
    assert not missing
