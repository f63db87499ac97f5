"""Two factors per kernel and the shared constants, fitted to what candidates took; what choices lose.

A reading is one candidate at one problem. The fit minimises the squares of log(predicted / measured), each
constant held towards theory and each factor towards those of kernels that are alike.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewave.device.spec import DeviceSpec
from tilewave.kernels.instances import Family, Instance
from tilewave.planner.cost import Constant
from tilewave.planner.gemm.costs import THEORY, GemmCosts
from tilewave.planner.gemm.estimate import InstanceModel, Rates, Traffic, Weigher
from tilewave.planner.gemm.records import GemmEstimate
from tilewave.planner.gemm.select import GemmPlanner
from tilewave.planner.schedules import Decomposition, Schedule, ScheduleKind
from tilewave.problem import GemmProblem, MatrixLayout

FITTED: Mapping[str, float] = {
    "launch": 0.3,
    "bandwidth": 0.1,
    "sm_bytes": 0.25,
    "few_warps": 1.5,
    "narrow_copies": 0.7,
    "round": 0.6,
    "tile": 0.7,
    "outputs": 1.0,
    "stores": 0.7,
    "narrow_stores": 0.7,
    "combining": 0.5,
    "partials": 0.3,
    "overlap": 0.6,
    "walk": 0.05,
}
"""What readings at random problems can tell apart, with the width of each one's logarithm around theory's.
Assumed: narrow where theory was measured, wide where it is a guess. The other constants keep their values."""

_POSSIBLE = {"bandwidth": (0.3, 1.0), "partials": (0.2, 1.5), "overlap": (0.02, 1.0), "walk": (1.0, 1.5)}
"""Physical bounds: no more than memory moves (partial sums may stay in L2), no less than the longer part."""

# Assumed widths of effects: what families, tiles, accesses and kernels differ by from what the model says.
_FAMILY_WIDTH, _SHAPE_WIDTH, _ACCESS_WIDTH, _KERNEL_WIDTH = 0.15, 0.15, 0.1, 0.08
_FAMILY_TILE_WIDTH, _SHAPE_TILE_WIDTH = 0.5, 0.3

_NOISE = 0.08
"""Assumed: what is left of an error when all constants are right."""

_LINEAR = 2.0
"""Errors beyond so many times the noise count linearly: something that the model does not know."""

_ROUNDS, _TRIALS = 15, 10
_ENOUGH = 1e-3
_NUDGE = 1e-4
_LONGEST = 0.5


@dataclass(frozen=True, slots=True)
class Reading:
    """What a candidate took at a problem, in microseconds."""

    problem: GemmProblem
    instance: str
    schedule: Schedule
    microseconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain values; only what a plan of a product without an epilogue depends on."""
        problem = self.problem
        return {
            "sizes": [problem.m, problem.n, problem.k],
            "batch": list(problem.batch),
            "product": problem.product,
            **{name: _plain(getattr(problem, name)) for name in ("a", "b", "out")},
            "instance": self.instance,
            "schedule": f"{self.schedule.kind}:{self.schedule.pieces}",
            "us": self.microseconds,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Reading:
        """What `to_json` gave."""
        kind, _, pieces = record["schedule"].partition(":")
        a, b, out = (_layout(record[name]) for name in ("a", "b", "out"))
        m, n, k = record["sizes"]
        problem = GemmProblem(m, n, k, tuple(record["batch"]), a, b, out, product=record["product"])
        schedule = Schedule(ScheduleKind(kind), int(pieces))
        return cls(problem, record["instance"], schedule, float(record["us"]))


def _plain(layout: MatrixLayout) -> list[Any]:
    return [layout.row, layout.column, list(layout.batch), layout.alignment]


def _layout(values: Sequence[Any]) -> MatrixLayout:
    row, column, batch, alignment = values
    return MatrixLayout(row, column, tuple(batch), alignment)


@dataclass(frozen=True, slots=True)
class _Bound:
    """A reading with what does not change while constants do."""

    reading: Reading
    problem: GemmProblem
    traffic: Traffic
    cut: Decomposition


_Vector = NDArray[np.float64]


class Fit:
    """Readings of one GPU, and the constants fitted to them.

    Unknowns are logarithms of the constants, and effects whose sums are the logarithms of the kernels'
    factors (`_Effects`). Each has a width within which it is expected around its start: the less the readings
    say of it, the nearer it stays. Newton's steps on the squares (Levenberg and Marquardt); errors beyond
    ``_LINEAR`` count linearly.
    """

    def __init__(
        self,
        readings: Iterable[Reading],
        spec: DeviceSpec,
        families: Sequence[Family],
        costs: GemmCosts = THEORY,
    ) -> None:
        self.spec = spec
        self.costs = costs
        self.instances = {i.name: i for family in families for i in family.instances()}
        planner = GemmPlanner(spec, families, costs)
        self._bound: list[_Bound] = []
        for reading in readings:
            plan = planner.plan_with(reading.problem, self.instances[reading.instance], reading.schedule)
            self._bound.append(_Bound(reading, plan.problem, Traffic.of(plan.problem), plan.cut))
        self._measured = np.log([bound.reading.microseconds for bound in self._bound])

    def errors(self) -> list[float]:
        """log(predicted / measured) of every reading."""
        return [float(error) for error in self._predicted(self.costs) - self._measured]

    def root_mean_square(self) -> float:
        """Of the errors: 0.1 is about 10 %."""
        return math.sqrt(statistics.fmean(error * error for error in self.errors()))

    def _predicted(self, costs: GemmCosts) -> _Vector:
        """log(predicted microseconds) of every reading."""
        rates = Rates.of(self.spec, costs, self.spec.sms)
        models: dict[str, InstanceModel] = {}
        found = np.empty(len(self._bound))
        for index, bound in enumerate(self._bound):
            name = bound.reading.instance
            model = models.get(name)
            if model is None:
                model = models[name] = InstanceModel.of(self.instances[name], self.spec, costs)
            found[index] = Weigher(model, bound.problem, bound.traffic, rates).key(bound.cut)[0]
        return np.log(found)

    def run(self) -> GemmCosts:
        """Fit constants and factors together; the result is also in ``costs``."""
        start = self.costs
        names = tuple(FITTED)
        effects = _Effects(self.instances)
        rows = [effects.of(bound.reading.instance) for bound in self._bound]
        parts = [np.array([row[part] for row in rows]) for part in (0, 1)]
        widths = np.concatenate([[FITTED[name] for name in names], effects.widths])
        weights = self._weights()
        count = len(names)

        def costs_at(unknowns: _Vector) -> GemmCosts:
            return _with(start, names, unknowns[:count], effects.factors(unknowns[count:]))

        def errors_at(costs: GemmCosts) -> _Vector:
            return (self._predicted(costs) - self._measured) / _NOISE

        def loss_of(errors: _Vector, unknowns: _Vector) -> float:
            size = np.abs(errors)
            each = np.where(size < _LINEAR, size**2 / 2, _LINEAR * (size - _LINEAR / 2))
            return float((weights * each).sum() + ((unknowns / widths) ** 2).sum() / 2)

        unknowns = np.zeros(count + len(effects.widths))
        errors, costs = errors_at(costs_at(unknowns)), costs_at(unknowns)
        loss, damping = loss_of(errors, unknowns), 1e-3
        for _ in range(_ROUNDS):
            slopes = np.empty((len(errors), len(unknowns)))
            for index in range(count):
                nudged = unknowns.copy()
                nudged[index] += _NUDGE
                slopes[:, index] = (errors_at(costs_at(nudged)) - errors) / _NUDGE
            # An effect moves the predictions of its own kernels alone, each as its factor does.
            slopes[:, count:] = 0.0
            for part, factor in zip(parts, _nudged(costs), strict=True):
                slopes[:, count:] += part * ((errors_at(factor) - errors) / _NUDGE)[:, None]
            heed = weights * np.minimum(1.0, _LINEAR / np.maximum(np.abs(errors), 1e-9))
            curvature = slopes.T @ (heed[:, None] * slopes) + np.diag(1 / widths**2)
            gradient = slopes.T @ (heed * errors) + unknowns / widths**2
            before = loss
            for _ in range(_TRIALS):
                damped = curvature + damping * np.diag(np.diag(curvature))
                moved = unknowns - np.clip(np.linalg.solve(damped, gradient), -_LONGEST, _LONGEST)
                trial_costs = costs_at(moved)
                trial = errors_at(trial_costs)
                loss = loss_of(trial, moved)
                if loss < before:
                    unknowns, errors, costs = moved, trial, trial_costs
                    damping /= 10
                    break
                damping *= 5
            if before - loss < _ENOUGH * before:
                break
        self.costs = costs
        return costs

    def _weights(self) -> _Vector:
        """Readings near the best of their problem count most: there the choice is made."""
        best: dict[GemmProblem, float] = {}
        for bound in self._bound:
            took = bound.reading.microseconds
            best[bound.problem] = min(took, best.get(bound.problem, took))
        return np.array([best[bound.problem] / bound.reading.microseconds for bound in self._bound])


class _Effects:
    """What kernels share: a factor is the product of its family's, its tile's, its access's and its own.

    Each effect is an unknown that starts at 0 and is held there by its width, so that a kernel with few
    readings takes after those that are alike.
    """

    def __init__(self, instances: Mapping[str, Instance]) -> None:
        self._index: dict[tuple[object, ...], int] = {}
        widths: list[float] = []
        self._of: dict[str, tuple[list[int], list[int]]] = {}
        for name, one in instances.items():
            tile = (*sorted((one.bm, one.bn)), one.bk, one.items, one.k_groups)
            arithmetic = (
                (("family", one.family), _FAMILY_WIDTH),
                (("tile", one.family, *tile), _SHAPE_WIDTH),
                (("access", one.family, one.a, one.b), _ACCESS_WIDTH),
                (("kernel", name), _KERNEL_WIDTH),
            )
            per_tile = (
                (("family's tile", one.family), _FAMILY_TILE_WIDTH),
                (("tile's tile", one.family, *tile), _SHAPE_TILE_WIDTH),
            )
            found: tuple[list[int], list[int]] = [], []
            for group, wanted in zip(found, (arithmetic, per_tile), strict=True):
                for key, width in wanted:
                    if key not in self._index:
                        self._index[key] = len(widths)
                        widths.append(width)
                    group.append(self._index[key])
            self._of[name] = found
        self.widths = np.array(widths)

    def of(self, name: str) -> tuple[_Vector, _Vector]:
        """Which effects make up the factor and the tile factor of a kernel: 1 where one does, else 0."""
        rows = np.zeros((2, len(self.widths)))
        for row, group in zip(rows, self._of[name], strict=True):
            row[group] = 1.0
        return rows[0], rows[1]

    def factors(self, effects: _Vector) -> tuple[dict[str, float], dict[str, float]]:
        """Factor and tile factor of every kernel."""
        summed = [
            {name: math.exp(float(effects[groups[part]].sum())) for name, groups in self._of.items()}
            for part in (0, 1)
        ]
        return summed[0], summed[1]


def _with(
    costs: GemmCosts,
    names: Sequence[str],
    logarithms: _Vector,
    factors: tuple[Mapping[str, float], Mapping[str, float]],
) -> GemmCosts:
    """Costs whose constants are multiplied, within what is possible, and with these factors."""
    changes: dict[str, Any] = {"factors": factors[0], "tile_factors": factors[1]}
    for name, logarithm in zip(names, logarithms, strict=True):
        constant: Constant = getattr(costs, name)
        least, most = _POSSIBLE.get(name, (0.0, math.inf))
        value = min(most, max(least, constant.value * math.exp(float(logarithm))))
        changes[name] = replace(constant, value=value)
    return replace(costs, **changes)


def _nudged(costs: GemmCosts) -> tuple[GemmCosts, GemmCosts]:
    """All factors a little larger; all tile factors a little larger."""
    larger = math.exp(_NUDGE)
    return (
        replace(costs, factors={name: larger * value for name, value in costs.factors.items()}),
        replace(costs, tile_factors={name: larger * value for name, value in costs.tile_factors.items()}),
    )


@dataclass(frozen=True, slots=True)
class Loss:
    """What a choice among the measured candidates of a problem loses against the best of them."""

    problem: GemmProblem
    chosen: Reading
    best: Reading
    predicted: GemmEstimate
    best_predicted: GemmEstimate

    @property
    def ratio(self) -> float:
        """Time of the choice over time of the best."""
        return self.chosen.microseconds / self.best.microseconds

    @property
    def reason(self) -> str:
        """Which of the two was misjudged more, by how much, and what the model took it to be bound by."""
        chosen = self.chosen.microseconds / self.predicted.total
        best = self.best.microseconds / self.best_predicted.total
        who, took, estimate = "choice", chosen, self.predicted
        if abs(math.log(best)) > abs(math.log(chosen)):
            who, took, estimate = "best", best, self.best_predicted
        return f"the {who} took {took:.2f} times its prediction, bound by {estimate.limit}"


def losses(
    readings: Iterable[Reading], spec: DeviceSpec, families: Sequence[Family], costs: GemmCosts
) -> list[Loss]:
    """For each problem with several readings, what the least prediction among them loses; most first."""
    planner = GemmPlanner(spec, families, costs)
    instances = {i.name: i for family in families for i in family.instances()}
    groups: dict[GemmProblem, list[Reading]] = defaultdict(list)
    for reading in readings:
        groups[reading.problem].append(reading)
    found = []
    for problem, group in groups.items():
        if len(group) < 2:
            continue
        predicted = [
            planner.plan_with(problem, instances[one.instance], one.schedule).estimate for one in group
        ]
        least = min(range(len(group)), key=lambda i: predicted[i].total)
        best = min(range(len(group)), key=lambda i: group[i].microseconds)
        found.append(Loss(problem, group[least], group[best], predicted[least], predicted[best]))
    return sorted(found, key=lambda loss: -loss.ratio)


def calibration_record(
    fit: Fit, source: str, base: GemmCosts = THEORY, *, new_loops: bool = False
) -> dict[str, Any]:
    """The fitted constants and factors as the content of a calibration file.

    ``new_loops``: the readings are of kernels with the loops of the register-file pass.
    """
    constants = {
        name: {"value": float(f"{getattr(fit.costs, name).value:.5g}"), "source": source}
        for name in FITTED
        if getattr(fit.costs, name).value != getattr(base, name).value
    }
    return {
        "device": fit.spec.name,
        "source": source,
        "new_loops": new_loops,
        "constants": constants,
        "factors": _rounded(fit.costs.factors),
        "tile_factors": _rounded(fit.costs.tile_factors),
    }


def _rounded(factors: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in sorted(factors.items())}
