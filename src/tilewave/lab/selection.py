"""The selector against the best of what it may choose: 40 products, every variant timed, and its choice.

Rungs 22 and 23 choose by an estimate whose constants come from one GPU. Here every kernel that they may
launch is timed at every shape, interleaved with them and with cuBLAS, so that a wrong choice shows as time
lost.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewave.compiler import Program, compile_source
from tilewave.device import DeviceSpec
from tilewave.errors import MeasurementError, UsageError
from tilewave.lab.ladder import row_key
from tilewave.lab.launches import Shape, launch_of
from tilewave.lab.records import write_json
from tilewave.lab.registry import Rung, get_rung
from tilewave.lab.workers import Budget, run_tasks
from tilewave.planner import FAMILIES, LARGE, SMALL, Candidate, Plan, Problem, Schedule, Variant, plan
from tilewave.planner.schedules import ScheduleKind

if TYPE_CHECKING:
    from tilewave.lab.measure import MeasuredSize

FORMAT = 1
VARIANTS = (15, 17, 18, 21)
"""The rungs that the selectors may choose: 128x256, 128x128, 128x128 split-K three ways, 128x256 stream-K."""
SELECTORS = {22: (15, 17, 18), 23: VARIANTS}
"""The selecting rungs, and what each may choose."""
CONTENDERS = (*VARIANTS, *SELECTORS)


@dataclass(frozen=True)
class Place:
    """One product of the suite: C (m x n) = A (m x k) B (k x n), and the kind that it was drawn as."""

    kind: str
    m: int
    n: int
    k: int

    @property
    def shape(self) -> Shape:
        """M, N, K."""
        return self.m, self.n, self.k

    @property
    def wide(self) -> bool:
        """Whether rows of A and B are whole 16-byte pieces, so that the kernels for wide loads run."""
        return self.n % 4 == 0 and self.k % 4 == 0


_ARTICLE = tuple(Place("article", n, n, n) for n in (1024, 1025, 2048, 2049, 4096))
_LEAST_FLOPS, _MOST_FLOPS = 1e9, 2e11  # from 20 us to 5 ms at 40 TFLOP/s

# Kind, how many, whether wide loads fit, whether square, and the ranges of M, N and K, drawn evenly on a
# logarithmic scale.
_DRAWN = (
    ("square", 7, True, True, (512, 4608), (512, 4608), (512, 4608)),
    ("ragged square", 7, False, True, (512, 4608), (512, 4608), (512, 4608)),
    ("rectangle", 7, True, False, (256, 8192), (256, 8192), (256, 8192)),
    ("ragged rectangle", 6, False, False, (256, 8192), (256, 8192), (256, 8192)),
    ("deep", 2, True, False, (128, 768), (128, 768), (4096, 32768)),
    ("ragged deep", 2, False, False, (128, 768), (128, 768), (4096, 32768)),
    ("flat", 2, True, False, (1024, 8192), (1024, 8192), (64, 256)),
    ("ragged flat", 2, False, False, (1024, 8192), (1024, 8192), (64, 256)),
)


def draw_places(seed: int) -> tuple[Place, ...]:
    """The 40 products of a seed: the article's five sizes and 35 drawn ones, in random order."""
    rng = np.random.default_rng(seed)
    places = list(_ARTICLE)
    for kind, number, wide, square, *ranges in _DRAWN:
        wanted = len(places) + number
        while len(places) < wanted:
            m, n, k = (round(math.exp(rng.uniform(math.log(low), math.log(high)))) for low, high in ranges)
            if square:
                m, n, k = n, n, n
            if wide:
                n, k = n // 4 * 4, k // 4 * 4
                m = n if square else m
            place = Place(kind, m, n, k)
            fits = place.wide == wide and _LEAST_FLOPS <= 2.0 * m * n * k <= _MOST_FLOPS
            if fits and place.shape not in {other.shape for other in places}:
                places.append(place)
    return tuple(places[index] for index in rng.permutation(len(places)))


def rung_of(variant: Variant, schedule: Schedule) -> int:
    """The rung that runs a candidate of the selectors' families by itself."""
    if schedule.kind is ScheduleKind.STREAM_K:
        return 21
    if schedule.kind is ScheduleKind.SPLIT_K:
        return 18
    if variant not in (LARGE, SMALL):
        raise UsageError(f"no rung that a selector may choose runs {variant} {schedule} (no cp.async?)")
    return 15 if variant is LARGE else 17


def planned(selector: int, place: Place, spec: DeviceSpec) -> Plan:
    """What a selecting rung's rule says of a product on ``spec``."""
    schedule = get_rung(selector).schedule
    assert schedule is not None
    return plan(Problem(*place.shape), spec, family=FAMILIES[schedule.family or ""])


def choice(selector: int, place: Place, spec: DeviceSpec) -> dict[str, Any]:
    """A selector's choice, and its estimate of every rung that it weighed, as plain values.

    Of stream-K with two, three and four pieces the cheapest stands for rung 21. ``cost`` is relative to the
    choice's; without one, ``rejected`` says why the rung could not, or need not, run.
    """
    found = planned(selector, place, spec)
    weighed: dict[int, Candidate] = {}
    for candidate in found.considered:
        rung = rung_of(candidate.variant, candidate.schedule)
        if rung not in weighed or _cost(candidate) < _cost(weighed[rung]):
            weighed[rung] = candidate
    return {
        "rung": rung_of(found.variant, found.schedule),
        "plan": f"{found.variant} {found.schedule}",
        "weighed": {
            str(rung): {
                "schedule": str(candidate.schedule),
                "cost": None if candidate.estimate is None else _cost(candidate) / found.estimate.cost,
                "waves": None if candidate.estimate is None else candidate.estimate.waves,
                "idle_sms": None if candidate.estimate is None else candidate.estimate.idle_sms,
                "rejected": candidate.rejected,
            }
            for rung, candidate in sorted(weighed.items())
        },
    }


def _cost(candidate: Candidate) -> float:
    return math.inf if candidate.estimate is None else candidate.estimate.cost


def compile_rung(task: tuple[int, str]) -> Program:
    """Compile a rung for an architecture. Runs in worker processes, which never touch a GPU."""
    number, arch = task
    rung = get_rung(number)
    return compile_source(rung.source(), rung.entries, arch)


def compile_contenders(arch: str, jobs: int, budget: Budget) -> dict[int, Program]:
    """All contenders by rung number; raises ``UsageError`` if the budget does not suffice for that."""
    tasks = [(number, arch) for number in CONTENDERS]
    programs = {task[0]: program for task, program in run_tasks(compile_rung, tasks, jobs, budget)}
    if missing := [number for number in CONTENDERS if number not in programs]:
        names = ", ".join(map(str, missing))
        raise UsageError(f"the budget was used up before rungs {names} were compiled: give more seconds")
    return programs


Measure = Callable[[Shape, Sequence[Rung], "float | None"], "MeasuredSize"]
"""Checks and times rungs at a shape within so many seconds."""


class Selection:
    """The suite's results: a JSON file, written after every product and taken up again by a later call."""

    def __init__(
        self,
        path: Path | None,
        spec: DeviceSpec,
        arch: str,
        baseline: str,
        seed: int,
        environment: Any = None,
    ) -> None:
        """Open ``path``, or start anew with ``seed``; a file keeps the products that its own seed drew."""
        self._path, self._spec, self._arch, self._baseline = path, spec, arch, baseline
        self.data: dict[str, Any] = {"format": FORMAT, "device": spec.name, "seed": seed, "sessions": []}
        self.data |= {"places": [asdict(place) for place in draw_places(seed)], "rows": []}
        if path is not None and path.exists() and path.stat().st_size:
            held = json.loads(path.read_text(encoding="utf-8"))
            if (held.get("format"), held.get("device")) != (FORMAT, spec.name):
                raise UsageError(
                    f"{path} holds format {held.get('format')} of {held.get('device')}, this is format "
                    f"{FORMAT} of {spec.name}: give another file"
                )
            self.data = held
        self.places = tuple(Place(**place) for place in self.data["places"])
        self._session = len(self.data["sessions"])
        self.data["sessions"].append(environment)
        keys = {place.shape: self._key(place) for place in self.places}
        self.data["rows"] = [row for row in self.data["rows"] if row["key"] == keys[_shape(row)]]

    def left(self) -> list[Place]:
        """The products without a row, in their order."""
        done = {_shape(row) for row in self.data["rows"]}
        return [place for place in self.places if place.shape not in done]

    def run(self, measure: Measure, budget: Budget, tell: Callable[[str], None]) -> bool:
        """Measure what is left within the budget; True if all products have a row now.

        The time is shared out evenly. No product starts that is expected to outlast the budget.
        """
        longest = 0.0
        todo = self.left()
        for index, place in enumerate(todo):
            before = budget.left
            if before <= longest:
                break
            share = before / (len(todo) - index)
            rungs = [get_rung(number) for number in CONTENDERS]
            found = measure(place.shape, rungs, None if math.isinf(share) else share)
            row = self._row(place, found)
            self.data["rows"].append(row)
            self.save()
            longest = max(longest, before - budget.left)
            tell(f"{len(self.data['rows']):2} of {len(self.places)}: {in_words(row)}")
        self.save()
        return not self.left()

    def save(self) -> None:
        """Write the file."""
        if self._path is not None:
            write_json(self.data, self._path)

    def _row(self, place: Place, found: MeasuredSize) -> dict[str, Any]:
        wrong = [number for number, measured in found.rungs.items() if not measured.check.holds]
        if wrong:
            raise MeasurementError(
                f"rungs {', '.join(map(str, wrong))} are WRONG at {' x '.join(map(str, place.shape))}: "
                "a choice among wrong kernels says nothing"
            )
        return {
            **asdict(place),
            "key": self._key(place),
            "session": self._session,
            "baseline": None if found.baseline is None else asdict(found.baseline),
            "rungs": {str(number): asdict(measured) for number, measured in found.rungs.items()},
            "choices": {str(number): choice(number, place, self._spec) for number in SELECTORS},
            "before": asdict(found.before),
            "after": asdict(found.after),
            "graphs": found.graphs,
        }

    def _key(self, place: Place) -> str:
        """A digest of what a row hangs on: kernels, compiler, GPU, library, and what each rung launches."""
        parts = []
        for number in CONTENDERS:
            rung = get_rung(number)
            launch = launch_of(rung, *place.shape, self._spec)
            parts += [row_key(rung, self._arch, self._spec.name, True, self._baseline), launch.entry]
            parts += [str(launch.grid), str(launch.integers)]
        parts += [str(choice(number, place, self._spec)["plan"]) for number in SELECTORS]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _shape(row: Mapping[str, Any]) -> Shape:
    return row["m"], row["n"], row["k"]


def times_as_slow(row: Mapping[str, Any], one: int | str, other: int | str) -> float:
    """How many times as long rung ``one`` takes as ``other``: median of the ratios round by round."""
    ours, theirs = (row["rungs"][str(number)]["speed"]["milliseconds"] for number in (one, other))
    return float(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)))


def best_of(row: Mapping[str, Any], rungs: Sequence[int]) -> int:
    """The fastest of these rungs at a row's product, by the medians."""
    return min(
        rungs, key=lambda number: statistics.median(row["rungs"][str(number)]["speed"]["milliseconds"])
    )


@dataclass(frozen=True)
class Verdict:
    """One selector at one product.

    ``chosen`` and ``best`` are rungs among those that it may choose; ``loss`` is how many times as long the
    chosen rung takes as the best one, ``own_loss`` the same for the selecting rung's own kernel.
    ``expected`` is the estimate's cost of the best rung relative to the choice; None if it was ruled out,
    with the reason in ``ruled_out``.
    """

    selector: int
    place: Place
    chosen: int
    best: int
    loss: float
    own_loss: float
    expected: float | None
    ruled_out: str | None


def verdicts(data: Mapping[str, Any], selector: int) -> Iterator[Verdict]:
    """How a selector did at every product that has been measured, in the order of the rows."""
    for row in data["rows"]:
        decided = row["choices"][str(selector)]
        best = best_of(row, SELECTORS[selector])
        weighed = decided["weighed"][str(best)]
        yield Verdict(
            selector,
            Place(row["kind"], *_shape(row)),
            decided["rung"],
            best,
            times_as_slow(row, decided["rung"], best),
            times_as_slow(row, selector, best),
            weighed["cost"],
            weighed["rejected"] if weighed["cost"] is None else None,
        )


def losses_if(data: Mapping[str, Any], spec: DeviceSpec, combining: float, lone: float) -> list[float]:
    """What rung 23's choices would have cost under another estimate, product by product.

    ``combining`` multiplies the allowance for combining. ``lone`` is the time of a small tile alone on an SM
    relative to two that share one; the planner's estimate, which adds up work, takes it to be a half.
    """
    losses = []
    for row in data["rows"]:
        costs: dict[int, float] = {}
        for candidate in planned(23, Place(row["kind"], *_shape(row)), spec).considered:
            if candidate.estimate is None or candidate.cut is None:
                continue
            work = candidate.estimate.work
            if candidate.variant is SMALL:
                blocks = -(-candidate.cut.blocks // spec.sms)
                work *= (blocks - blocks % 2 + blocks % 2 * 2 * lone) / blocks
            cost = work + combining * candidate.estimate.combining
            rung = rung_of(candidate.variant, candidate.schedule)
            costs[rung] = min(cost, costs.get(rung, math.inf))
        chosen = min(costs, key=lambda rung: costs[rung])
        losses.append(times_as_slow(row, chosen, best_of(row, VARIANTS)))
    return losses


def in_words(row: Mapping[str, Any]) -> str:
    """One product in a line: its choice, the best, what the difference costs."""
    parts = []
    for selector in SELECTORS:
        found = next(verdicts({"rows": [row]}, selector))
        parts.append(f"rung {selector} takes {found.chosen}, best is {found.best}: x {found.loss:.3f}")
    return f"{row['m']} x {row['n']} x {row['k']} ({row['kind']}): {'; '.join(parts)}"


def summary(data: Mapping[str, Any]) -> list[str]:
    """A few lines on each selector: how often it was right, and what its choices cost."""
    lines = []
    for selector in SELECTORS:
        found = list(verdicts(data, selector))
        if not found:
            return ["nothing has been measured yet"]
        losses = [verdict.loss for verdict in found]
        worst = max(found, key=lambda verdict: verdict.loss)
        lines.append(
            f"rung {selector} at {len(found)} of {len(data['places'])} products: "
            f"{sum(verdict.chosen == verdict.best for verdict in found)} times the best, "
            f"{sum(loss <= 1.02 for loss in losses)} times within 2 % of it; on average (geometric mean) "
            f"x {statistics.geometric_mean(losses):.3f} of its time, at worst x {worst.loss:.3f} at "
            f"{' x '.join(map(str, worst.place.shape))} (took {worst.chosen}, best {worst.best})"
        )
    return lines
