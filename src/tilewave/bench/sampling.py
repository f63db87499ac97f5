"""Which products, and which of their candidates, a calibration times.

Products drawn log-uniformly are mostly tiny, ragged and bound by memory or launches, so kernels for large
ones would be timed where nobody chooses them. A calibration therefore draws from several populations, and
within a product also takes candidates whose kernels have few readings so far.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from tilewave.normalise import normalise
from tilewave.planner.gemm import GemmCandidate, GemmPlanner
from tilewave.planner.schedules import ScheduleKind
from tilewave.problem import GemmProblem, MatrixLayout

_MOST_WORK = 1e11  # multiply-adds: some 4 ms on an H200
_MOST_FLOATS = 2**28  # of all operands and outputs
_FASTEST, _FULL, _RARE, _RANDOM = 5, 2, 2, 1
_WITHIN = 3.0  # times the least prediction: a slower candidate would have to be badly misjudged


def contenders_of(
    planner: GemmPlanner, problem: GemmProblem, draw: random.Random, seen: Mapping[str, int]
) -> list[GemmCandidate]:
    """Candidates to time: by prediction the fastest instances, the first of them under the best schedule of
    each kind; instances with the fewest readings (``seen``, by name); and some at random."""
    able = [c for c in planner.candidates(problem) if c.estimate is not None]
    able.sort(key=_predicted)
    by_instance: dict[str, dict[ScheduleKind, GemmCandidate]] = {}
    for candidate in able:
        by_instance.setdefault(candidate.instance.name, {}).setdefault(candidate.schedule.kind, candidate)
    fastest = [next(iter(kinds.values())) for kinds in by_instance.values()]
    chosen = fastest[:_FASTEST]
    for kinds in list(by_instance.values())[:_FULL]:
        chosen += kinds.values()
    close = [c for c in able if _predicted(c) <= _WITHIN * _predicted(able[0])]
    rare = [c for c in fastest[_FASTEST:] if c in close]
    chosen += sorted(rare, key=lambda c: seen.get(c.instance.name, 0))[:_RARE]
    chosen += draw.sample(close, min(_RANDOM, len(close)))
    return list({str(candidate): candidate for candidate in chosen}.values())


def _predicted(candidate: GemmCandidate) -> float:
    return candidate.estimate.total if candidate.estimate is not None else float("inf")


def draw_problem(draw: random.Random) -> tuple[str, GemmProblem]:
    """A population's name and a random problem of it, as kernels see it, of bounded work and one launch."""
    name = draw.choices(tuple(POPULATIONS), [share for share, _ in POPULATIONS.values()])[0]
    sizes = POPULATIONS[name][1]
    while True:
        normalised = normalise(_laid_out(draw, *sizes(draw)))
        problem = normalised.problem
        m, n, k = problem.m, problem.n, problem.k
        floats = problem.batches * (m * k + k * n + m * n)
        fits = problem.multiply_adds <= _MOST_WORK and floats <= _MOST_FLOATS
        if fits and problem.product and not normalised.loops:
            return name, problem


_Sizes = tuple[int, int, int, tuple[int, ...]]


def _log_uniform(draw: random.Random, low: float, high: float) -> int:
    return round(2 ** draw.uniform(low, high))


def _random(draw: random.Random) -> _Sizes:
    m, n, k = (_log_uniform(draw, 0, 13) for _ in range(3))
    return m, n, k, draw.choice(((), (), (), (8,), (1000,), (4, 12)))


def _large(draw: random.Random) -> _Sizes:
    m, n = (_log_uniform(draw, 8, 13) for _ in range(2))
    k = _log_uniform(draw, 6, 13.5)
    return m, n, k, draw.choice(((), (), (), (4,)))


def _middle(draw: random.Random) -> _Sizes:
    m, n, k = (_log_uniform(draw, 6.5, 11.2) for _ in range(3))
    return m, n, k, draw.choice(((), (), (), (8,)))


def _skinny(draw: random.Random) -> _Sizes:
    sides = [_log_uniform(draw, 0, 4), _log_uniform(draw, 4, 14)]
    draw.shuffle(sides)
    return sides[0], sides[1], _log_uniform(draw, 5, 16), ()


def _deep(draw: random.Random) -> _Sizes:
    m, n = (_log_uniform(draw, 0, 9) for _ in range(2))
    return m, n, _log_uniform(draw, 12, 20), ()


def _tall(draw: random.Random) -> _Sizes:
    sides = [_log_uniform(draw, 13, 20), _log_uniform(draw, 0, 9)]
    draw.shuffle(sides)
    return sides[0], sides[1], _log_uniform(draw, 0, 10), ()


def _many_small(draw: random.Random) -> _Sizes:
    m, n, k = (_log_uniform(draw, 0, 6.5) for _ in range(3))
    return m, n, k, (_log_uniform(draw, 6, 16),)


POPULATIONS: Mapping[str, tuple[float, Callable[[random.Random], _Sizes]]] = {
    "random": (0.36, _random),
    "large": (0.18, _large),
    "middle": (0.16, _middle),
    "skinny": (0.12, _skinny),
    "deep": (0.06, _deep),
    "tall": (0.07, _tall),
    "many small": (0.05, _many_small),
}
"""Share of the draws, and what draws (m, n, k, batch). Choices are judged on ``random`` alone too."""


def _laid_out(draw: random.Random, m: int, n: int, k: int, batch: tuple[int, ...]) -> GemmProblem:
    """All layouts; half the problems ragged as drawn, the others of sizes that vectors suit."""
    even = draw.random() < 0.5
    if even:
        m, n, k = ((size + 7) // 8 * 8 if size >= 8 else size for size in (m, n, k))

    def layout(rows: int, columns: int) -> MatrixLayout:
        transposed = draw.random() < 0.5
        lead = (rows if transposed else columns) + (0 if even else draw.choice((0, 0, 0, 1)))
        row, column = (1, lead) if transposed else (lead, 1)
        alignment = 16 if even else draw.choice((16, 16, 4))
        return MatrixLayout(row, column, _dense(batch, lead * (columns if transposed else rows)), alignment)

    out = MatrixLayout(n, 1, _dense(batch, m * n), 16)
    return GemmProblem(m, n, k, batch, layout(m, k), layout(k, n), out)


def _dense(batch: tuple[int, ...], item: int) -> tuple[int, ...]:
    """Strides of batch axes that lie one item behind the other."""
    strides: list[int] = []
    for extent in reversed(batch):
        strides.insert(0, item)
        item *= extent
    return tuple(strides)
