"""A profile for people: a table for each rung, cuBLAS in its last column, and where columns disagree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.table import Table

from tilewave.lab.judge import CLOSE
from tilewave.lab.profile.records import (
    COLUMNS,
    CUBLAS,
    EMULATOR,
    FIGURES,
    HARDWARE,
    PREDICTION,
    KernelProfile,
    LibraryKernel,
    Profile,
    Reading,
)
from tilewave.lab.truth import rung_limits

COUNTED_ALIKE = (
    "registers",
    "blocks_per_sm",
    "thread_fma",
    "shared_loads",
    "shared_load_passes",
    "shared_load_conflicts",
    "shared_stores",
    "shared_store_passes",
    "shared_store_conflicts",
    "global_load_sectors",
    "global_store_sectors",
    "copies",
)
"""Figures that emulator and hardware count alike: others are of PTX here and of machine code there."""

EXACT = ("registers", "blocks_per_sm")
"""Those of them that are no counters: `tilewave.lab.truth.rung_limits` has no say in them."""

LARGEST_STALLS = 5


def columns_of(profile: Profile, kernel: KernelProfile) -> dict[str, Reading]:
    """A rung's readings by column, the library's main kernel among them."""
    readings = dict(kernel.readings)
    main = main_kernel(profile)
    if main is not None:
        readings[CUBLAS] = main.reading
    return {column: readings[column] for column in COLUMNS if column in readings}


def main_kernel(profile: Profile) -> LibraryKernel | None:
    """The library's kernel that took the longest; None if nothing is known of any."""
    kernels = profile.library
    return max(kernels, key=lambda kernel: kernel.reading.figures.get("milliseconds", 0.0), default=None)


def rows_of(columns: Mapping[str, Reading]) -> Iterator[tuple[str, list[str]]]:
    """The figures that any column knows and that are not 0 everywhere, with a cell for each column.

    A cell is marked with (!) if it differs from the prediction by more than `CLOSE`; the hardware's not if it
    lies within what is known to differ from the emulator, whose figure is as predicted.
    """
    explained = limits_of(columns[EMULATOR]) if EMULATOR in columns else {}
    for figure, name in FIGURES.items():
        values = {column: reading.figures.get(figure) for column, reading in columns.items()}
        if not any(values.values()):
            continue
        predicted = values.get(PREDICTION)
        off = {
            column: predicted is not None and value is not None and not close(value, predicted)
            for column, value in values.items()
            if column in (EMULATOR, HARDWARE)
        }
        read = values.get(HARDWARE)
        if not off.get(EMULATOR) and figure in explained and read is not None:
            least, most = explained[figure]
            off[HARDWARE] = off[HARDWARE] and not least <= read <= most
        cells = [
            amount(figure, value) + (" (!)" if off.get(column) else "") for column, value in values.items()
        ]
        yield name, cells


def limits_of(emulated: Reading) -> dict[str, tuple[int, int]]:
    """For each figure that the hardware counts alike, the least and the most that the emulator's allow."""
    counts = {name: int(value) for name, value in emulated.figures.items()}
    if not {"copies", "copy_sectors", "global_load_sectors"} <= counts.keys():
        return {}
    counts["global_load_sectors"] -= counts["copy_sectors"]
    counts |= {"copy_conflicts": 0, "copy_hit_conflicts": 0}  # no column holds them
    limits = rung_limits(counts, spills=counts.get("spill_store_bytes", 0) > 0)
    limits |= {name: (counts[name], counts[name]) for name in EXACT if name in counts}
    return {name: limits[name] for name in COUNTED_ALIKE if name in limits}


def stalls_of(columns: Mapping[str, Reading]) -> Iterator[tuple[str, list[str]]]:
    """The reasons for which warps wait, the most common ones of any column, with their shares."""
    known = {column: reading.stalls for column, reading in columns.items() if reading.stalls}
    reasons = {reason for stalls in known.values() for reason in stalls}
    largest = sorted(reasons, key=lambda reason: -max(stalls.get(reason, 0.0) for stalls in known.values()))
    for reason in largest[:LARGEST_STALLS]:
        cells = [
            f"{known[column][reason]:.0%}" if reason in known.get(column, {}) else "-" for column in columns
        ]
        yield f"waits: {reason.replace('_', ' ')}", cells


def close(found: float, wanted: float) -> bool:
    """Whether a figure is as good as another."""
    return abs(found - wanted) <= CLOSE * abs(wanted)


def amount(figure: str, value: float | None) -> str:
    """A figure for people."""
    if value is None:
        return "-"
    if figure == "milliseconds":
        return f"{value:.4f}"
    if figure == "fma_share":
        return f"{value:.1%}"
    if figure in ("tflops", "passes_per_read", "passes_per_write"):
        return f"{value:.2f}"
    if figure.endswith("_percent"):
        return f"{value:.1f}"
    return f"{value:,.0f}"


def disagreements(profile: Profile) -> list[str]:
    """Where the hardware counted something that the emulator's figures do not allow."""
    lines = []
    for kernel in profile.kernels:
        if EMULATOR not in kernel.readings or HARDWARE not in kernel.readings:
            continue
        mine, theirs = kernel.readings[EMULATOR].figures, kernel.readings[HARDWARE].figures
        for figure, (least, most) in limits_of(kernel.readings[EMULATOR]).items():
            read = theirs.get(figure)
            if read is None or least <= read <= most:
                continue
            difference = f" ({(read - mine[figure]) / mine[figure]:+.2%})" if mine[figure] else ""
            lines.append(
                f"{kernel.title}: {FIGURES[figure]}: {amount(figure, mine[figure])} in the emulator, "
                f"{amount(figure, read)} on the GPU{difference}"
            )
    return lines


def idle_loads(profile: Profile) -> bool:
    """Whether the profiler counted shared reads that the assembler put in front of copies."""
    for kernel in profile.kernels:
        if EMULATOR in kernel.readings and HARDWARE in kernel.readings:
            mine, theirs = kernel.readings[EMULATOR].figures, kernel.readings[HARDWARE].figures
            if mine.get("copies") and theirs.get("shared_loads", 0) > mine.get("shared_loads", 0):
                return True
    return False


def print_profile(profile: Profile, console: Console) -> None:
    """Show a profile."""
    for kernel in profile.kernels:
        columns = columns_of(profile, kernel)
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column(f"{kernel.title}, N = {profile.size}")
        for column in columns:
            table.add_column(column, justify="right")
        for name, cells in (*rows_of(columns), *stalls_of(columns)):
            table.add_row(name, *cells)
        console.print(table)
        console.print()
    for line in sentences(profile):
        console.print(line, markup=False)
    for note in profile.notes:
        console.print(f"Note: {note}.", style="yellow", markup=False)


def sentences(profile: Profile) -> list[str]:
    """What the tables do not hold: the library's kernels, and disagreements."""
    lines = []
    for kernel in profile.library:
        if kernel.kernel:
            lines.append(f"cuBLAS chose {kernel.kernel}: {kernel.derivation}.")
    if idle_loads(profile):
        lines.append(
            "In front of copies the assembler puts shared reads of no lane, which the GPU counts "
            "(docs/truth-table.md)."
        )
    differing = disagreements(profile)
    lines += [f"Emulator and GPU differ: {line}." for line in differing]
    if profile.profiler and not differing:
        lines.append("Emulator and GPU agree in all that both count, within what docs/truth-table.md allows.")
    return lines


OVERVIEW = (
    "tflops",
    "registers",
    "outputs_per_thread",
    "shared_loads",
    "shared_load_passes",
    "passes_per_read",
    "shared_load_conflicts",
    "fma_share",
    "fma_pipe_percent",
    "issue_percent",
)
"""The figures that tell rungs and the library apart, for a table of all of them."""


def markdown(profile: Profile) -> str:
    """The profile as one Markdown table, a column for each rung and the library, and its sentences.

    A cell holds what the hardware said, or else the emulator; where another column differs, that follows.
    """
    main = main_kernel(profile)
    columns: dict[str, dict[str, Reading]] = {
        kernel.title: dict(kernel.readings) for kernel in profile.kernels
    }
    if main is not None:
        columns["cuBLAS"] = {HARDWARE: main.reading}
    rows = [[f"N = {profile.size}", *columns], ["---", *["---:"] * len(columns)]]
    for figure in OVERVIEW:
        cells = [_overview_cell(figure, readings) for readings in columns.values()]
        if any(cell != "-" for cell in cells):
            rows.append([FIGURES[figure], *cells])
    told = {name: readings.get(HARDWARE, Reading()) for name, readings in columns.items()}
    rows += [[name, *cells] for name, cells in stalls_of(told)]
    said = [*sentences(profile), *(f"{note[0].upper()}{note[1:]}." for note in profile.notes)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([table, "", *(f"* {line}" for line in said)]) + "\n"


def _overview_cell(figure: str, readings: Mapping[str, Reading]) -> str:
    known = {
        column: readings[column].figures[figure]
        for column in (HARDWARE, EMULATOR, PREDICTION)
        if column in readings and figure in readings[column].figures
    }
    if not known:
        return "-"
    first, *others = known.items()
    alike = figure in COUNTED_ALIKE or figure == "passes_per_read"
    differing = [
        f"{column} {amount(figure, value)}"
        for column, value in others
        if alike and not close(value, first[1])
    ]
    return amount(figure, first[1]) + (f" ({', '.join(differing)})" if differing else "")
