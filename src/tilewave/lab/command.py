"""What the commands `tilewave ladder` and `tilewave picture` do."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tilewave.device import DeviceSpec, driver_cuda_version, get_spec, query_device
from tilewave.errors import UsageError
from tilewave.lab import options
from tilewave.lab.ladder import Gpu, Silent, run_ladder
from tilewave.lab.ladder_table import print_ladder
from tilewave.lab.records import load_ladder
from tilewave.lab.registry import get_rung, load_rungs
from tilewave.runtime.driver import Device, probe

DEFAULT_EMULATED = "GB10"
_DEFAULT_SIZES = {True: (2048,), False: (1024, 2048, 4096)}


class _Bar:
    """A progress bar on stderr; only for a person at a terminal."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[last]}"),
            console=Console(stderr=True),
            refresh_per_second=4,
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def start(self, what: str, steps: int) -> None:
        """A stage begins."""
        self._task = self._progress.add_task(what, total=steps, last="") if steps else None

    def step(self, done: str) -> None:
        """A step of it has finished."""
        if self._task is not None:
            self._progress.update(self._task, advance=1, last=done)


class _Nothing(Silent):
    """No progress bar: the output goes to a file or a pipe."""

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing."""


def progress_bar() -> _Bar | _Nothing:
    """Progress to show: a bar if a person watches, else nothing."""
    return _Bar() if sys.stderr.isatty() else _Nothing()


def ladder_command(
    *,
    sizes: str | None,
    rungs: str | None,
    device: str | None,
    budget: float | None,
    path: Path | None,
    emulate: bool,
    jobs: int | None,
) -> None:
    """Run the ladder as asked, show it, and fail if a result was wrong."""
    budget = options.check_budget(budget)
    workers = options.check_jobs(jobs)
    chosen_rungs = (
        load_rungs()
        if rungs is None
        else [get_rung(number) for number in options.parse_numbers(rungs, (r.number for r in load_rungs()))]
    )
    chosen_sizes = None if sizes is None else options.parse_sizes(sizes)
    # An unknown name is refused on any machine.
    spec = get_spec(DEFAULT_EMULATED if device is None else device)
    console = Console(highlight=False)
    found = probe()
    emulated = emulate or device is not None or not found.usable
    if chosen_sizes is None:
        chosen_sizes = _DEFAULT_SIZES[emulated]
    if emulated and chosen_sizes[-1] > options.LARGEST_EMULATED_SIZE:
        raise UsageError(
            f"size {chosen_sizes[-1]}: the emulator takes sizes up to {options.LARGEST_EMULATED_SIZE}"
        )
    if path is not None:
        options.check_writable(path)
    gpu: Gpu | None = None
    if emulated:
        console.print(emulation_notice(found.reason, spec, asked=emulate or device is not None), style="bold")
    else:
        gpu, spec, notice = open_gpu()
        console.print(notice, style="bold")
    with progress_bar() as progress:
        ladder = run_ladder(
            chosen_sizes,
            chosen_rungs,
            spec,
            gpu=gpu,
            budget_s=budget,
            path=path,
            jobs=workers,
            progress=progress,
        )
    print_ladder(ladder, [rung.number for rung in chosen_rungs], chosen_sizes, console)
    for note in ladder.notes:
        console.print(f"Note: {note}.", style="yellow", markup=False)
    if path is not None:
        console.print(f"Results are in {path}.", markup=False)
    if any(not check.holds for row in ladder.rows for check in row.checks):
        sys.exit(1)


def emulation_notice(reason: str | None, spec: DeviceSpec | None, asked: bool) -> str:
    """What to tell a user who gets the emulator, because of ``reason`` or because they asked for it.

    ``spec`` is the GPU that kernels are compiled for, None where none of them are emulated.
    """
    why = "As asked" if asked or reason is None else f"No GPU was found ({reason})"
    if spec is None:
        return f"{why}: there are no times."
    return (
        f"{why}: every kernel is compiled for {spec.name} ({spec.arch}), "
        "executed and counted in the emulator. There are no times."
    )


def open_gpu() -> tuple[Gpu, DeviceSpec, str]:
    """The first GPU with the baseline to compare with, its description, and a line that names both."""
    from tilewave.bench.baseline import find_baseline
    from tilewave.compiler import choose_arch
    from tilewave.compiler.toolchain import compiler_version, supported_architectures

    supported_architectures()  # loads NVRTC before a framework brings one of its own into the process
    device, spec = Device(), query_device()
    choose_arch(spec.compute_capability, driver_cuda_version())  # refuses what nothing can be compiled for
    baseline, note = find_baseline()
    return (
        Gpu(device, baseline),
        spec,
        f"{spec.name} ({spec.arch}), {compiler_version()}; compared with {note}.",
    )


def picture_command(
    file: Path, out: Path | None, markdown: bool, rungs: str | None = None, sizes: str | None = None
) -> None:
    """Draw a ladder file, or some of its rungs and sizes, print it as Markdown, or both."""
    from tilewave.lab.picture import draw_ladder, markdown_tables

    if out is None and not markdown:
        raise UsageError("nothing to do: give --out FILE, --markdown or both")
    ladder = load_ladder(file)
    held = sorted({row.rung for row in ladder.rows}), ladder.sizes()
    chosen = [
        known if text is None else options.parse_numbers(text, known, what)
        for what, text, known in zip(("rung", "size"), (rungs, sizes), held, strict=True)
    ]
    ladder = ladder.only(*chosen)
    if out is not None:
        draw_ladder(ladder, out)
    if markdown:
        typer.echo(markdown_tables(ladder), nl=False)
