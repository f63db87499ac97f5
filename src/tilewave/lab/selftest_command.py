"""What the command `tilewave selftest` does and prints."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from tilewave.bench.environment import Environment
from tilewave.compiler import compiler_version
from tilewave.device import get_spec, query_device
from tilewave.errors import UsageError
from tilewave.lab import options
from tilewave.lab.command import DEFAULT_EMULATED, progress_bar
from tilewave.lab.records import write_json
from tilewave.lab.registry import load_rungs
from tilewave.lab.selftest import GpuRunner, Outcome, Runner, Selftest, run_selftest
from tilewave.lab.selftest_library import GpuSamples, LibraryOutcome, Task, run_library
from tilewave.lab.selftest_loops import NEW_LOOPS, run_loops
from tilewave.lab.workers import Budget
from tilewave.runtime.driver import Device, probe

BUDGET_S = 60.0
LARGEST_SEED = 2**63 - 1
SOME_LOOPS = 4
"""New loops that are tested beside the rungs, for which time must be left: one takes about a second."""
SHOWN_PER_RUNG = 3
"""Failures of one rung that the report spells out; the JSON file has all of them."""


def selftest_command(
    *,
    rungs: str | None,
    library: bool,
    device: str | None,
    emulate: bool,
    seed: int | None,
    budget: float | None,
    path: Path | None,
    jobs: int | None,
) -> None:
    """Test every kernel, say what to report if something differs, and fail then.

    ``library``: the library's kernels and no rungs, unless those are named too; rungs named: them alone.
    """
    budget = options.check_budget(budget) or BUDGET_S
    workers = options.check_jobs(jobs)
    if seed is not None and not 0 <= seed <= LARGEST_SEED:
        raise UsageError(f"seed {seed}: whole numbers from 0 to {LARGEST_SEED} are accepted")
    known = {rung.number: rung for rung in load_rungs()}
    numbers = () if library else known
    chosen = [known[number] for number in (numbers if rungs is None else options.parse_numbers(rungs, known))]
    # An unknown name is refused on any machine.
    spec = get_spec(DEFAULT_EMULATED if device is None else device)
    if path is not None:
        options.check_writable(path)
    seed = secrets.randbits(32) if seed is None else seed
    found = probe()
    asked = emulate or device is not None
    gpu: Device | None = None
    runner: Runner | None = None
    if asked or not found.usable:
        why = "As asked" if asked else f"No GPU was found ({found.reason})"
        notice = f"{why}: the kernels run in the emulator, compiled for {spec.name} ({spec.arch})."
    else:
        gpu, spec = Device(), query_device()
        runner = GpuRunner(gpu, spec)
        notice = f"The kernels run on {spec.name} ({spec.arch})."
    console = Console(highlight=False, markup=False)
    console.print(f"{notice} The data comes from seed {seed}.", style="bold", soft_wrap=True)
    environment = Environment.capture(
        device=gpu,
        compiler=compiler_version(),
        gpu_details={"sms": spec.sms, "clock_mhz": spec.clock_mhz, "arch": spec.arch} if gpu else None,
    )
    allowed = Budget(budget)
    outcomes: list[LibraryOutcome] = []
    left_out: list[Task] = []
    loops_left_out: list[str] = []
    loop_notes: list[str] = []
    with progress_bar() as progress:
        if library or rungs is None:
            samples = None if gpu is None else GpuSamples(gpu)
            outcomes, left_out = run_library(
                spec, seed=seed, gpu=samples, budget=allowed, jobs=workers, progress=progress
            )
            loops, loops_left_out, loop_notes = run_loops(
                spec,
                seed=seed,
                gpu=gpu,
                budget=allowed,
                progress=progress,
                most=None if library else SOME_LOOPS,
            )
            outcomes += loops
        result = run_selftest(
            chosen, spec, seed=seed, gpu=runner, budget_s=allowed.left, jobs=workers, progress=progress
        )
    result.library, result.library_not_run = outcomes, [*map(str, left_out), *loops_left_out]
    result.notes += loop_notes
    result.seconds = round(budget - allowed.left, 1)
    for line in (*library_lines(result), *rung_lines(result)):
        console.print(line, soft_wrap=True)
    for note in result.notes:
        console.print(f"Note: {note}.", style="yellow", soft_wrap=True)
    console.print(verdict(result), style="bold green" if result.passed else "bold red", soft_wrap=True)
    if result.failures or result.library_failures:
        # Not through the console: what is pasted must not be wrapped to the width of this terminal.
        typer.echo("\n" + report(result, environment.to_json()), nl=False)
    if path is not None:
        write_json({"environment": environment.to_json(), **result.to_json()}, path)
        console.print(f"Results are in {path}.")
    if not result.passed:
        sys.exit(1)


def library_lines(result: Selftest) -> Iterator[str]:
    """A line for each family of the library's kernels."""
    for family, group in groupby(result.library, key=lambda outcome: outcome.family):
        outcomes = list(group)
        errors = [outcome.error_in_bounds for outcome in outcomes if outcome.error_in_bounds is not None]
        failed = sum(bool(outcome.findings) for outcome in outcomes)
        compared = not failed and all(outcome.compared_bits for outcome in outcomes)
        state = f"WRONG in {failed} of them" if failed else "right"
        if family == NEW_LOOPS:
            bits = "" if failed else ", bits as by the compiler's loops"
            yield f"{family:<20} {'':>11}  {_count(len(outcomes), 'kernel'):>9}, {state}{bits}"
            continue
        yield (
            f"{family:<20} {_count(len(outcomes), 'product'):>11}, {'':>9}  "
            f"worst error {max(errors, default=float('nan')):8.3g} bounds: {state}"
            f"{', bits as in the emulator' if compared else ''}"
        )


def rung_lines(result: Selftest) -> Iterator[str]:
    """A line for each rung: how much was run, how large the errors were, whether it is right."""
    for _, group in groupby(result.outcomes, key=lambda outcome: outcome.rung):
        outcomes = list(group)
        first = outcomes[0]
        kernels = len({outcome.kernel for outcome in outcomes})
        errors = [outcome.error_in_bounds for outcome in outcomes if outcome.error_in_bounds is not None]
        failed = sum(bool(outcome.findings) for outcome in outcomes)
        bits = ", bits as in the emulator" if first.rung in result.compared_bits and not failed else ""
        state = f"WRONG in {failed} of them" if failed else f"right{bits}"
        yield (
            f"{first.title:<20} {_count(len(outcomes), 'product'):>11}, {_count(kernels, 'kernel'):>9}, "
            f"worst error {max(errors, default=float('nan')):8.3g} bounds: {state}"
        )


def verdict(result: Selftest) -> str:
    """One sentence that says it all."""
    where = f"the emulator of {result.device}" if result.emulated else result.device
    tested = len(result.rungs) - len(result.not_run)
    parts = []
    if result.library_failures:
        names = sorted({outcome.kernel for outcome in result.library_failures})
        parts.append(f"WRONG on {where}: the library's {', '.join(names)}")
    if result.failures:
        wrong = sorted({outcome.rung for outcome in result.failures})
        parts.append(f"WRONG on {where}: rungs {_numbers(wrong)}")
    elif not result.library_failures:
        ours = f"{_count(len(result.library), 'product')} of the library, " if result.library else ""
        products = _count(len(result.outcomes), "product")
        of_rungs = f"{_count(tested, 'rung')} and {products}" if tested or not ours else ""
        parts.append(f"{(ours + of_rungs).removesuffix(', ')} are right on {where}")
    if result.library_not_run:
        parts.append(f"NOT RUN: {len(result.library_not_run)} of the library's (give a larger --budget)")
    if result.not_run:
        parts.append(f"NOT RUN: rungs {_numbers(result.not_run)} (give a larger --budget, or --rungs)")
    return f"{'; '.join(parts)}. {result.seconds:.1f} s."


def report(result: Selftest, environment: Mapping[str, Any]) -> str:
    """What a user pastes where problems are reported: the environment, and each failure with a command."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    where = f"emulator of {result.device}" if result.emulated else result.device
    driver, cuda = (environment[key] or "unknown" for key in ("driver", "driver_cuda"))
    lines = [
        "Something is wrong: please report it to the makers of tilewave with everything between the lines.",
        "-" * 72,
        f"tilewave   {environment['tilewave']} (commit {environment['commit'] or 'unknown'})",
        f"GPU        {where} ({result.arch})",
        *([] if result.emulated else [f"driver     {driver}, CUDA {cuda}"]),
        f"compiler   {environment['compiler']}",
        f"packages   Python {environment['python']}, {versions}; {environment['platform']}",
        f"seed       {result.seed}",
    ]
    for of_library in result.library_failures:
        lines += ["", f"library's kernel {of_library.kernel}, {of_library.dealing}, {of_library.product}"]
        lines += [f"  {finding}" for finding in of_library.findings]
    if result.library_failures:
        lines.append(f"  reproduce: {reproduce(result, '--library')}")
    for _, group in groupby(result.failures, key=lambda outcome: outcome.rung):
        failures = list(group)
        for outcome in failures[:SHOWN_PER_RUNG]:
            lines += ["", *_failure(outcome)]
        if len(failures) > SHOWN_PER_RUNG:
            lines.append(f"  ... and {len(failures) - SHOWN_PER_RUNG} more products of this rung")
        lines.append(f"  reproduce: {reproduce(result, '--rungs', str(failures[0].rung))}")
    lines += [f"note: {note}" for note in result.notes]
    return "\n".join([*lines, "-" * 72, ""])


def _failure(outcome: Outcome) -> Iterator[str]:
    yield f"rung {outcome.title}, kernel {outcome.kernel}, {outcome.case}"
    for finding in outcome.findings:
        yield f"  {finding.what}: {finding.detail}"
    if outcome.error_in_bounds is not None:
        yield f"  largest error {outcome.error_in_bounds:.4g} bounds, allowed {outcome.allowed:g}"


def reproduce(result: Selftest, *what: str) -> str:
    """The command that runs something again on the same data."""
    command = ["tilewave", "selftest", *what, "--seed", str(result.seed)]
    return shlex.join([*command, "--device", result.device] if result.emulated else command)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
