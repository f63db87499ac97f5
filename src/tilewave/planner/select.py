"""The choice among candidates: a pure function of the problem, the GPU's record and the constants."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewave.device.spec import DeviceSpec
from tilewave.errors import UsageError
from tilewave.planner.cost import ARTICLE_COSTS, CostModel, Estimate, estimate
from tilewave.planner.records import Candidate, Plan, Problem, launch_of
from tilewave.planner.schedules import (
    DATA_PARALLEL,
    STREAM_K_WALK,
    Decomposition,
    Raster,
    Schedule,
    ScheduleKind,
    decompose,
    split_k,
    stream_k,
    stream_k_sixteen,
)
from tilewave.planner.tiles import DOUBLE_BUFFERED, LARGE, SMALL, TALL, Variant

# CUDA's limit on blocks along x.
MAX_BLOCKS = 2**31 - 1
# Assumed: more than this for partial sums is never worth a candidate; the article's largest is far below it.
WORKSPACE_LIMIT_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Family:
    """A set of candidates to choose among, in order of preference where costs are equal."""

    name: str
    about: str
    pairs: tuple[tuple[Variant, Schedule], ...]


_THREE_PAIRS = ((LARGE, DATA_PARALLEL), (SMALL, DATA_PARALLEL), (SMALL, split_k(3)))
_KEPT_PAIRS = tuple((LARGE, stream_k(pieces)) for pieces in (2, 3, 4))

THREE_KERNELS = Family("three", "the article's selector among three kernels", _THREE_PAIRS)
WITH_STREAM_K = Family(
    "stream-k",
    "the three kernels and stream-K of the big tile, as the article kept it",
    _THREE_PAIRS + _KEPT_PAIRS,
)
EVERYTHING = Family(
    "all",
    "every variant and schedule that the planner can describe, the article's failures included",
    (
        *_THREE_PAIRS,
        *_KEPT_PAIRS,
        *((SMALL, stream_k(pieces)) for pieces in (2, 3, 4)),
        (TALL, DATA_PARALLEL),
        (DOUBLE_BUFFERED, DATA_PARALLEL),
        (LARGE, STREAM_K_WALK),
        *((LARGE, stream_k_sixteen(pieces)) for pieces in range(5, 17)),
    ),
)
FAMILIES = {family.name: family for family in (THREE_KERNELS, WITH_STREAM_K, EVERYTHING)}
# What runs where no candidate of a family can: it needs no cp.async.
_FALLBACK = (DOUBLE_BUFFERED, DATA_PARALLEL)


def plan(
    problem: Problem,
    spec: DeviceSpec,
    *,
    family: Family = WITH_STREAM_K,
    costs: CostModel = ARTICLE_COSTS,
    workspace_limit: int = WORKSPACE_LIMIT_BYTES,
) -> Plan:
    """Choose the candidate of ``family`` that gives the busiest SM of ``spec`` the least to do.

    Pure and deterministic: the same arguments give the same plan on every machine. At equal cost the fewer
    pieces win, then the family's order. Where the GPU can run none of the family, the double-buffered kernel
    is added. Raises ``UsageError``, with every candidate's reason, when nothing can run.
    """
    weighed = [_weigh(problem, spec, *pair, costs, workspace_limit) for pair in family.pairs]
    if all(estimated is None for _, estimated in weighed):
        weighed.append(_weigh(problem, spec, *_FALLBACK, costs, workspace_limit))
    able = [
        (estimated.cost, candidate.schedule.pieces, index)
        for index, (candidate, estimated) in enumerate(weighed)
        if estimated is not None
    ]
    if not able:
        reasons = "; ".join(str(candidate) for candidate, _ in weighed)
        raise UsageError(f"no kernel can run {problem} on {spec.name}: {reasons}")
    least, _, chosen = min(able)
    considered = tuple(
        candidate
        if index == chosen or estimated is None
        else replace(candidate, rejected=_why_costlier(estimated.cost, least))
        for index, (candidate, estimated) in enumerate(weighed)
    )
    winner = considered[chosen]
    assert winner.cut is not None
    assert winner.estimate is not None
    return Plan(
        problem=problem,
        device=spec.name,
        sms=spec.sms,
        family=family.name,
        costs=costs.name,
        variant=winner.variant,
        schedule=winner.schedule,
        cut=winner.cut,
        raster=Raster(*winner.variant.tile.count(problem.m, problem.n)),
        launch=launch_of(winner.variant, winner.cut),
        estimate=winner.estimate,
        considered=considered,
    )


def least_bare_pieces(tiles: int, k: int, depth: int, sms: int, most: int = 16) -> int:
    """The pieces, 1 to ``most``, that give the busiest SM the fewest slices: no allowance for combining.

    This is how the second attempt at stream-K is taken to have chosen; the article does not say. The fewest
    pieces win a tie.
    """
    counts = {
        pieces: decompose(tiles, k, depth, stream_k_sixteen(pieces), sms).busiest_slices(sms)
        for pieces in range(1, most + 1)
    }
    return min(counts, key=lambda pieces: (counts[pieces], pieces))


def _weigh(
    problem: Problem,
    spec: DeviceSpec,
    variant: Variant,
    schedule: Schedule,
    costs: CostModel,
    workspace_limit: int,
) -> tuple[Candidate, Estimate | None]:
    """The candidate and its estimate; no estimate, and a reason in the candidate, where it cannot run."""
    cut: Decomposition | None = None
    reason = variant.why_illegal(spec)
    if reason is None:
        rows, columns = variant.tile.count(problem.m, problem.n)
        tiles = problem.batch * rows * columns
        cut = decompose(tiles, problem.k, variant.tile.bk, schedule, spec.sms, variant.tile.stages)
        reason = _why_useless(variant, schedule, cut, spec.sms, workspace_limit)
    if cut is None or reason is not None:
        return Candidate(variant, schedule, None, None, reason), None
    estimated = estimate(variant, schedule, cut, spec, costs)
    return Candidate(variant, schedule, cut, estimated, None), estimated


def _why_useless(
    variant: Variant, schedule: Schedule, cut: Decomposition, sms: int, workspace_limit: int
) -> str | None:
    """Why a legal variant cannot, or need not, run under this schedule; None when it can."""
    if cut.pieces < schedule.pieces:
        return f"K has {cut.slices} slices, too few for {schedule.pieces} pieces of {variant.tile.stages}"
    if schedule.kind in (ScheduleKind.STREAM_K, ScheduleKind.STREAM_K_SIXTEEN) and cut.tiles % sms == 0:
        return "no incomplete wave to cut"
    if cut.blocks > MAX_BLOCKS:
        return f"{cut.blocks} blocks are more than a launch can have ({MAX_BLOCKS})"
    workspace = launch_of(variant, cut).workspace_bytes
    if workspace > workspace_limit:
        return f"a workspace of {workspace} bytes is more than the limit of {workspace_limit}"
    return None


def _why_costlier(cost: float, least: float) -> str:
    if cost == least:
        return "costs as much as the choice"
    return f"costs {cost / least:.3f} times the choice"
