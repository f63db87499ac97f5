"""What the command `tilewave profile` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tilewave.device import DeviceSpec, get_spec
from tilewave.errors import UsageError
from tilewave.lab import options
from tilewave.lab.command import DEFAULT_EMULATED, emulation_notice, open_gpu
from tilewave.lab.ladder import Gpu
from tilewave.lab.profile.records import Profile, load_profile, save_profile
from tilewave.lab.profile.run import Hardware, profile_rungs
from tilewave.lab.profile.saved import check_fits, read_report, spec_of_report
from tilewave.lab.profile.table import print_profile
from tilewave.lab.registry import Rung, get_rung, load_rungs
from tilewave.runtime.driver import probe

DEFAULT_SIZE = 2048


def profile_command(
    words: Sequence[str],
    *,
    size: str | None,
    device: str | None,
    emulate: bool,
    saved: Path | None,
    budget: float | None,
    path: Path | None,
    jobs: int | None,
) -> None:
    """Profile the rungs named, or those of a saved report; show them, and keep them."""
    console = Console(highlight=False)
    budget, workers = options.check_budget(budget), options.check_jobs(jobs)
    rungs = choose_rungs(words)
    sizes = options.parse_sizes(str(DEFAULT_SIZE) if size is None else size)
    if len(sizes) != 1:
        raise UsageError(f"size {size!r}: one size is accepted")
    spec = get_spec(DEFAULT_EMULATED if device is None else device)
    if path is not None:
        options.check_writable(path)
    if saved is not None and saved.suffix == ".json":
        if words or size or device:
            raise UsageError(f"{saved} is shown as it is: no rungs, --size or --device go with it")
        profile = load_profile(saved)
    elif saved is not None:
        profile = _from_report(saved, rungs, sizes[0], spec if device else None, workers)
    elif not rungs:
        known = ", ".join(str(rung.number) for rung in load_rungs())
        raise UsageError(f"name the rungs to profile, such as 15 or 1-5,12; there are {known}")
    else:
        profile = _now(rungs, sizes[0], spec, emulate or device is not None, budget, workers, console)
    print_profile(profile, console)
    if path is not None:
        save_profile(profile, path)
        console.print(f"The figures are in {path}.", markup=False)


def choose_rungs(words: Sequence[str]) -> list[Rung]:
    """Rungs from numbers, names and lists such as 1-5,12, in the order of their numbers."""
    known = [rung.number for rung in load_rungs()]
    chosen: set[int] = set()
    for word in words:
        if word[:1].isdigit() and not any(letter.isalpha() for letter in word):
            chosen.update(options.parse_numbers(word, known))
        else:
            chosen.add(get_rung(word).number)
    return [get_rung(number) for number in sorted(chosen)]


def _now(
    rungs: Sequence[Rung],
    size: int,
    spec: DeviceSpec,
    asked: bool,
    budget: float | None,
    jobs: int,
    console: Console,
) -> Profile:
    """Profile on the GPU here, or emulate if that was asked for or there is none."""
    found = probe()
    gpu: Gpu | None = None
    if asked or not found.usable:
        if size > options.LARGEST_EMULATED_SIZE:
            raise UsageError(f"size {size}: the emulator takes sizes up to {options.LARGEST_EMULATED_SIZE}")
        notice = emulation_notice(found.reason, spec, asked)
        console.print(f"{notice} Hardware and cuBLAS have no columns.", style="bold")
    else:
        gpu, spec, notice = open_gpu()
        console.print(notice, style="bold")
    return profile_rungs(rungs, size, spec, gpu=gpu, budget_s=budget, jobs=jobs)


def _from_report(file: Path, rungs: Sequence[Rung], size: int, spec: DeviceSpec | None, jobs: int) -> Profile:
    """The columns of a saved report: the rungs named, by default all that are in it."""
    launches = read_report(file)
    if spec is None:
        spec = spec_of_report(launches) or get_spec(DEFAULT_EMULATED)
    hardware: Hardware = check_fits(file, launches, size, spec)
    if not rungs:
        rungs = [get_rung(number) for number in sorted(hardware.rungs)]
    absent = [rung.title for rung in rungs if rung.number not in hardware.rungs]
    if absent:
        raise UsageError(f"{file} holds no launch of {', '.join(absent)}")
    return profile_rungs(rungs, size, spec, hardware=hardware, jobs=jobs)
