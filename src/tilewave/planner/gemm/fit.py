"""A factor per kernel and the shared constants, fitted to what candidates took on a GPU; what choices lose.

A reading is one candidate at one problem. The fit minimises the mean square of log(predicted / measured),
each factor held towards 1 so that few readings do not move it far; constants and factors take turns.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilewave.device.spec import DeviceSpec
from tilewave.kernels.instances import Family, Instance
from tilewave.planner.gemm.costs import THEORY, GemmCosts
from tilewave.planner.gemm.estimate import InstanceModel, Rates, Traffic, Weigher
from tilewave.planner.gemm.select import GemmPlanner
from tilewave.planner.schedules import Decomposition, Schedule, ScheduleKind
from tilewave.problem import GemmProblem, MatrixLayout

FITTED_CONSTANTS = ("launch", "bandwidth", "sm_bytes", "round", "combining", "partials", "overlap", "walk")
"""What readings at random problems can tell apart; the others keep their values."""

_HELD = 0.05
"""Assumed: weight of log(factor)^2 beside the readings' squares."""

_LEAST, _MOST = 0.33, 3.0
"""Assumed: no factor beyond these; such a reading says that something else is wrong."""

_ROUNDS = 4
_STEPS = (1.25, 1.08, 1.03)


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
    model: InstanceModel  # with a factor of 1
    traffic: Traffic
    cut: Decomposition


class Fit:
    """Readings of one GPU, and the constants fitted to them."""

    def __init__(
        self,
        readings: Iterable[Reading],
        spec: DeviceSpec,
        families: Sequence[Family],
        costs: GemmCosts = THEORY,
    ) -> None:
        self.spec = spec
        self.costs = costs
        self._round = costs.round.value  # which the models hold
        self.instances = {i.name: i for family in families for i in family.instances()}
        planner = GemmPlanner(spec, families, replace(costs, factors={}))
        self._bound: list[_Bound] = []
        for reading in readings:
            instance = self.instances[reading.instance]
            plan = planner.plan_with(reading.problem, instance, reading.schedule)
            traffic = Traffic.of(plan.problem)
            self._bound.append(_Bound(reading, planner.model(instance), traffic, plan.cut))

    def run(self) -> GemmCosts:
        """Fit constants and factors in turns; the result is also in ``costs``."""
        for _ in range(_ROUNDS):
            self._fit_factors()
            for step in _STEPS:
                self._fit_constants(step)
        self._fit_factors()
        self._lend_factors()
        return self.costs

    def errors(self) -> list[float]:
        """log(predicted / measured) of every reading."""
        return [self._error(bound, self.costs) for bound in self._bound]

    def root_mean_square(self) -> float:
        """Of the errors: 0.1 is about 10 %."""
        return math.sqrt(statistics.fmean(error * error for error in self.errors()))

    def _error(self, bound: _Bound, costs: GemmCosts) -> float:
        factor = costs.factors.get(bound.reading.instance, 1.0)
        clock = self.spec.clock_mhz
        base = bound.model
        extra = (costs.round.value - self._round) / clock
        model = replace(base, element=base.element * factor, round=base.round + extra)
        rates = Rates.of(self.spec, costs, self.spec.sms)
        weigher = Weigher(model, bound.reading.problem, bound.traffic, rates)
        return math.log(weigher.key(bound.cut)[0] / bound.reading.microseconds)

    def _fit_factors(self) -> None:
        groups: dict[str, list[_Bound]] = defaultdict(list)
        for bound in self._bound:
            groups[bound.reading.instance].append(bound)
        self.costs = replace(
            self.costs, factors={name: self._factor(name, group) for name, group in groups.items()}
        )

    def _factor(self, name: str, group: Sequence[_Bound]) -> float:
        """The best factor of one instance, by golden section on its logarithm."""

        def loss(log_factor: float) -> float:
            costs = replace(self.costs, factors={name: math.exp(log_factor)})
            return sum(self._error(bound, costs) ** 2 for bound in group) + _HELD * log_factor**2

        low, high = math.log(_LEAST), math.log(_MOST)
        inner = (math.sqrt(5) - 1) / 2
        x, y = high - inner * (high - low), low + inner * (high - low)
        at_x, at_y = loss(x), loss(y)
        while high - low > 0.005:
            if at_x < at_y:
                high, y, at_y = y, x, at_x
                x = high - inner * (high - low)
                at_x = loss(x)
            else:
                low, x, at_x = x, y, at_y
                y = low + inner * (high - low)
                at_y = loss(y)
        return round(math.exp((low + high) / 2), 4)

    def _fit_constants(self, step: float) -> None:
        best = self.root_mean_square()
        for name in FITTED_CONSTANTS:
            for scale in (step, 1 / step):
                kept, constant = self.costs, getattr(self.costs, name)
                changes: dict[str, Any] = {name: replace(constant, value=constant.value * scale)}
                self.costs = replace(kept, **changes)
                error = self.root_mean_square()
                if error < best:
                    best = error
                    break
                self.costs = kept

    def _lend_factors(self) -> None:
        """An instance without readings gets the median factor of those that are alike but for the access."""
        alike: dict[tuple[object, ...], list[float]] = defaultdict(list)
        for name, factor in self.costs.factors.items():
            alike[_shape(self.instances[name])].append(factor)
        lent = {
            name: round(statistics.median(alike[_shape(instance)]), 4)
            for name, instance in self.instances.items()
            if name not in self.costs.factors and _shape(instance) in alike
        }
        self.costs = replace(self.costs, factors={**self.costs.factors, **lent})


def _shape(instance: Instance) -> tuple[object, ...]:
    return instance.family, instance.bm, instance.bn, instance.bk, instance.items, instance.k_groups


@dataclass(frozen=True, slots=True)
class Loss:
    """What a choice among the measured candidates of a problem loses against the best of them."""

    problem: GemmProblem
    chosen: Reading
    best: Reading
    predicted: float
    best_predicted: float

    @property
    def ratio(self) -> float:
        """Time of the choice over time of the best."""
        return self.chosen.microseconds / self.best.microseconds


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
            planner.plan_with(problem, instances[one.instance], one.schedule).estimate.total for one in group
        ]
        least = min(range(len(group)), key=predicted.__getitem__)
        best = min(range(len(group)), key=lambda i: group[i].microseconds)
        found.append(Loss(problem, group[least], group[best], predicted[least], predicted[best]))
    return sorted(found, key=lambda loss: -loss.ratio)


def calibration_record(fit: Fit, source: str, base: GemmCosts = THEORY) -> dict[str, Any]:
    """The fitted constants and factors as the content of a calibration file."""
    constants = {
        name: {"value": float(f"{getattr(fit.costs, name).value:.5g}"), "source": source}
        for name in FITTED_CONSTANTS
        if getattr(fit.costs, name).value != getattr(base, name).value
    }
    return {
        "device": fit.spec.name,
        "source": source,
        "constants": constants,
        "factors": dict(sorted(fit.costs.factors.items())),
    }
