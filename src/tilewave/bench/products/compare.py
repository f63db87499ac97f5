"""What changed from one run to another, beyond what varies anyway."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tilewave.bench.products.records import BenchRun, Reading, Result
from tilewave.bench.products.table import BASELINES, pair
from tilewave.bench.products.verdicts import Interval, median_interval, ratio_interval
from tilewave.errors import UsageError

LEAST_CHANGE = 0.02
"""Changes below this share are never reported: two runs of one program on one GPU differ by as much."""
_TOLD = ("commit", "compiler", "driver", "packages")


@dataclass(frozen=True)
class Change:
    """One contender on one product: ``ratio`` is how many times as fast it is in the second run."""

    product: str
    contender: str
    before: Interval
    after: Interval
    ratio: float
    noise: float
    measure: str

    @property
    def beyond_noise(self) -> bool:
        """Whether the change is larger than the noise, and the intervals of both runs lie apart."""
        apart = self.before.high < self.after.low or self.after.high < self.before.low
        return apart and abs(math.log(self.ratio)) > self.noise


@dataclass(frozen=True)
class Comparison:
    """All that two runs say of each other. ``only_before`` and ``only_after`` name products of one run."""

    changes: tuple[Change, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    notes: tuple[str, ...]


def compare_runs(before: BenchRun, after: BenchRun) -> Comparison:
    """Compare contenders of the same word on the same products.

    Where both runs have the same baseline (same library, same version), ours is compared by its ratio to it,
    so that a faster or slower GPU cancels; else by its time. The noise is at least `LEAST_CHANGE` and at
    least what the unchanged baseline itself moved by on that product. Raises ``UsageError`` for runs on
    different GPUs or in different modes.
    """
    for what, one, other in (("GPUs", before.device, after.device), ("modes", before.mode, after.mode)):
        if one != other:
            raise UsageError(f"the runs are of different {what}, {one} and {other}; accepted are two of one")
    _, baseline = pair(before)
    steady = baseline in BASELINES and before.names.get(baseline or "") == after.names.get(baseline or "")
    changes: list[Change] = []
    seen: set[int] = set()
    only_before: list[str] = []
    for result in before.results:
        other_result = after.find(result.product)
        if other_result is None:
            only_before.append(result.product.name)
            continue
        seen.add(id(other_result))
        changes += _changes(before, result, other_result, baseline if steady else None)
    only_after = [one.product.name for one in after.results if id(one) not in seen]
    notes = [
        f"{what} differs: {before.environment.get(what)} before, {after.environment.get(what)} after"
        for what in _TOLD
        if before.environment.get(what) != after.environment.get(what)
    ]
    if not steady:
        notes.append("no baseline of the same version in both: times are compared as they are")
    return Comparison(tuple(changes), tuple(only_before), tuple(only_after), tuple(notes))


def _changes(before: BenchRun, one: Result, other: Result, baseline: str | None) -> list[Change]:
    first, second = one.reading(baseline or ""), other.reading(baseline or "")
    moved = 0.0
    if first is not None and second is not None:
        moved = abs(math.log(first.microseconds / second.microseconds))
    found = []
    for word in before.contenders:
        old, new = one.reading(word), other.reading(word)
        if old is None or new is None:
            continue
        if first is not None and second is not None and word != baseline:
            intervals = ratio_interval(old, first), ratio_interval(new, second)
            measure = f"speed in units of {baseline}"
        else:
            intervals = _speed(old), _speed(new)
            measure = "products a second"
        ratio = intervals[1].middle / intervals[0].middle
        noise = max(LEAST_CHANGE, 0.0 if word == baseline else moved)
        found.append(Change(one.product.name, word, *intervals, ratio, noise, measure))
    return found


def _speed(reading: Reading) -> Interval:
    return median_interval([1e6 / time for time in reading.rounds_us])


def print_comparison(found: Comparison, console: Console) -> None:
    """What became faster and slower, what else there is, and what may explain it."""
    changed = sorted((one for one in found.changes if one.beyond_noise), key=lambda one: one.ratio)
    if changed:
        table = Table(title="Changed beyond the noise", title_justify="left")
        for name in ("product", "contender", "measure"):
            table.add_column(name)
        for name in ("before", "after", "times as fast", "noise"):
            table.add_column(name, justify="right")
        for one in changed:
            table.add_row(
                escape(one.product),
                escape(one.contender),
                one.measure,
                f"{one.before.middle:.4g}",
                f"{one.after.middle:.4g}",
                f"{one.ratio:.3f}",
                f"{one.noise:.1%}",
            )
        console.print(table)
    unchanged = len(found.changes) - len(changed)
    console.print(f"{len(changed)} of {len(found.changes)} readings changed, {unchanged} did not.")
    for word in dict.fromkeys(one.contender for one in found.changes):
        mine = [one.ratio for one in found.changes if one.contender == word]
        console.print(
            f"{word}: {statistics.geometric_mean(mine):.3f} times as fast in the geometric mean of "
            f"{len(mine)} products.",
            markup=False,
        )
    for what, names in (("before", found.only_before), ("after", found.only_after)):
        if names:
            console.print(f"Only {what}: {', '.join(names)}.", markup=False, soft_wrap=True)
    for note in found.notes:
        console.print(f"{note[0].upper()}{note[1:]}.", markup=False, soft_wrap=True)
