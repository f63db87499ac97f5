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

    A cell that differs from the prediction by more than `CLOSE` is marked with (!).
    """
    for figure, name in FIGURES.items():
        values = {column: reading.figures.get(figure) for column, reading in columns.items()}
        if not any(values.values()):
            continue
        predicted = values.get(PREDICTION)
        cells = []
        for column, value in values.items():
            off = (
                column in (EMULATOR, HARDWARE)
                and predicted is not None
                and value is not None
                and not close(value, predicted)
            )
            cells.append(amount(figure, value) + (" (!)" if off else ""))
        yield name, cells


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
    """Where emulator and hardware differ in what both count alike."""
    lines = []
    for kernel in profile.kernels:
        mine, theirs = (
            kernel.readings[column].figures if column in kernel.readings else {}
            for column in (EMULATOR, HARDWARE)
        )
        for figure in COUNTED_ALIKE:
            if figure in mine and figure in theirs and not close(mine[figure], theirs[figure]):
                lines.append(
                    f"{kernel.title}: {FIGURES[figure]}: {amount(figure, mine[figure])} in the emulator, "
                    f"{amount(figure, theirs[figure])} on the GPU"
                )
    return lines


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
    differing = disagreements(profile)
    lines += [f"Emulator and GPU differ: {line}." for line in differing]
    if profile.profiler and not differing:
        lines.append("Emulator and GPU agree in all that both count.")
    return lines


def markdown(profile: Profile) -> str:
    """The profile as Markdown: a table for each rung, then the sentences."""
    parts = []
    for kernel in profile.kernels:
        columns = columns_of(profile, kernel)
        rows = [[f"{kernel.title}, N = {profile.size}", *columns], ["---", *["---:"] * len(columns)]]
        rows += [[name, *cells] for name, cells in (*rows_of(columns), *stalls_of(columns))]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    said = [*sentences(profile), *(f"{note[0].upper()}{note[1:]}." for note in profile.notes)]
    parts.append("\n".join(f"* {line}" for line in said))
    return "\n\n".join(part for part in parts if part) + "\n"
