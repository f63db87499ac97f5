"""What the command `tilewave accuracy` does."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tilewave.bench.accuracy.records import AccuracyRun, Point, load_accuracy
from tilewave.errors import MeasurementError, UsageError

DATA = "normal,uniform"
LENGTHS = "16,64,256,1024,4096,16384"
SIZE = 64
LONGEST = 1 << 20


def accuracy_command(
    files: Sequence[Path],
    *,
    data: str | None,
    lengths: str | None,
    size: int,
    contenders: str | None,
    seed: int | None,
    budget: float | None,
    path: Path | None,
    picture: Path | None,
    saved: Path | None,
    markdown: bool,
) -> None:
    """Measure errors on standard data or on the arrays in ``files``, or show a run that was made."""
    console = Console(highlight=False)
    failures: list[str] = []
    if saved is not None:
        if files or data is not None or lengths is not None or contenders is not None:
            raise UsageError(
                "--from shows a run that was made: arrays, --data, --k and --contenders do not go"
            )
        run = load_accuracy(saved)
    else:
        run, failures = _measured(files, data, lengths, size, contenders, seed, budget, path)
    if markdown:
        console.out(markdown_of(run))
    else:
        _print(run, console)
    if picture is not None:
        from tilewave.bench.accuracy.picture import draw_accuracy

        draw_accuracy(run, picture)
        console.print(f"The picture is in {picture}.", markup=False)
    if path is not None and saved is None:
        console.print(f"The results are in {path}.", markup=False)
    if failures:
        raise MeasurementError("; ".join(failures))


def _measured(
    files: Sequence[Path],
    data: str | None,
    lengths: str | None,
    size: int,
    contenders: str | None,
    seed: int | None,
    budget: float | None,
    path: Path | None,
) -> tuple[AccuracyRun, list[str]]:
    """The run, and in words which contenders failed."""
    if size < 1:
        raise UsageError(f"size {size}: 1 or more is accepted")
    if seed is not None and seed < 0:
        raise UsageError(f"seed {seed}: 0 or more is accepted")
    if budget is not None and not budget > 0:
        raise UsageError(f"budget {budget:g}: a positive number of seconds is accepted")
    if files and data is not None:
        raise UsageError("either arrays or --data is accepted, not both")
    seed = secrets.randbits(32) if seed is None else seed
    chosen_lengths = None if lengths is None else _lengths(lengths)

    from tilewave.bench.accuracy.contenders import models, on_gpu
    from tilewave.bench.accuracy.measure import (
        Source,
        lengths_up_to,
        load_operands,
        measure,
        prefixes,
        sampled,
        standard,
    )
    from tilewave.bench.environment import Environment
    from tilewave.precision.data_sets import DATA_SETS
    from tilewave.runtime.driver import Device

    sources: dict[str, Source] = {}
    m = n = size
    if files:
        whole = load_operands(files)
        a, b = sampled(*whole, size, size, seed)
        m, n = a.shape[0], b.shape[1]
        sources[" and ".join(file.name for file in files)] = prefixes(a, b)
        k = a.shape[1]
        chosen_lengths = lengths_up_to(k) if chosen_lengths is None else chosen_lengths
        if max(chosen_lengths) > k:
            raise UsageError(f"--k asks for {max(chosen_lengths)}; these arrays have K = {k}")
    else:
        for name in (data or DATA).split(","):
            if name not in DATA_SETS:
                raise UsageError(f"there is no data set {name!r}; accepted are {', '.join(DATA_SETS)}")
            sources[name] = standard(name, seed, size, size)
        chosen_lengths = chosen_lengths or _lengths(LENGTHS)
    gpu, notes = on_gpu()
    known = models() | gpu
    if contenders is not None:
        words = contenders.split(",")
        for word in words:
            if word not in known:
                raise UsageError(f"there is no contender {word!r} here; accepted are {', '.join(known)}")
        known = {word: known[word] for word in words}
    run = AccuracyRun(
        m,
        n,
        seed,
        {key: contender.name for key, contender in known.items()},
        Environment.capture(device=Device() if any(key in gpu for key in known) else None).to_json(),
        tuple(notes),
    )
    failed: dict[str, str] = {}
    for point in measure(sources, chosen_lengths, known, budget=budget, failures=failed):
        run = replace(run, points=(*run.points, point))
        if path is not None:  # a run that is cut off has left what there was
            run.write(path)
    failures = [f"{key} failed and was left out from there on: {why}" for key, why in failed.items()]
    notes += failures
    wanted = len(set(chosen_lengths)) * len(sources) * len(known)
    if len(run.points) < wanted and not failures:
        notes.append(f"{wanted - len(run.points)} of {wanted} points did not fit into the budget")
    run = replace(run, notes=tuple(notes))
    if path is not None:
        run.write(path)
    return run, failures


def _lengths(text: str) -> list[int]:
    found = []
    for word in text.split(","):
        if not word.strip().isdecimal() or not 1 <= int(word) <= LONGEST:
            raise UsageError(f"k {word!r}: whole numbers from 1 to {LONGEST:,} are accepted")
        found.append(int(word))
    return sorted(set(found))


def _print(run: AccuracyRun, console: Console) -> None:
    for note in run.notes:
        console.print(f"Note: {note}.", markup=False)
    for name in run.data:
        header, rows = table_of(run, name)
        table = Table(title=f"{name}: relative error of {run.m} x {run.n} products", title_justify="left")
        for word in header:
            table.add_column(word, justify="right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for key, label in run.contenders.items():
        shares = [point.in_bounds for point in run.points if point.contender == key]
        worst = max((share for share in shares if share is not None), default=None)
        told = "" if worst is None else f"; its largest error is {worst:.2g} of its mode's bound"
        console.print(f"{key}: {label}{told}", markup=False)


def table_of(run: AccuracyRun, name: str) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a data set's table: relative errors, and the share that fp16x3 recomputes."""
    points = [point for point in run.points if point.data == name]
    recomputed = any(point.recomputed for point in points)
    rows = []
    for k in sorted({point.k for point in points}):
        row = {point.contender: point for point in points if point.k == k}
        cells = [f"{k:,}", *(_cell(row.get(key)) for key in run.contenders)]
        if recomputed:
            cells.append(f"{max(point.recomputed for point in row.values()):.0%}")
        rows.append(cells)
    return ["K", *run.contenders, *(["recomputed"] if recomputed else [])], rows


def markdown_of(run: AccuracyRun, data: Sequence[str] | None = None) -> str:
    """The tables of these data sets, or of all, in Markdown."""
    parts = []
    for name in run.data if data is None else data:
        header, rows = table_of(run, name)
        lines = [f"{name}:", "", f"| {' | '.join(header)} |", f"|{'---:|' * len(header)}"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cell(point: Point | None) -> str:
    if point is None:
        return "-"
    if point.relative is None:
        return "overflow"
    return f"{point.relative:.1e}"
