"""What a run amounts to: medians and spreads, and one contender against another in words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewave.errors import UsageError
from tilewave.lab.power.records import (
    CUBLAS,
    OURS,
    RANDOM,
    ZEROS,
    PowerRun,
    Repeat,
    Sample,
    Summary,
    Verdict,
)


def judged(run: PowerRun, earlier: Sequence[PowerRun] = ()) -> PowerRun:
    """The run with its summaries, verdicts and notes on throttling made anew.

    ``earlier`` runs of the same contenders tell how much figures vary between runs; ``UsageError`` says which
    of them cannot be compared, and why.
    """
    for other in earlier:
        check_comparable(identity_of(run), other)
    summaries = tuple(summaries_of(run.repeats, earlier))
    compared = replace(run, summaries=summaries)
    keys = {(summary.contender, summary.data) for summary in summaries}
    pairs = [((OURS, data), (CUBLAS, data)) for data in (RANDOM, ZEROS)]
    pairs += [((contender, ZEROS), (contender, RANDOM)) for contender in (OURS, CUBLAS)]
    verdicts = tuple(verdict(compared, one, other) for one, other in pairs if {one, other} <= keys)
    return replace(compared, verdicts=verdicts)


def identity(device: str, size: int, rung: int, cublas: str | None) -> dict[str, object]:
    """What two runs must have in common to be compared."""
    return {"GPU": device, "N": size, "rung": rung, "cuBLAS": cublas or "none"}


def identity_of(run: PowerRun) -> dict[str, object]:
    """`identity` of a run."""
    return identity(run.device, run.size, run.rung, run.names.get(CUBLAS))


def check_comparable(mine: Mapping[str, object], other: PowerRun) -> None:
    """Refuse an earlier run of other contenders, another size or another GPU than `identity` says."""
    for what, theirs in identity_of(other).items():
        if mine[what] != theirs:
            raise UsageError(
                f"these runs cannot be compared: {what} is {mine[what]} here and {theirs} in the earlier one"
            )


def summaries_of(repeats: Sequence[Repeat], earlier: Sequence[PowerRun] = ()) -> list[Summary]:
    """One summary for each contender and kind of data, in the order of their first repeats."""
    found = []
    for contender, data in dict.fromkeys((repeat.contender, repeat.data) for repeat in repeats):
        mine = [repeat for repeat in repeats if (repeat.contender, repeat.data) == (contender, data)]
        median = statistics.median(repeat.tflops for repeat in mine)
        runs = [other.summary(contender, data) for other in earlier]
        others = [summary.tflops for summary in runs if summary is not None]
        reasons = sorted({reason for repeat in mine for reason in repeat.throttled})
        found.append(
            Summary(
                contender=contender,
                data=data,
                repeats=len(mine),
                tflops=median,
                spread=spread_of([repeat.tflops for repeat in mine]),
                between_runs=spread_of([median, *others]) if others else None,
                median_w=_median([repeat.median_w for repeat in mine]),
                joules_per_call=_median([repeat.joules_per_call for repeat in mine]),
                sm_clock_mhz=_median([repeat.sm_clock_mhz for repeat in mine]),
                temperature_c=_median([repeat.temperature_c for repeat in mine]),
                throttled={
                    reason: statistics.fmean(repeat.throttled.get(reason, 0.0) for repeat in mine)
                    for reason in reasons
                },
            )
        )
    return found


def spread_of(rates: Sequence[float]) -> float:
    """(Largest - smallest) / median; 0 for a single rate."""
    return (max(rates) - min(rates)) / statistics.median(rates)


def verdict(run: PowerRun, one: tuple[str, str], other: tuple[str, str]) -> Verdict:
    """``one`` (contender, data) against ``other`` in the run's summaries and repeats.

    The difference is held against the largest spread that either shows, within the run or between runs. It is
    parity if it is no larger, seen from the faster one: so the verdict does not depend on who is asked about.
    """
    ratio = paired_ratio(run.repeats_of(*one), run.repeats_of(*other))
    spreads = {"from repeat to repeat": 0.0, "between runs": 0.0}
    for summary in (run.summary(*one), run.summary(*other)):
        if summary is None:
            raise UsageError(f"the run has no repeats of {' on '.join(one)} or {' on '.join(other)}")
        spreads["from repeat to repeat"] = max(spreads["from repeat to repeat"], summary.spread)
        spreads["between runs"] = max(spreads["between runs"], summary.between_runs or 0.0)
    where = max(spreads, key=lambda name: spreads[name])
    spread = spreads[where]
    difference = abs(ratio - 1)
    level = 1 - min(ratio, 1 / ratio) <= spread
    outcome = "parity" if level else "ahead" if ratio > 1 else "behind"
    times = difference / spread if spread else None
    return Verdict(
        *one,
        *other,
        ratio,
        spread,
        outcome,
        times,
        _words(run.names, one, other, ratio, outcome, spread, where),
    )


def paired_ratio(ones: Sequence[Repeat], others: Sequence[Repeat]) -> float:
    """The median over the rounds of one's rate over the other's in the same round, so that drift cancels."""
    rates = {repeat.round: repeat.tflops for repeat in others}
    ratios = [repeat.tflops / rates[repeat.round] for repeat in ones if repeat.round in rates]
    if not ratios:
        raise UsageError("these contenders have no round in common")
    # The median of logarithms: exchanging the two gives exactly the inverse, for an even number too.
    return math.exp(statistics.median(map(math.log, ratios)))


def _words(
    names: Mapping[str, str],
    one: tuple[str, str],
    other: tuple[str, str],
    ratio: float,
    outcome: str,
    spread: float,
    where: str,
) -> str:
    if one[0] == other[0]:
        subject, reference, data = f"{names[one[0]]} on {one[1]}", f"{other[1]} data", ""
    else:
        subject, reference, data = names[one[0]], names[other[0]], f" on {one[1]}"
        data += " data" if one[1] == RANDOM else ""
    difference = abs(ratio - 1)
    if outcome == "parity":
        return (
            f"Parity: {subject} differs from {reference}{data} by {_percent(difference)}, no more than the "
            f"spread {where} of {_percent(spread)}."
        )
    side = "ahead of" if outcome == "ahead" else "behind"
    if not spread:
        return f"{subject} is {side} {reference}{data} by {_percent(difference)}; no two repeats differed."
    times = difference / spread
    amount = f"{times:.0f}" if times >= 9.95 else f"{times:.1f}"
    return (
        f"{subject} is {side} {reference}{data} by {_percent(difference)}, {amount} times the spread {where} "
        f"of {_percent(spread)}."
    )


def _percent(share: float) -> str:
    """A share for people, with two digits that count."""
    percent = 100 * share
    if percent < 0.01:
        return "less than 0.01 %"
    return f"{percent:.{1 if percent >= 1 else 2 if percent >= 0.1 else 3}f} %"


def throttle_notes(names: Mapping[str, str], samples: Sequence[Sample]) -> list[str]:
    """For each reason that slowed the clock: how often it was seen, and under what."""
    busy = [sample for sample in samples if sample.contender]
    notes = []
    for reason in sorted({reason for sample in busy for reason in sample.throttling}):
        with_it = [sample for sample in busy if reason in sample.throttling]
        shares = []
        for contender, data in dict.fromkeys((sample.contender, sample.data) for sample in with_it):
            of = [sample for sample in busy if (sample.contender, sample.data) == (contender, data)]
            hit = sum(reason in sample.throttling for sample in of)
            shares.append(f"{hit / len(of):.0%} of {names[contender]} on {data}".replace("%", " %"))
        notes.append(f"throttled ({reason}) in {len(with_it)} of {len(busy)} samples: {', '.join(shares)}")
    return notes


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
