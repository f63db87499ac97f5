"""Commands of the lab: the ladder, what measures it, and what draws it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewave.commands.app import app
from tilewave.commands.options import Budget, Emulate, Emulated, Jobs, Kept, Results, Rungs, Saved, Seed


@app.command()
def ladder(
    sizes: Annotated[
        str | None,
        typer.Option(help="N of the N x N x N products, such as 1024,2048.", metavar="N,N,..."),
    ] = None,
    rungs: Rungs = None,
    device: Emulated = None,
    budget: Budget = None,
    json: Kept = None,
    emulate: Emulate = False,
    jobs: Jobs = None,
) -> None:
    """Climb the ladder: compile, check and count every rung; on a GPU, time it against cuBLAS too."""
    from tilewave.lab.command import ladder_command

    ladder_command(
        sizes=sizes,
        rungs=rungs,
        device=device,
        budget=budget,
        path=json,
        emulate=emulate,
        jobs=jobs,
    )


@app.command()
def selftest(
    rungs: Rungs = None,
    library: Annotated[
        bool, typer.Option("--library", help="The library's kernels; without --rungs, no rungs.")
    ] = False,
    device: Emulated = None,
    emulate: Emulate = False,
    seed: Seed = None,
    budget: Annotated[
        float | None,
        typer.Option(help="Start nothing that would take longer than this in all; 60.", metavar="SECONDS"),
    ] = None,
    json: Results = None,
    jobs: Jobs = None,
) -> None:
    """Test every kernel on your GPU against float64, and say what to report if something differs."""
    from tilewave.lab.selftest_command import selftest_command

    selftest_command(
        rungs=rungs,
        library=library,
        device=device,
        emulate=emulate,
        seed=seed,
        budget=budget,
        path=json,
        jobs=jobs,
    )


@app.command()
def probe(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Which probes, or all; without a name they are listed.", metavar="[NAME]..."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(help="N of the N x N x N products; each probe's own by default.", metavar="N,N,..."),
    ] = None,
    device: Emulated = None,
    emulate: Emulate = False,
    budget: Budget = None,
    json: Results = None,
    jobs: Jobs = None,
    profile: Annotated[
        bool | None,
        typer.Option(
            "--profile/--no-profile",
            help="Read counters and stalls with Nsight Compute; by default only where a probe needs it.",
        ),
    ] = None,
) -> None:
    """Change one thing in a rung and see what it was worth: no loads, no transpose, other lane maps ..."""
    from tilewave.lab.probe_command import probe_command

    probe_command(
        names or [],
        sizes=size,
        device=device,
        emulate=emulate,
        budget=budget,
        path=json,
        jobs=jobs,
        profile=profile,
    )


@app.command()
def power(
    seconds: Annotated[
        float | None, typer.Option(help="How long the run lasts, set-up apart; 50 by default.")
    ] = None,
    rung: Annotated[
        str | None,
        typer.Option(help="Number or name of the rung; the fastest here by default.", metavar="RUNG"),
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="N of the N x N x N products; 8192 by default.", metavar="N")
    ] = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option(help="An earlier run's JSON: what varies between runs counts too.", metavar="FILE"),
    ] = None,
    saved: Saved = None,
    json: Annotated[Path | None, typer.Option(help="Write the run here.", metavar="FILE")] = None,
) -> None:
    """Run a rung and cuBLAS in turn for a while: throughput beside clocks, power, heat, and a verdict."""
    from tilewave.lab.power.command import power_command

    power_command(seconds=seconds, rung=rung, size=size, compare=compare or [], saved=saved, path=json)


@app.command()
def profile(
    rungs: Annotated[
        list[str] | None,
        typer.Argument(help="Numbers or names of rungs, such as 15 or 1-5,12.", metavar="[RUNG]..."),
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="N of the N x N x N product; 2048 by default.", metavar="N")
    ] = None,
    device: Emulated = None,
    emulate: Emulate = False,
    saved: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="A report of Nsight Compute (.ncu-rep, or .csv of its raw page), or an earlier --json.",
            metavar="FILE",
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="Give the profiler no longer than this.", metavar="SECONDS"),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures here.", metavar="FILE")] = None,
    jobs: Jobs = None,
) -> None:
    """Show rungs as predicted, emulated and profiled, beside the kernel that cuBLAS chose."""
    from tilewave.lab.profile.command import profile_command

    profile_command(
        rungs or [],
        size=size,
        device=device,
        emulate=emulate,
        saved=saved,
        budget=budget,
        path=json,
        jobs=jobs,
    )


@app.command()
def export(
    rung: Annotated[str, typer.Argument(help="Number or name of the rung, such as 15 or large_patch.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Where it goes; - prints it. Its own name here by default.", metavar="FILE"),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="The GPU model that a schedule is made for; the GPU here by default.", metavar="NAME"
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(help="N of the N x N x N products that it runs by default.", metavar="N,N,..."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Write a rung as one standalone .cu with a main that checks it and times it against cuBLAS."""
    from tilewave.lab.export import export_command

    path = export_command(rung, out=out, device=device, sizes=sizes, force=force)
    if path is not None:
        name = path.stem
        typer.echo(f"Wrote {path}. Build it: nvcc -O3 -arch=native {path} -lcublas -o {name}")


@app.command()
def picture(
    file: Annotated[Path, typer.Argument(help="A file that `tilewave ladder --json` wrote.")],
    out: Annotated[
        Path | None, typer.Option(help="Where the picture goes: .png or .svg.", metavar="FILE")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the results as a Markdown table too.")
    ] = False,
    rungs: Annotated[
        str | None, typer.Option(help="Rungs such as 1-5,9; all in the file by default.", metavar="LIST")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Sizes such as 1024,2049; all in the file by default.", metavar="LIST")
    ] = None,
) -> None:
    """Draw a ladder's throughput beside cuBLAS, and print it as a Markdown table."""
    from tilewave.lab.command import picture_command

    picture_command(file, out, markdown, rungs, sizes)


@app.command()
def report(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="A file that `tilewave ladder --json` wrote; without one, the emulator's ladder."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the page goes.", metavar="FILE")] = Path(
        "tilewave-report.html"
    ),
    device: Annotated[
        str | None,
        typer.Option(help="The GPU model to draw for without a file, GB10 by default.", metavar="NAME"),
    ] = None,
    power: Annotated[
        Path | None, typer.Option(help="A file that `tilewave power --json` wrote.", metavar="FILE")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="A file that `tilewave profile --json` wrote.", metavar="FILE")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Write each picture here too, as PNG and SVG.", metavar="FOLDER")
    ] = None,
    jobs: Jobs = None,
) -> None:
    """Make one page of a ladder: throughput, tiles, bank maps, timelines, schedules, roofline, power."""
    from tilewave.lab.report.command import report_command

    report_command(file, out=out, device=device, power=power, profile=profile, png=png, jobs=jobs)
