"""What the command `tilewave report` does."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tilewave.bench.environment import tilewave_version
from tilewave.device import DeviceSpec, get_spec
from tilewave.device.catalog import find_spec
from tilewave.errors import UsageError
from tilewave.lab import options
from tilewave.lab.command import DEFAULT_EMULATED, progress_bar
from tilewave.lab.ladder import run_ladder
from tilewave.lab.power.records import load_power_run
from tilewave.lab.profile.records import load_profile
from tilewave.lab.records import Ladder, load_ladder
from tilewave.lab.registry import load_rungs
from tilewave.lab.report.page import make_report, render
from tilewave.lab.report.svg import write_pictures

EMULATED_SIZES = (2048,)
"""Sizes of the ladder that is climbed in the emulator if no file is given: where most predictions are."""


def report_command(
    file: Path | None,
    *,
    out: Path,
    device: str | None,
    power: Path | None,
    profile: Path | None,
    png: Path | None,
    jobs: int | None,
) -> None:
    """Write the page, and the pictures if a folder for them is given."""
    workers = options.check_jobs(jobs)
    named = None if device is None else get_spec(device)
    if out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"cannot write {out}: a name that ends in .html is accepted")
    options.check_writable(out)
    if png is not None:
        _check_folder(png)
    run = None if power is None else load_power_run(power)
    counters = None if profile is None else load_profile(profile)
    console = Console(highlight=False)
    if file is not None:
        ladder = load_ladder(file)
        if not ladder.rows:
            raise UsageError(f"{file}: this ladder holds no rungs")
        spec, notes = spec_of(ladder, named)
        for what, other in (("power run", run), ("profile", counters)):
            if other is not None and find_spec(other.device) != find_spec(ladder.device):
                notes.append(f"The {what} was made on another GPU: {other.device}.")
    else:
        spec, notes = named or get_spec(DEFAULT_EMULATED), []
        console.print(f"No file was given: climbing the ladder in the emulator, as {spec.name} would.")
        with progress_bar() as progress:
            ladder = run_ladder(EMULATED_SIZES, load_rungs(), spec, jobs=workers, progress=progress)
    report = make_report(ladder, spec, run, counters, notes)
    text = render(report, _command(file, device, power, profile), tilewave_version())
    _write(out, text)
    console.print(f"Wrote {out} ({len(text.encode()) / 1e6:.1f} MB): open it in a browser.", markup=False)
    if png is not None:
        written = write_pictures(report.drawings, png)
        console.print(f"Wrote {len(written)} pictures into {png}, as PNG and SVG.", markup=False)


def spec_of(ladder: Ladder, named: DeviceSpec | None) -> tuple[DeviceSpec, list[str]]:
    """The GPU that a ladder's pictures are for, and remarks; ``named`` is what the user asked for.

    A GPU that tilewave does not know by name is described by a known one that the user names, with the SMs
    and the clock that the file holds.
    """
    known = find_spec(ladder.device)
    if known is not None:
        if named is not None and named != known:
            raise UsageError(
                f"the ladder was climbed on {ladder.device}, so the pictures cannot be {named.name}'s: leave "
                "--device out, or leave the file out for pictures without times"
            )
        return known, []
    if named is None:
        raise UsageError(
            f"the ladder was climbed on {ladder.device}, which tilewave does not know: name a GPU of the "
            "same architecture with --device (`tilewave info` lists them)"
        )
    details: dict[str, Any] = next(
        (s["gpu_details"] for s in reversed(ladder.sessions) if s.get("gpu_details")), {}
    )
    spec = replace(
        named,
        name=ladder.device,
        sms=details.get("sms", named.sms),
        clock_mhz=details.get("clock_mhz", named.clock_mhz),
    )
    return spec, [f"{ladder.device} is described by the figures of {named.name}, with {spec.sms} SMs."]


def _command(file: Path | None, device: str | None, power: Path | None, profile: Path | None) -> str:
    """The command line, with names of files but not where they lie."""
    words = ["tilewave report"]
    words += [file.name] if file else []
    words += [f"--device {device!r}" if " " in device else f"--device {device}"] if device else []
    words += [f"--power {power.name}"] if power else []
    words += [f"--profile {profile.name}"] if profile else []
    return " ".join(words)


def _check_folder(folder: Path) -> None:
    """Make the folder for the pictures, or say why there can be none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder}: {error.strerror or error}") from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write into {folder}: permission denied")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
