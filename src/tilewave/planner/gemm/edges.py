"""Whole tiles and what is left of them: a few last rows and columns computed by launches of their own.

Where M or N is a few more than a multiple of the tiles' size, a row of tiles is computed for little: at 2049
one in seventeen. A plan may leave such rows and columns to kernels for skinny products, which come after the
tiles in the same stream, each a plan of its own: a strip below over all columns, and one at the right beside
the tiles. It does where that is predicted to take less time, launches counted. Every element is computed by
one launch, and the same strips in every run, so the bits are the same every time; a strip's elements are
summed in another order than their neighbours, which `batch_invariant` forbids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from tilewave.kernels.arguments import Pointers
from tilewave.normalise import normalise
from tilewave.planner.gemm.options import PlanOptions
from tilewave.planner.gemm.records import Edge, GemmEstimate, GemmPlan
from tilewave.problem import GemmProblem

MOST = 8
"""Assumed: rows or columns that may be left over; more are worth a row of small tiles."""

UNIT = 64
"""Rows and columns that tiles cover without a rest are a multiple of this; a strip that begins at one has the
alignment of the whole."""

LEAST_GAIN = 0.02
"""Assumed: what is predicted to gain less is not worth a launch, for predictions are not that exact."""

_LAYOUTS = ("a", "b", "out", "c", "bias", "preactivation")

Planner = Callable[[GemmProblem, PlanOptions], GemmPlan]


def with_edges(whole: GemmPlan, options: PlanOptions, launch: float, plan: Planner) -> GemmPlan:
    """``whole``, or a plan with strips of their own where that is predicted to be faster.

    ``launch`` is what one more launch costs at least, in microseconds; ``plan`` plans a part.
    """
    problem = whole.problem
    if (
        whole.blocks == 0
        or not problem.product
        or options.batch_invariant
        or options.max_sms is not None
        or options.schedule is not None
    ):
        return whole
    best = whole
    for rows, columns in _rests(problem):
        count = (rows > 0) + (columns > 0)
        covered = _covered(problem.m, whole.instance.bm) * _covered(problem.n, whole.instance.bn)
        kept = (problem.m - rows) * (problem.n - columns)
        gain = whole.estimate.compute * (1 - kept / covered) - count * launch
        if gain <= LEAST_GAIN * whole.estimate.total:
            continue  # all that is computed for nothing would not pay for the launches
        limit = min(best.estimate.total, (1 - LEAST_GAIN) * whole.estimate.total)
        made = peeled(problem, rows, columns, options, plan, limit)
        if made is not None:
            best = made
    if best is whole:
        return whole
    one = f"{whole.instance} {whole.schedule} was predicted to take {whole.estimate.total:.4g} us"
    return replace(best, notes=(*best.notes, f"in one launch, {one}"))


def peeled(
    problem: GemmProblem,
    rows: int,
    columns: int,
    options: PlanOptions,
    plan: Planner,
    limit: float = math.inf,
) -> GemmPlan | None:
    """The plan that leaves the last rows and columns to strips; None if it is predicted to take ``limit`` us.

    As soon as that is seen, no further part is planned.
    """
    m, n = problem.m - rows, problem.n - columns
    main = plan(replace(problem, m=m, n=n), options)
    parts, edges = [main.estimate], []
    for row, column, height, width in ((m, 0, rows, problem.n), (0, n, m, columns)):
        if height == 0 or width == 0:
            continue
        if sum(part.total for part in parts) + parts[0].launch >= limit:
            return None
        normalised = normalise(replace(problem, m=height, n=width))
        assert not normalised.loops  # a part has the axes of the whole
        edges.append(Edge(row, column, normalised.swapped, plan(normalised.problem, options)))
        parts.append(edges[-1].plan.estimate)
    estimate = GemmEstimate(
        *(
            sum(getattr(part, name) for part in parts)
            for name in ("total", "compute", "memory", "combining", "launch")
        )
    )
    if estimate.total >= limit:
        return None
    names = " and ".join(f"{edge.plan.instance} {edge.plan.schedule} from {edge.place} on" for edge in edges)
    note = f"of {problem} what is beyond these tiles is computed by launches of its own: {names}"
    return replace(main, estimate=estimate, edges=tuple(edges), whole=problem, notes=(*main.notes, note))


def pointers_of(edge: Edge, problem: GemmProblem, given: Pointers) -> Pointers:
    """The addresses of a strip's launch, from those of the problem that it is a part of."""
    steps = {
        "a": (edge.row, 0),
        "b": (0, edge.column),
        **dict.fromkeys(_LAYOUTS[2:], (edge.row, edge.column)),
    }
    moved = {}
    for name, (down, right) in steps.items():
        layout, address = getattr(problem, name), getattr(given, name)
        moved[name] = 0 if layout is None else address + 4 * (down * layout.row + right * layout.column)
    if edge.swapped:
        moved["a"], moved["b"] = moved["b"], moved["a"]
    return Pointers(**moved)


def _rests(problem: GemmProblem) -> Iterator[tuple[int, int]]:
    """Rows and columns that may be left to strips, in every combination."""
    rows, columns = (_rest(extent) for extent in (problem.m, problem.n))
    if rows and columns:
        yield rows, columns
    if rows:
        yield rows, 0
    if columns:
        yield 0, columns


def _rest(extent: int) -> int:
    rest = extent % UNIT
    return rest if 0 < rest <= MOST and extent > UNIT else 0


def _covered(extent: int, tile: int) -> int:
    return -(-extent // tile) * tile
