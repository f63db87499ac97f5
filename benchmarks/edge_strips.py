"""What strips as wide as tiles would gain: predictions of the planner's model of one GPU. Needs no GPU.

    python benchmarks/edge_strips.py [--device H200]

Wide tiles of 128 x 192 cover 4096 columns with 22 columns of tiles, 128 of 4224 for nothing. Here the last
rows or columns may be left to a launch of their own behind the tiles, as `planner/gemm/edges.py` does with up
to 8 of them: what is beyond a multiple of 64 (64 where nothing is), or 64 or 128 more, in every combination.
Each part is planned as a product of its own, with its launch and tail. Prints, for every layout, by how much
the best of these is predicted to be faster than one launch, and what it is made of; docs/tried-in-vain.md
holds the table.
"""

from __future__ import annotations

import argparse
from itertools import product

import tilewave
from tilewave.device import get_spec
from tilewave.kernels.families import FAMILIES
from tilewave.planner.gemm import GemmPlan, GemmPlanner, PlanOptions
from tilewave.planner.gemm.edges import UNIT, peeled
from tilewave.problem import GemmProblem

LAYOUTS = ("NN", "NT", "TN", "TT")
SHAPES = (
    *((size, size, size) for size in (2048, 3000, 3072, 4096, 5120, 6144, 8192, 16384)),
    (2048, 14336, 4096),
    (8192, 3072, 768),
    (7000, 1760, 1760),
)
_WIDEST = 3  # strips, in units


def strips(extent: int) -> tuple[int, ...]:
    """Rows or columns that may be left to a strip."""
    rest = extent % UNIT or UNIT
    return tuple(rest + UNIT * more for more in range(_WIDEST))


def best_with_strips(planner: GemmPlanner, problem: GemmProblem) -> GemmPlan:
    """The fastest plan that has a strip or two, whether or not it is faster than one launch."""
    options = PlanOptions()
    choices = product((0, *strips(problem.m)), (0, *strips(problem.n)))
    made = (
        peeled(problem, rows, columns, options, planner.plan_in_one)
        for rows, columns in choices
        if rows or columns
    )
    return min((plan for plan in made if plan is not None), key=lambda plan: plan.estimate.total)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="H200")
    device = parser.parse_args().device
    planner = GemmPlanner(get_spec(device), FAMILIES, new_loops=True)
    print(f"| product | {' | '.join(LAYOUTS)} |\n|---|{'---:|' * len(LAYOUTS)}")
    details = []
    for m, n, k in SHAPES:
        cells = []
        for layouts in LAYOUTS:
            problem = tilewave.plan(m, n, k, layouts=layouts, device=device).covers
            one, with_strips = planner.plan_in_one(problem), best_with_strips(planner, problem)
            gain = one.estimate.total / with_strips.estimate.total - 1
            cells.append(f"{100 * gain:+.1f} %")
            parts = [f"{edge.plan.instance} {edge.plan.estimate.total:.1f}" for edge in with_strips.edges]
            details.append(
                f"{m} x {n} x {k} {layouts}: {one.estimate.total:.1f} us, {one.instance}; with strips "
                f"{with_strips.estimate.total:.1f}, {with_strips.instance} and {' and '.join(parts)}"
            )
        print(f"| {m} x {n} x {k} | {' | '.join(cells)} |")
    print()
    print("\n".join(details))


if __name__ == "__main__":
    main()
