"""A power run for people: a table of contenders, the verdicts, and what slowed the clock."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tilewave.lab.power.records import PowerRun, Summary


def print_run(run: PowerRun, console: Console) -> None:
    """Show a run."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"N = {run.size}", overflow="fold")
    table.add_column("data", overflow="fold")
    for heading in headings_of(run):
        table.add_column(heading, justify="right", overflow="fold")
    for summary in run.summaries:
        table.add_row(run.names[summary.contender], summary.data, *cells_of(run, summary))
    console.print(table)
    for verdict in run.verdicts:
        console.print(verdict.words, markup=False)
    for line in facts(run):
        console.print(line, markup=False)
    for note in run.notes:
        console.print(f"Note: {note}.", style="yellow", markup=False)


def _compared(run: PowerRun) -> bool:
    return any(summary.between_runs is not None for summary in run.summaries)


def headings_of(run: PowerRun) -> list[str]:
    """What `cells_of` holds; the spread between runs only if the run was compared with another."""
    between = ["between runs"] if _compared(run) else []
    return ["TFLOP/s", "spread", *between, "of the loop", "W", "J a call", "SM MHz", "°C", "throttled"]


def cells_of(run: PowerRun, summary: Summary) -> list[str]:
    """The figures of one contender on one kind of data, under `headings_of` the run."""
    peak = run.measured_peak_tflops
    throttled = max(summary.throttled.values(), default=0.0)
    between = "-" if summary.between_runs is None else f"{summary.between_runs:.2%}"
    return [
        f"{summary.tflops:.2f}",
        f"{summary.spread:.2%}",
        *([between] if _compared(run) else []),
        "-" if peak is None else f"{summary.tflops / peak:.1%}",
        _whole(summary.median_w),
        "-" if summary.joules_per_call is None else f"{summary.joules_per_call:.2f}",
        _whole(summary.sm_clock_mhz),
        _whole(summary.temperature_c),
        "-" if summary.sm_clock_mhz is None else f"{throttled:.0%}",
    ]


def facts(run: PowerRun) -> list[str]:
    """What else the run says, in sentences."""
    lines = []
    peak = run.measured_peak_tflops
    if peak is not None:
        lines.append(
            f"Multiply-adds on registers alone reach {peak:.1f} TFLOP/s, {peak / run.peak_tflops:.1%} of the "
            f"{run.peak_tflops:.1f} that the clock allows."
        )
    if not _compared(run):
        lines.append(
            "This is one run: what varies from run to run is not in its spreads (--compare adds one)."
        )
    clocks = [s.sm_clock_mhz for s in run.samples if s.contender and s.sm_clock_mhz is not None]
    watts = [s.power_w for s in run.samples if s.contender and s.power_w is not None]
    if clocks and watts:
        limit = "" if run.power_limit_w is None else f" (limit {run.power_limit_w:.0f} W)"
        lines.append(
            f"Over {run.repeats[-1].end_s - run.repeats[0].start_s:.0f} s the SM clock was between "
            f"{min(clocks):.0f} and {max(clocks):.0f} MHz, the power between {min(watts):.0f} and "
            f"{max(watts):.0f} W{limit}; {run.telemetry}."
        )
    else:
        lines.append(f"Clocks and power are not known: {run.telemetry}.")
    return lines


def markdown(run: PowerRun) -> str:
    """The run as a Markdown table and a list of its sentences."""
    headings = headings_of(run)
    rows = [["contender", "data", *headings], ["---", "---", *["---:"] * len(headings)]]
    rows += [[run.names[s.contender], s.data, *cells_of(run, s)] for s in run.summaries]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    said = [
        *(verdict.words for verdict in run.verdicts),
        *facts(run),
        *(f"{n[0].upper()}{n[1:]}." for n in run.notes),
    ]
    return "\n".join([*lines, "", *(f"* {line}" for line in said)]) + "\n"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
