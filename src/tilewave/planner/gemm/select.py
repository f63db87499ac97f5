"""The choice of kernel and schedule: a pure function of problem, GPU record, options and constants."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, overload

from tilewave.compiler.register_pass import architecture_refusal, switched_off
from tilewave.device.spec import DeviceSpec
from tilewave.errors import UsageError
from tilewave.kernels.instances import Family, Instance
from tilewave.kernels.new_loops import instance_refusal
from tilewave.planner.gemm.candidates import bind, schedules_for, why_useless
from tilewave.planner.gemm.costs import GemmCosts, costs_for
from tilewave.planner.gemm.edges import with_edges
from tilewave.planner.gemm.estimate import InstanceModel, Rates, Traffic, Weigher
from tilewave.planner.gemm.options import WORKSPACE_LIMIT_BYTES, PlanOptions
from tilewave.planner.gemm.records import GemmCandidate, GemmEstimate, GemmPlan
from tilewave.planner.schedules import DATA_PARALLEL, Decomposition, Raster, Schedule, ScheduleKind
from tilewave.problem import BATCH_LEVELS, GemmProblem, MatrixLayout

__all__ = ["CACHED_PLANS", "WORKSPACE_LIMIT_BYTES", "GemmPlanner", "PlanOptions", "plan_gemm"]

CACHED_PLANS = 4096
"""Plans that a planner keeps; the least recently used goes first."""

_CACHED_PLANNERS = 64
_DEFAULT = PlanOptions()
_SHOWN_REASONS = 4
"""Rejected candidates that an error names: there can be hundreds, most for the same reason."""
_NO_TIME = GemmEstimate(0.0, 0.0, 0.0, 0.0, 0.0)

# What candidates are compared by: time, the arithmetic behind it, fewer pieces, the order of enumeration.
_Rank = tuple[float, float, int, int, int]


class GemmPlanner:
    """Plans for one GPU with one set of kernels and constants; keeps the plans that it made.

    ``new_loops``: kernels run with the loops of the register-file pass where it takes them. Threads may share
    a planner.
    """

    def __init__(
        self,
        spec: DeviceSpec,
        families: Sequence[Family],
        costs: GemmCosts | None = None,
        *,
        new_loops: bool = False,
    ) -> None:
        self.spec = spec
        self.new_loops = new_loops and architecture_refusal(spec.arch) is None
        self.families = tuple(families)
        self.costs = costs_for(spec.name) if costs is None else costs
        self._models: dict[str, InstanceModel] = {}
        self._rates: dict[int, Rates] = {}
        self._ruled_out: dict[str, str] = {}
        self._plans: OrderedDict[Any, GemmPlan] = OrderedDict()
        self._lock = threading.Lock()

    def rule_out(self, instance: Instance, reason: str) -> None:
        """Choose this instance no more, for a reason that a GPU gave; plans made before are forgotten."""
        with self._lock:
            if instance.name not in self._ruled_out:
                self._ruled_out[instance.name] = reason
                self._plans.clear()

    def plan(self, problem: GemmProblem, options: PlanOptions = _DEFAULT) -> GemmPlan:
        """The plan for a problem, from the cache when it was made before."""
        key = (_key(problem), options)
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
                return plan
            ruled_out = len(self._ruled_out)
        plan = self.plan_afresh(problem, options)
        with self._lock:
            # What was begun before a kernel was ruled out may hold it, and is not to be met again.
            if len(self._ruled_out) == ruled_out:
                self._plans[key] = plan
                if len(self._plans) > CACHED_PLANS:
                    self._plans.popitem(last=False)
        return plan

    def plan_afresh(self, problem: GemmProblem, options: PlanOptions = _DEFAULT) -> GemmPlan:
        """The plan for a problem, not from the cache. Raises ``UsageError`` when nothing can compute it."""
        whole = self.plan_in_one(problem, options)
        return with_edges(whole, options, self.costs.launch.value, self.plan_in_one)

    def plan_in_one(self, problem: GemmProblem, options: PlanOptions = _DEFAULT) -> GemmPlan:
        """The fastest plan of a single launch. Raises ``UsageError`` when nothing can compute the problem."""
        problem = _checked(problem)
        if problem.m == 0 or problem.n == 0 or problem.batches == 0:
            return self._nothing(problem)
        weighers = sorted(
            (weigher.least(), index, weigher)
            for index, (_, _, weigher) in enumerate(self._instances(problem, options))
            if weigher is not None
        )
        best: tuple[_Rank, Weigher, Schedule, Decomposition] | None = None
        sms, depth = self.sms(options), _depth(problem)
        for least, index, weigher in weighers:
            if best is not None and least > best[0][0]:
                break  # sorted: no later instance can be faster
            bounded = [
                (weigher.least_of(schedule), order, schedule)
                for order, schedule in enumerate(schedules_for(weigher, sms, options))
            ]
            for bound, order, schedule in sorted(bounded, key=_first_two):
                if best is not None and bound > best[0][0]:
                    break
                cut = bind(weigher, depth, schedule, sms, options)
                if why_useless(weigher, schedule, cut, sms, options) is not None:
                    continue
                rank = (*weigher.key(cut), schedule.pieces, index, order)
                if best is None or rank < best[0]:
                    best = rank, weigher, schedule, cut
        if best is None:
            raise UsageError(self._why_nothing(problem, options))
        return self._made(problem, options, *best[1:])

    def plan_with(
        self, problem: GemmProblem, instance: Instance, schedule: Schedule, options: PlanOptions = _DEFAULT
    ) -> GemmPlan:
        """The plan that runs a problem on one instance under one schedule, whatever others would take.

        Raises ``UsageError`` when it cannot.
        """
        problem = _checked(problem)
        sms = self.sms(options)
        family = next(family for family in self.families if family.name == instance.family)
        model = self.model(instance)
        reason = family.refuses(instance, problem) or model.refusal
        if reason is None:
            weigher = Weigher(model, problem, Traffic.of(problem), self._rates_of(sms))
            cut = bind(weigher, _depth(problem), schedule, sms, options)
            reason = why_useless(weigher, schedule, cut, sms, options)
        if reason is not None:
            raise UsageError(f"{instance} {schedule} cannot compute {problem} on {self.spec.name}: {reason}")
        return self._made(problem, options, weigher, schedule, cut)

    def _made(
        self,
        problem: GemmProblem,
        options: PlanOptions,
        weigher: Weigher,
        schedule: Schedule,
        cut: Decomposition,
    ) -> GemmPlan:
        return GemmPlan(
            problem=problem,
            device=self.spec.name,
            sms=self.sms(options),
            instance=weigher.model.instance,
            schedule=schedule,
            cut=cut,
            raster=Raster(weigher.tiles_m, weigher.tiles_n, weigher.band),
            estimate=weigher.estimate(cut),
            considered=Considered(self, problem, options),
            notes=_notes(self.spec, options, schedule, cut),
            blocks_per_sm=weigher.model.resident,
        )

    def sms(self, options: PlanOptions) -> int:
        """SMs that a plan may use."""
        return self.spec.sms if options.max_sms is None else min(options.max_sms, self.spec.sms)

    def candidates(self, problem: GemmProblem, options: PlanOptions = _DEFAULT) -> tuple[GemmCandidate, ...]:
        """Every candidate for a problem, each weighed in full; ``rejected`` is None for the choice alone."""
        problem, sms = _checked(problem), self.sms(options)
        if problem.m == 0 or problem.n == 0 or problem.batches == 0:
            return ()
        found: list[tuple[_Rank | None, GemmCandidate]] = []
        usable = -1
        for instance, refusal, weigher in self._instances(problem, options, explain=True):
            if weigher is None:
                found.append((None, GemmCandidate(instance, DATA_PARALLEL, None, refusal)))
                continue
            usable += 1
            for order, schedule in enumerate(schedules_for(weigher, sms, options)):
                cut = bind(weigher, _depth(problem), schedule, sms, options)
                useless = why_useless(weigher, schedule, cut, sms, options)
                if useless is not None:
                    found.append((None, GemmCandidate(instance, schedule, None, useless)))
                    continue
                estimate = weigher.estimate(cut)
                rank = (estimate.total, estimate.compute, schedule.pieces, usable, order)
                found.append((rank, GemmCandidate(instance, schedule, estimate, None)))
        ranks = [rank for rank, _ in found if rank is not None]
        if not ranks:
            return tuple(candidate for _, candidate in found)
        least = min(ranks)
        return tuple(
            candidate
            if rank is None or rank == least
            else replace(candidate, rejected=_why_slower(candidate.estimate, rank[0], least[0]))
            for rank, candidate in found
        )

    def _instances(
        self, problem: GemmProblem, options: PlanOptions, *, explain: bool = False
    ) -> Iterator[tuple[Instance, str | None, Weigher | None]]:
        """Every matching instance with its weigher, or why it cannot be used."""
        traffic, rates = Traffic.of(problem), self._rates_of(self.sms(options))
        for family in self.families:
            for instance in family.matching(problem):
                reason = family.refuses(instance, problem)
                if reason is None and options.batch_invariant:
                    reason = _why_variant(instance)
                model = self.model(instance)
                reason = reason or model.refusal or self._why_slow(instance)
                if reason is None:
                    yield instance, None, Weigher(model, problem, traffic, rates)
                elif explain:
                    yield instance, reason, None

    def _why_slow(self, instance: Instance) -> str | None:
        """Why an instance that needs the loop of the register-file pass would run without it, or None."""
        if not instance.needs_new_loop:
            return None
        if not self.new_loops:
            return "it is fast only with the register-file pass's loop, which does not run here"
        reason = self._ruled_out.get(instance.name)
        return None if reason is None else f"it is fast only with the register-file pass's loop: {reason}"

    def model(self, instance: Instance) -> InstanceModel:
        """What an instance costs on this GPU, worked out once."""
        model = self._models.get(instance.name)
        if model is None:
            new = self.new_loops and instance_refusal(instance) is None
            model = InstanceModel.of(instance, self.spec, self.costs, new_loop=new)
            self._models[instance.name] = model
        return model

    def _rates_of(self, sms: int) -> Rates:
        rates = self._rates.get(sms)
        if rates is None:
            rates = self._rates[sms] = Rates.of(self.spec, self.costs, sms)
        return rates

    def _nothing(self, problem: GemmProblem) -> GemmPlan:
        """A plan without blocks, for an output without elements."""
        instance = self.families[0].instances()[0]
        return GemmPlan(
            problem=problem,
            device=self.spec.name,
            sms=self.spec.sms,
            instance=instance,
            schedule=DATA_PARALLEL,
            cut=Decomposition(0, 0, instance.bk, 0, 1, 0),
            raster=Raster(0, 0),
            estimate=_NO_TIME,
            considered=(),
            notes=("out has no elements, so nothing is launched",),
        )

    def _why_nothing(self, problem: GemmProblem, options: PlanOptions) -> str:
        reasons = [str(candidate) for candidate in self.candidates(problem, options)]
        shown = "; ".join(reasons[:_SHOWN_REASONS]) or "none matches"
        if len(reasons) > _SHOWN_REASONS:
            shown += f"; and {len(reasons) - _SHOWN_REASONS} more candidates, each turned down"
        asked = f" with {options}" if options != _DEFAULT else ""
        return f"no kernel can compute {problem} on {self.spec.name}{asked}: {shown}"


class Considered(Sequence[GemmCandidate]):
    """All candidates of a plan, worked out when first asked for: the choice itself weighs fewer."""

    def __init__(self, planner: GemmPlanner, problem: GemmProblem, options: PlanOptions) -> None:
        self.planner = planner
        self.problem = problem
        self.options = options

    @cached_property
    def _all(self) -> tuple[GemmCandidate, ...]:
        return self.planner.candidates(self.problem, self.options)

    @overload
    def __getitem__(self, index: int) -> GemmCandidate: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[GemmCandidate]: ...

    def __getitem__(self, index: int | slice) -> GemmCandidate | Sequence[GemmCandidate]:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)

    def __reduce__(self) -> tuple[type[tuple[Any, ...]], tuple[tuple[GemmCandidate, ...]]]:
        """A plan travels with its candidates, not with its planner."""
        return tuple, (self._all,)


_planners: OrderedDict[int, GemmPlanner] = OrderedDict()
_planners_lock = threading.Lock()


def plan_gemm(problem: GemmProblem, spec: DeviceSpec, options: PlanOptions = _DEFAULT) -> GemmPlan:
    """Which kernel computes a problem on a GPU, and how its work is dealt: the least predicted time.

    Pure and deterministic: equal arguments give equal plans on every machine, unless a GPU of this process
    has refused a kernel (`rule_out`). Raises ``UsageError`` for options that contradict each other or the
    problem.
    """
    planner = _planners.get(id(spec))
    if planner is None or planner.spec is not spec:
        planner = planner_of(spec)
    return planner.plan(problem, options)


def planner_of(spec: DeviceSpec) -> GemmPlanner:
    """The planner behind `plan_gemm` for a GPU.

    Planners are looked up by the record's identity, because comparing records takes longer than a look-up
    of a plan. A planner keeps its record, so the identity stays its own.
    """
    from tilewave.kernels.families import FAMILIES

    with _planners_lock:
        equal = next((planner for planner in _planners.values() if planner.spec == spec), None)
        planner = GemmPlanner(spec, FAMILIES, new_loops=switched_off() is None)
        if equal is not None:
            planner._plans, planner._models, planner._lock = equal._plans, equal._models, equal._lock
            planner._ruled_out = equal._ruled_out
        _planners[id(spec)] = planner
        while len(_planners) > _CACHED_PLANNERS:
            _planners.popitem(last=False)
        return planner


def rule_out(spec: DeviceSpec, instance: Instance, reason: str) -> None:
    """Let `plan_gemm` choose an instance no more on a GPU that runs it without the loop that it needs."""
    planner_of(spec).rule_out(instance, reason)


def _checked(problem: GemmProblem) -> GemmProblem:
    """The problem, as one without products where k is 0."""
    if len(problem.batch) > BATCH_LEVELS:
        raise UsageError(
            f"a problem may have at most {BATCH_LEVELS} batch axes, not {len(problem.batch)}: merge them or "
            "launch more than once"
        )
    if min(problem.m, problem.n, problem.k, *problem.batch, 0) < 0:
        raise UsageError(f"sizes of {problem} must be at least 0")
    return replace(problem, product=False) if problem.product and problem.k == 0 else problem


def _depth(problem: GemmProblem) -> int:
    return problem.k if problem.product else 0


def _first_two(entry: tuple[float, int, Schedule]) -> tuple[float, int]:
    return entry[:2]


def _why_variant(instance: Instance) -> str | None:
    """Why an instance may not be used where bits must not depend on m or the batch."""
    if not instance.sequential:
        return "it does not sum in the order of k, which batch_invariant asks for"
    if instance.k_groups > 1:
        return f"it sums in {instance.k_groups} groups, and batch_invariant asks for one chain"
    return None


def _why_slower(estimate: GemmEstimate | None, total: float, least: float) -> str:
    bound = f", bound by {estimate.limit}" if estimate is not None else ""
    if total == least:
        return f"predicted {total:.4g} us, as long as the choice, which has less work or fewer pieces{bound}"
    return f"predicted {total:.4g} us, {total / least:.3f} times the choice{bound}"


def _notes(spec: DeviceSpec, options: PlanOptions, schedule: Schedule, cut: Decomposition) -> tuple[str, ...]:
    notes = []
    if options.max_sms is not None:
        notes.append(
            f"max_sms {options.max_sms}: {cut.blocks} blocks are launched, so no more than so many of "
            f"{spec.sms} SMs are in use"
        )
    if schedule.kind is ScheduleKind.DATA_PARALLEL and cut.walkers:
        notes.append(
            f"{cut.walkers} blocks walk over {cut.tiles:,} whole tiles, with the bits of a block a tile"
        )
    if schedule.pieces > cut.pieces:
        notes.append(f"{schedule} was asked for; K has {cut.slices} slices, so {cut.pieces} pieces are cut")
    return tuple(notes)


def _layout_key(layout: MatrixLayout | None) -> tuple[Any, ...] | None:
    return None if layout is None else (layout.row, layout.column, layout.batch, layout.alignment)


def _key(problem: GemmProblem) -> tuple[Any, ...]:
    """Everything a plan can depend on, flat: a tuple hashes in a fraction of a record's time."""
    a, b, out = problem.a, problem.b, problem.out
    return (
        problem.m,
        problem.n,
        problem.k,
        problem.batch,
        a.row,
        a.column,
        a.batch,
        a.alignment,
        b.row,
        b.column,
        b.batch,
        b.alignment,
        out.row,
        out.column,
        out.batch,
        out.alignment,
        None if problem.c is None else _layout_key(problem.c),
        None if problem.bias is None else _layout_key(problem.bias),
        None if problem.preactivation is None else _layout_key(problem.preactivation),
        problem.activation,
        problem.product,
        problem.precision,
    )
