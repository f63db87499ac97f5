"""Many products in one launch: the choice of one tile for all of them, and of the tiles to cut along K.

A grouped kernel deals with any layouts, so that one launch always suffices; what is chosen is its tile. The
estimate is that of single products (`estimate.py`), summed, with the factors of the kernels that have the
same loop: SMs share all tiles evenly, but none is done before the longest chain of slices is. Where that
chain is what counts, the products with the longest ones are cut along K. A product that is not cut has the
bits that `gemm` gives it with ``batch_invariant``.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tilewave.device.spec import DeviceSpec
from tilewave.errors import UsageError
from tilewave.kernels.families import grouped, small_tile
from tilewave.kernels.group_table import (
    ENTRY_BYTES,
    FORM_BYTES,
    INLINE_BYTES,
    GroupTable,
    form_of,
    lay_out,
    table_bytes,
    table_launches,
)
from tilewave.kernels.instances import Access, Instance
from tilewave.planner.gemm.candidates import MAX_BLOCKS
from tilewave.planner.gemm.costs import GemmCosts, costs_for
from tilewave.planner.gemm.estimate import LEAST_SLICES, InstanceModel, Rates, Traffic, Weigher
from tilewave.planner.gemm.options import PlanOptions
from tilewave.planner.gemm.records import FLOAT_BYTES, GemmEstimate
from tilewave.planner.gemm.resources import residency
from tilewave.planner.schedules import PIECE_BOUNDS, ScheduleKind
from tilewave.problem import BATCH_LEVELS, GemmProblem

CACHED_GROUPS = 256
"""Plans of groups that are kept; the least recently used goes first."""

CACHED_PROBLEMS = 4096
"""Groups of more products than this are planned anew each time: a key as long costs what planning does."""

WEIGHED = 512
"""Differing products that the choice of a tile rests on; of more, so many are taken at even distances."""

_MOST_PIECES = PIECE_BOUNDS[ScheduleKind.SPLIT_K][1]
_MOST_SLOTS = 2**31 - 1
_CHAINS = (None, 1.0, 2.0, 4.0, 16.0, 64.0)
"""How long a chain of slices may be before its tile is cut, in terms of what all tiles take when SMs share
them evenly; None: as long as it is."""

_SEARCH_CLOCKS = 2000
"""Assumed: clocks of a block to find a product in the table, about three latencies of global memory."""


@dataclass(frozen=True, slots=True)
class GroupCandidate:
    """A tile as it was weighed for a group, with so many products ``cut``, into up to so many ``pieces``.

    ``rejected`` is None for the choice.
    """

    instance: Instance
    cut: int
    pieces: int
    estimate: GemmEstimate | None
    rejected: str | None

    def __str__(self) -> str:
        cut = f" with {self.cut:,} cut along K, into up to {self.pieces:,}" if self.cut else ""
        return f"{self.instance}{cut}" + (f": {self.rejected}" if self.rejected else "")


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """How a group of products is computed in one launch.

    ``problems`` are those with elements, in the order of the caller, and ``pieces`` what the tiles of each
    are cut into along K. ``table`` is what the kernel goes by, the longest chains of slices first. The launch
    is ``blocks`` blocks of ``instance.threads`` threads, which deal with ``table.items`` tiles and pieces of
    tiles. ``notes`` name all that a user would want to be told.
    """

    problems: tuple[GemmProblem, ...] = field(repr=False)
    device: str
    sms: int
    instance: Instance
    pieces: tuple[int, ...] = field(repr=False)
    table: GroupTable = field(repr=False, compare=False)
    blocks: int
    estimate: GemmEstimate
    considered: tuple[GroupCandidate, ...] = field(compare=False, repr=False)
    notes: tuple[str, ...] = ()
    blocks_per_sm: int = 1

    @property
    def launches(self) -> int:
        """Launches of the kernel that computes: one, or none where there is nothing to compute."""
        return 1 if self.blocks else 0

    @property
    def table_launches(self) -> int:
        """Launches before it that bring the table, 0 where the kernel's argument holds it."""
        return table_launches(self.table.nbytes)

    @property
    def table_workspace_bytes(self) -> int:
        """Bytes of workspace for the table, whole units of 16."""
        return _table_workspace(self.table.nbytes)

    @property
    def partial_bytes(self) -> int:
        """Bytes of workspace for partial sums: a tile a piece."""
        return self.table.slots * self.instance.bm * self.instance.bn * FLOAT_BYTES

    @property
    def ticket_bytes(self) -> int:
        """Bytes of workspace for counters that are 0 before and after every launch."""
        return 2 * 4 * self.table.slots

    @property
    def workspace_bytes(self) -> int:
        """Bytes of global memory beside the operands."""
        return self.partial_bytes + self.ticket_bytes + self.table_workspace_bytes

    @property
    def waves(self) -> int:
        """Rounds of resident blocks on the busiest SM, when blocks are dealt evenly."""
        return -(-self.blocks // (self.sms * self.blocks_per_sm))

    @property
    def rejected(self) -> tuple[GroupCandidate, ...]:
        """The candidates that were turned down, each with its reason."""
        return tuple(candidate for candidate in self.considered if candidate.rejected is not None)

    def noted(self, notes: Sequence[str]) -> GroupPlan:
        """The plan with more notes."""
        return replace(self, notes=(*self.notes, *notes)) if notes else self

    def __str__(self) -> str:
        instance, estimate, count = self.instance, self.estimate, len(self.problems)
        head = f"{count:,} product{'s' if count != 1 else ''} on {self.device} ({self.sms} SMs): "
        if self.blocks == 0:
            return head + "nothing to compute, nothing is launched"
        workspace = f"{self.workspace_bytes:,} bytes" if self.workspace_bytes else "none"
        cut = sum(pieces > 1 for pieces in self.pieces)
        lines = [
            f"{head}{instance} in one launch",
            f"  {self.table.items:,} work items, tiles of {instance.bm} x {instance.bn}"
            + (f" and pieces of tiles, {cut:,} products cut along K" if cut else ""),
            f"  launch {self.blocks:,} blocks of {instance.threads} threads, {self.blocks_per_sm} an SM at "
            f"once, waves {self.waves}, workspace {workspace}",
            f"  predicted {estimate.total:.4g} us, bound by {estimate.limit} (compute "
            f"{estimate.compute:.4g}, memory {estimate.memory:.4g}, combining {estimate.combining:.4g}, "
            f"launch {estimate.launch:.4g})",
        ]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Distinct:
    """A group's differing problems, how many there are of each, and which one each place of the group has."""

    problems: tuple[GemmProblem, ...]
    counts: tuple[int, ...]
    which: tuple[int, ...] = ()

    @classmethod
    def of(cls, problems: Sequence[GemmProblem]) -> Distinct:
        """The differing ones of ``problems``; those that are one object are compared but once."""
        numbers: dict[GemmProblem, int] = {}
        known: dict[int, int] = {}  # by identity
        for problem in problems:
            if id(problem) not in known:
                known[id(problem)] = numbers.setdefault(problem, len(numbers))
        which = tuple(known[id(problem)] for problem in problems)
        counts = Counter(which)
        return cls(tuple(numbers), tuple(counts[one] for one in range(len(numbers))), which)

    def some(self) -> Distinct:
        """At most `WEIGHED` of the differing ones, at even distances."""
        if len(self.problems) <= WEIGHED:
            return self
        taken = [i * len(self.problems) // WEIGHED for i in range(WEIGHED)]
        return Distinct(tuple(self.problems[one] for one in taken), tuple(self.counts[one] for one in taken))

    def cut(self, pieces: Sequence[int]) -> int:
        """Products of the group that are cut, by the pieces of each differing one."""
        return sum(count for count, cut in zip(self.counts, pieces, strict=True) if cut > 1)


@dataclass(frozen=True, slots=True)
class _Weighed:
    """A tile and its cuts, with the pieces of every differing product."""

    instance: Instance
    weighers: tuple[Weigher, ...]
    pieces: tuple[int, ...]
    estimate: GemmEstimate
    slots: int

    @property
    def workspace_bytes(self) -> int:
        return self.slots * (self.instance.bm * self.instance.bn * FLOAT_BYTES + 8)


class GroupPlanner:
    """Plans groups for one GPU; keeps the plans that it made. Threads may share it.

    ``instances`` are the tiles to choose from, all of them by default.
    """

    def __init__(
        self,
        spec: DeviceSpec,
        costs: GemmCosts | None = None,
        instances: Sequence[Instance] | None = None,
    ) -> None:
        self.spec = spec
        self._instances = instances
        self.costs = costs_for(spec.name) if costs is None else costs
        self._models: dict[tuple[str, int], InstanceModel] = {}
        self._plans: OrderedDict[Any, tuple[tuple[GemmProblem, ...], GroupPlan]] = OrderedDict()
        self._lock = threading.Lock()

    def plan(self, problems: Sequence[GemmProblem], options: PlanOptions) -> GroupPlan:
        """The plan of a group. Raises ``UsageError`` for options that no group can keep to."""
        problems = tuple(problems)
        if len(problems) > CACHED_PROBLEMS:
            return self._plan(problems, options)
        # By identity: normalised problems are kept, and hashing so many takes longer than the rest of a call.
        # What is kept with a plan holds them, so that their identities stay their own.
        key = (tuple(map(id, problems)), options)
        with self._lock:
            kept = self._plans.get(key)
            if kept is not None:
                self._plans.move_to_end(key)
                return kept[1]
        plan = self._plan(problems, options)
        with self._lock:
            self._plans[key] = problems, plan
            if len(self._plans) > CACHED_GROUPS:
                self._plans.popitem(last=False)
        return plan

    def _plan(self, given: tuple[GemmProblem, ...], options: PlanOptions) -> GroupPlan:
        check_group_options(options)
        sms = self.spec.sms if options.max_sms is None else min(options.max_sms, self.spec.sms)
        problems = tuple(one for one in given if one.m and one.n and one.batches)
        if not problems:
            return self._nothing(sms)
        group = Distinct.of(problems)
        for problem in group.problems:
            if len(problem.batch) > BATCH_LEVELS:
                raise UsageError(
                    f"a problem may have at most {BATCH_LEVELS} batch axes: launch it repeatedly"
                )
        rates = Rates.of(self.spec, self.costs, sms)
        for_table = _table_workspace(table_bytes(group.problems, len(problems)))
        options = replace(options, workspace_limit=max(0, options.workspace_limit - for_table))
        some = group.some()
        tiles = grouped.instances() if self._instances is None else self._instances
        best, considered = self._best_of(tiles, some, rates, options)
        if some is not group:  # the tile was chosen by some of them; its cuts are by all
            best = self._best_of([best.instance], group, rates, options)[0]
        weighers, pieces, which = best.weighers, best.pieces, group.which
        chains = [weigher.alone(cut) for weigher, cut in zip(weighers, pieces, strict=True)]
        table = lay_out(
            best.instance,
            group.problems,
            which,
            pieces,
            [weigher.band for weigher in weighers],
            sorted(range(len(problems)), key=lambda place: -chains[which[place]]),
        )
        plan = GroupPlan(
            problems=problems,
            device=self.spec.name,
            sms=sms,
            instance=best.instance,
            pieces=tuple(pieces[one] for one in which),
            table=table,
            blocks=min(table.items, MAX_BLOCKS if options.max_sms is None else sms),
            estimate=best.estimate,
            considered=considered,
            blocks_per_sm=self._model(best.instance, 0).resident,
        )
        return replace(plan, notes=tuple(_notes(plan, len(given), options, self.spec)))

    def _nothing(self, sms: int) -> GroupPlan:
        nothing = GemmEstimate(0.0, 0.0, 0.0, 0.0, 0.0)
        return GroupPlan(
            (), self.spec.name, sms, grouped.instances()[0], (), GroupTable(), 0, nothing, (),
            ("no product has elements, so nothing is launched",),
        )  # fmt: skip

    def _best_of(
        self,
        instances: Sequence[Instance],
        group: Distinct,
        rates: Rates,
        options: PlanOptions,
    ) -> tuple[_Weighed, tuple[GroupCandidate, ...]]:
        """The best tile with its cuts, and all that were weighed."""
        found: list[_Weighed] = []
        refused: list[GroupCandidate] = []
        for instance in instances:
            _, why = residency(instance, self.spec)
            if why is not None:
                refused.append(GroupCandidate(instance, 0, 1, None, why))
                continue
            for weighed in self._weighed(instance, group, rates, options):
                if weighed.slots and weighed.workspace_bytes > options.workspace_limit:
                    cut = group.cut(weighed.pieces)
                    reason = (
                        f"a workspace of {weighed.workspace_bytes:,} bytes is more than the limit of "
                        f"{options.workspace_limit:,}"
                    )
                    refused.append(GroupCandidate(instance, cut, max(weighed.pieces), None, reason))
                else:
                    found.append(weighed)
        if not found:
            reasons = "; ".join(map(str, refused[:4]))
            raise UsageError(f"no kernel can compute the group on {self.spec.name} with {options}: {reasons}")
        best = min(found, key=lambda weighed: weighed.estimate.total)
        return best, tuple(refused) + tuple(
            GroupCandidate(
                one.instance,
                group.cut(one.pieces),
                max(one.pieces),
                one.estimate,
                None if one is best else _why_slower(one.estimate, best.estimate),
            )
            for one in found
        )

    def _weighed(
        self, instance: Instance, group: Distinct, rates: Rates, options: PlanOptions
    ) -> Iterator[_Weighed]:
        """A tile without cuts and, where they may help, with those that shorten the longest chains."""
        weighers = tuple(
            Weigher(self._model(instance, grouped.access_bits(one)), one, Traffic.of(one), rates)
            for one in group.problems
        )
        kind, forced = options.wanted
        tiles = [count * one.tiles for count, one in zip(group.counts, weighers, strict=True)]
        even = sum(count * one.on_a_full_sm() for count, one in zip(tiles, weighers, strict=True)) / rates.sms
        seen = set()
        for chain in _CHAINS:
            if chain is None:
                if kind is ScheduleKind.SPLIT_K:
                    continue
                pieces = (1,) * len(weighers)
            elif kind is ScheduleKind.DATA_PARALLEL or options.batch_invariant:
                continue
            else:
                pieces = tuple(_pieces(one, chain * even, forced, kind) for one in weighers)
            if pieces in seen:
                continue
            seen.add(pieces)
            slots = sum(count * cut for count, cut in zip(tiles, pieces, strict=True) if cut > 1)
            if slots <= _MOST_SLOTS:
                estimate = self._estimate(group, weighers, pieces, slots, rates)
                yield _Weighed(instance, weighers, pieces, estimate, slots)

    def _estimate(
        self,
        group: Distinct,
        weighers: Sequence[Weigher],
        pieces: Sequence[int],
        slots: int,
        rates: Rates,
    ) -> GemmEstimate:
        busy = longest = memory = through_l2 = 0.0
        items = 0
        search = _SEARCH_CLOCKS / self.spec.clock_mhz
        for count, weigher, cut in zip(group.counts, weighers, pieces, strict=True):
            tiles = count * weigher.tiles
            busy += tiles * weigher.on_a_full_sm(cut)
            longest = max(longest, weigher.alone(cut))
            memory += count * weigher.memory
            through_l2 += tiles * weigher.through_l2
            items += tiles * cut
        memory = max(memory, through_l2 / rates.sms)
        model = weighers[0].model
        rounds = items / (rates.sms * model.resident)
        # Blocks that share the SM hide each other's starts, but one after the other they take a place each.
        compute = max(busy / rates.sms, longest) + search + max(0.0, rounds - 1) * (model.round + search)
        launch = rates.launch * (1 + table_launches(table_bytes(group.problems, sum(group.counts))))
        combining = 0.0
        if slots:
            combining = rates.combining + 2 * slots * weighers[0].tile_bytes / rates.partials
        together = max(compute, memory) + rates.overlap * min(compute, memory)
        return GemmEstimate(launch + together + combining, compute, memory, combining, launch)

    def _model(self, instance: Instance, bits: int) -> InstanceModel:
        """What an instance costs with these accesses, worked out once."""
        model = self._models.get((instance.name, bits))
        if model is None:
            a, b = grouped.accesses(bits)
            model = InstanceModel.of(replace(instance, a=a, b=b), self.spec, self._costs_of(instance, a, b))
            self._models[instance.name, bits] = model
        return model

    def _costs_of(self, instance: Instance, a: Access, b: Access) -> GemmCosts:
        """The constants; for a kernel that nobody measured with the factors of one with the same loop."""
        if instance.name in self.costs.factors:
            return self.costs
        kin = next(one.name for one in small_tile.instances() if one.sequential and (one.a, one.b) == (a, b))
        return replace(
            self.costs,
            factors={instance.name: self.costs.factors.get(kin, 1.0)},
            tile_factors={instance.name: self.costs.tile_factors.get(kin, 1.0)},
        )


def _pieces(weigher: Weigher, chain: float, forced: int | None, kind: ScheduleKind | None) -> int:
    """Pieces of a product's tiles that leave no chain of slices much longer than ``chain`` microseconds."""
    most = max(1, min(_MOST_PIECES, weigher.slices // LEAST_SLICES))
    if forced is not None:
        return min(most, forced)
    wanted = -(-weigher.alone() // chain) if chain > 0 else most
    return min(most, max(int(wanted), 2 if kind is ScheduleKind.SPLIT_K else 1))


def check_group_options(options: PlanOptions) -> None:
    """Raise ``UsageError`` for a schedule that no group can keep to."""
    kind = options.wanted[0]
    if kind not in (None, ScheduleKind.DATA_PARALLEL, ScheduleKind.SPLIT_K):
        raise UsageError(
            f"schedule {options.schedule!s} deals one product's tiles; accepted for a group are None, "
            "'data_parallel' and 'split_k', with a number of pieces behind a colon if wanted"
        )


def _why_slower(estimate: GemmEstimate, best: GemmEstimate) -> str:
    return (
        f"predicted {estimate.total:.4g} us, {estimate.total / best.total:.3f} times the choice, bound by "
        f"{estimate.limit}"
    )


def _notes(plan: GroupPlan, given: int, options: PlanOptions, spec: DeviceSpec) -> Iterator[str]:
    if given > len(plan.problems):
        yield f"products without elements, which take no part: {given - len(plan.problems):,}"
    if plan.table_launches:
        yield (
            f"the table of {plan.table.nbytes:,} bytes is longer than the {INLINE_BYTES:,} that the launch's "
            f"own argument holds: {plan.table_launches:,} launches before it bring it"
        )
    if options.max_sms is not None:
        yield (
            f"max_sms {options.max_sms}: {plan.blocks} blocks are launched, so no more than so many of "
            f"{spec.sms} SMs are in use"
        )
    elif plan.blocks < plan.table.items:
        yield f"{plan.blocks:,} blocks, as many as a launch can have, deal with {plan.table.items:,} tiles"


def _table_workspace(nbytes: int) -> int:
    return -(-nbytes // 16) * 16 if table_launches(nbytes) else 0


def portions(problems: Sequence[GemmProblem], limit: int) -> list[tuple[int, int]]:
    """The parts, from and to, that a group falls into so that no launch's table needs more workspace than
    ``limit`` bytes. Nearly always one; a table that fits a launch's argument needs none."""
    most = max(limit // 16 * 16, INLINE_BYTES)
    if (ENTRY_BYTES + FORM_BYTES) * len(problems) <= most:
        return [(0, len(problems))] if problems else []
    parts, begin, used = [], 0, 0
    forms: set[Any] = set()
    seen: set[GemmProblem] = set()
    for place, problem in enumerate(problems):
        needed = ENTRY_BYTES
        if problem not in seen:
            seen.add(problem)
            form = form_of(problem)
            needed += FORM_BYTES * (form not in forms)
            forms.add(form)
        if used + needed > most and place > begin:
            parts.append((begin, place))
            begin, used, seen, forms = place, ENTRY_BYTES + FORM_BYTES, {problem}, {form_of(problem)}
        else:
            used += needed
    return [*parts, (begin, len(problems))] if problems else []


_planners: OrderedDict[str, GroupPlanner] = OrderedDict()
_planners_lock = threading.Lock()
_CACHED_PLANNERS = 64


def plan_group(problems: Sequence[GemmProblem], spec: DeviceSpec, options: PlanOptions) -> GroupPlan:
    """How a group of products is computed on a GPU in one launch: the tile of the least predicted time.

    ``problems`` are normalised (`normalise`). Pure and deterministic. Raises ``UsageError`` for options that
    no group can keep to.
    """
    with _planners_lock:
        planner = _planners.get(spec.name)
        if planner is None or planner.spec != spec:
            planner = _planners[spec.name] = GroupPlanner(spec)
            while len(_planners) > _CACHED_PLANNERS:
                _planners.popitem(last=False)
    return planner.plan(problems, options)
