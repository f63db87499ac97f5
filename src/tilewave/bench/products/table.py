"""A run as tables for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tilewave.bench.products.records import BenchRun, Result
from tilewave.bench.products.verdicts import outcome, ratio_interval

WIDE = 120
"""Columns of a terminal from which on kernels have a column of their own."""

LONGEST_KERNEL = 34
"""Characters of the longest name of a kernel."""

BASELINES = ("torch", "cupy", "cublaslt")
"""Contenders to compare ours with, the first that took part."""


def pair(run: BenchRun) -> tuple[str | None, str | None]:
    """Ours and the baseline that ratios compare: the first contender of ours, the first library."""
    ours = next((one for one in run.contenders if one.partition(":")[0] == "ours"), None)
    baseline = next((one for one in BASELINES if one in run.contenders), None)
    if baseline is None:  # only ours: each later one is compared with the first
        others = [one for one in run.contenders if one != ours]
        return (others[0], ours) if others else (ours, None)
    return ours, baseline


def ratios(run: BenchRun) -> dict[str, tuple[Result, float]]:
    """By product: how many times as fast as the baseline ours ran, where both readings count."""
    ours, baseline = pair(run)
    found = {}
    for result in run.results:
        one, other = result.reading(ours or ""), result.reading(baseline or "")
        if one is not None and other is not None:
            found[result.product.name] = (result, ratio_interval(one, other).middle)
    return found


def print_run(run: BenchRun, console: Console) -> None:
    """All results, what was rejected and flagged, and the means."""
    ours, baseline = pair(run)
    wide = console.width >= WIDE
    table = Table(title=_title(run), title_justify="left", caption_justify="left")
    if not wide:
        table.box, table.pad_edge, table.padding = SIMPLE_HEAD, False, (0, 1, 0, 0)
    table.add_column("")
    if wide:
        table.add_column("product", overflow="fold")
    else:
        table.add_column("product, kernel, schedule", overflow="fold", min_width=LONGEST_KERNEL)
    for word in run.contenders:
        table.add_column(f"{word}, us", justify="right")
    if baseline is not None:
        gap = " " if wide else "\n"
        table.add_column(f"{ours}{gap}against{gap}{baseline}", justify="right")
    table.add_column("of the roofline" if wide else "of the\nroof", justify="right")
    if wide:
        table.add_column("host us", justify="right")
        table.add_column("kernel and schedule", overflow="fold")
    for result in run.results:
        table.add_row(*_cells(run, result, ours, baseline, wide))
    console.print(table)
    if not wide:
        console.print(f"A terminal of {WIDE} columns or more shows the time of the host too.")
    for line in summary(run):
        console.print(line, markup=False, soft_wrap=True)


def _cells(
    run: BenchRun, result: Result, ours: str | None, baseline: str | None, wide: bool
) -> Iterator[str]:
    mine, other = result.reading(ours or ""), result.reading(baseline or "")
    yield escape(result.product.name) + ("*" if result.flags else "")
    plan = "" if mine is None or mine.plan is None else mine.plan
    kernel, _, schedule = plan.partition(" ")
    yield str(result.product) if wide or not plan else f"{result.product}\n{kernel}\n{schedule}".rstrip()
    for word in run.contenders:
        reading = result.reading(word)
        gap = " " if wide else "\n"
        spread = "" if reading is None else f"±{reading.spread / 2:.1%}"
        yield "rejected" if reading is None else f"{reading.microseconds:.1f}{gap}{spread}"
    if baseline is not None:
        if mine is None or other is None:
            yield ""
        else:
            told = " tie" if outcome(mine, other) == "tie" else ""
            yield f"{ratio_interval(mine, other).middle:.3f}{told}"
    ideal = result.ideal_us(run.peak_tflops, run.bandwidth_gb_s)
    yield "" if mine is None else f"{ideal / mine.microseconds:.0%}"
    if wide:
        yield " / ".join(f"{one.host_us:.1f}" for one in result.readings if one.host_us is not None)
        yield plan


def _title(run: BenchRun) -> str:
    names = ", ".join(f"{word}: {name}" for word, name in run.names.items())
    return escape(f"{run.device}, {run.mode} operands; {names}")


def summary(run: BenchRun) -> Iterator[str]:
    """Means, flags, rejections and notes, a line each."""
    ours, baseline = pair(run)
    found = [ratio for _, ratio in ratios(run).values()]
    if found:
        yield (
            f"{len(found)} products: {ours} is {statistics.geometric_mean(found):.3f} times as fast as "
            f"{baseline} in the geometric mean, least {min(found):.3f}, most {max(found):.3f}"
        )
    for result in run.results:
        for reading in result.readings:
            if reading.rejected is not None:
                yield f"{result.product.name}: {reading.contender} rejected: {reading.rejected}"
    flagged = [(result.product.name, flag) for result in run.results for flag in result.flags]
    for name, flag in flagged:
        yield f"* {name}: {flag}"
    yield from run.notes
