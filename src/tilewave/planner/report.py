"""A plan printed for a person: the table behind ``tilewave plan``."""

from __future__ import annotations

import json
from collections.abc import Callable

from rich.console import Console

from tilewave.device import DeviceSpec, get_spec, query_device, spec_names
from tilewave.errors import TilewaveError, UsageError
from tilewave.planner.cost import ARTICLE_COSTS, CostModel
from tilewave.planner.records import Candidate, Plan, Problem
from tilewave.planner.select import FAMILIES, THREE_KERNELS, WITH_STREAM_K, plan


def print_plan(chosen: Plan, console: Console, *, costs: CostModel = ARTICLE_COSTS) -> None:
    """Print ``chosen``: what each candidate would give the busiest SM, the choice, the others and why not."""
    problem = chosen.problem
    say = _Printer(console)
    say(f"{problem} on {chosen.device}, {chosen.sms} SMs; candidates: {FAMILIES[chosen.family].about}")
    say(f"cost constants: {costs.name}, measured on {costs.gpu}{_calibration_note(chosen, costs)}")
    say("the busiest SM's work (bare, combine, cost: millions of multiply-adds):")
    _print_candidates(chosen, say)
    for tie in chosen.bare_work_ties():
        assert tie[0].estimate is not None
        names = "; ".join(_label(candidate) for candidate in tie)
        say(f"tie of bare work, {_mega(tie[0].estimate.bare_work)} M multiply-adds each: {names}")
    estimate, launch, tile = chosen.estimate, chosen.launch, chosen.tile
    say(f"choice: {chosen.variant} {chosen.schedule} ({chosen.variant.about})")
    batch = "" if problem.batch == 1 else f" x {problem.batch} products"
    say(
        f"  tiles {chosen.raster.tiles_m} x {chosen.raster.tiles_n}{batch} of {tile}, "
        f"slices a tile {chosen.cut.slices}; {tile.threads} threads, {tile.tm}x{tile.tn} outputs a thread"
    )
    say(f"  launch {launch}")
    if chosen.cut.blocks == 0:
        say("  nothing to compute: C has no elements")
        return
    say(f"  waves {estimate.waves}; SMs idle in the last wave {estimate.idle_sms} of {chosen.sms}")
    say(
        f"  busiest SM {estimate.slices} slices: {_mega(estimate.bare_work)} M multiply-adds, "
        f"{_mega(estimate.cost)} M with the variant's cost and combining"
    )
    say(f"  useful share of all SMs' time {_useful_share(chosen):.1%}")
    say(f"  predicted {estimate.microseconds:.4g} us (arithmetic only: no memory or launch time)")


def print_three_kernels(problem: Problem, spec: DeviceSpec, console: Console) -> None:
    """Print what the article's selector among three kernels would choose, beside a plan of another family."""
    chosen = plan(problem, spec, family=THREE_KERNELS)
    reasons = "; ".join(str(candidate) for candidate in chosen.rejected)
    say = _Printer(console)
    say(f"among the three kernels, without stream-K: {chosen.variant} {chosen.schedule}")
    say(f"  turned down: {reasons}")


def plan_command(
    m: int,
    n: int,
    k: int,
    *,
    device: str | None = None,
    batch: int = 1,
    family: str = WITH_STREAM_K.name,
    as_json: bool = False,
    console: Console | None = None,
) -> Plan:
    """Plan an m x n x k product on a GPU known by name, or on the one here, print it, and return it.

    Raises ``UsageError`` for negative sizes, an unknown device or family, or when no device is named and none
    is here.
    """
    if family not in FAMILIES:
        raise UsageError(f"unknown family {family!r}; known families: {', '.join(FAMILIES)}")
    problem = Problem(m, n, k, batch)
    spec = _gpu_here() if device is None else get_spec(device)
    chosen = plan(problem, spec, family=FAMILIES[family])
    console = console or Console(highlight=False)
    if as_json:
        console.print_json(json.dumps(chosen.to_dict()))
        return chosen
    print_plan(chosen, console)
    if family != THREE_KERNELS.name:
        print_three_kernels(problem, spec, console)
    return chosen


class _Printer:
    """Prints a line of plain text, without rich's markup and without breaking it."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _gpu_here() -> DeviceSpec:
    try:
        return query_device()
    except TilewaveError as error:
        raise UsageError(
            f"no usable GPU here to plan for ({error}); name one with --device: {', '.join(spec_names())}"
        ) from error


_HEADINGS = ("candidate", "tiles", "blocks", "waves", "idle", "slices", "bare", "combine", "cost", "of least")


def _print_candidates(chosen: Plan, say: Callable[[str], None]) -> None:
    """A line a candidate, then a line for each reason why some cannot run.

    Own columns, because a table squeezed to the terminal's width would cut figures off.
    """
    rows: list[tuple[str, ...]] = [_HEADINGS]
    unable: dict[str, list[str]] = {}
    for candidate in chosen.considered:
        cut, estimate = candidate.cut, candidate.estimate
        if cut is None or estimate is None:
            unable.setdefault(candidate.rejected or "", []).append(_label(candidate))
            continue
        verdict = "chosen" if candidate.rejected is None else _ratio(estimate.cost, chosen.estimate.cost)
        counts = (cut.tiles, cut.blocks, estimate.waves, estimate.idle_sms, estimate.slices)
        work = (estimate.bare_work, estimate.combining, estimate.cost)
        rows.append((_label(candidate), *map(str, counts), *map(_mega, work), verdict))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for label, *cells in rows:
        aligned = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        say("  ".join((label.ljust(widths[0]), *aligned)))
    for reason, names in unable.items():
        say(f"cannot run, {reason}: {'; '.join(names)}")


def _ratio(cost: float, least: float) -> str:
    return f"{cost / least:.3f}" if least else "equal"


def _label(candidate: Candidate) -> str:
    return f"{candidate.variant} {candidate.schedule}"


def _mega(multiply_adds: float) -> str:
    """Millions with enough digits to tell near candidates apart."""
    return f"{multiply_adds / 1e6:.1f}"


def _useful_share(chosen: Plan) -> float:
    """The product's own multiply-adds over what all SMs could do, bare, while the busiest works."""
    available = chosen.estimate.bare_work * chosen.sms
    return chosen.problem.multiply_adds / available if available else 1.0


def _calibration_note(chosen: Plan, costs: CostModel) -> str:
    return "" if chosen.device == costs.gpu else f"; not calibrated for {chosen.device}"
