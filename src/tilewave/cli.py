"""The command ``tilewave``.

Everything heavy is imported inside the commands, so that ``--help`` and ``--version`` answer at once. Errors
of ours and of the command line are one line on stderr: exit code 2 for a request that makes no sense, 1 for
anything else that failed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tilewave.errors import TilewaveError, UsageError


class _OneLineErrors(TyperGroup):
    """A command group whose errors are single lines; Typer's own are boxes of several."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command and exit."""
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except TilewaveError as error:
            _complain(str(error))
            code = 2 if isinstance(error, UsageError) else 1
        except (typer.Abort, KeyboardInterrupt):
            _complain("interrupted")
            code = 130
        except BrokenPipeError:  # the reader has seen enough, as in `tilewave ladder | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 1
        except Exception as error:
            message = getattr(error, "format_message", None)  # what Typer's errors have, in all its versions
            if message is None:
                raise
            _complain(" ".join(message().split()))
            code = getattr(error, "exit_code", 2)
        sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str) -> None:
    typer.echo(f"tilewave: {message}", err=True)


app = typer.Typer(
    cls=_OneLineErrors,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Single-precision matrix multiply on NVIDIA GPUs, and a lab that optimises it step by step.",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits with its code."""
    app(args=None if arguments is None else list(arguments), prog_name="tilewave")


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from tilewave.bench.environment import tilewave_version

        typer.echo(f"tilewave {tilewave_version()}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def ladder(
    sizes: Annotated[
        str | None,
        typer.Option(help="N of the N x N x N products, such as 1024,2048.", metavar="N,N,..."),
    ] = None,
    rungs: Annotated[
        str | None, typer.Option(help="Which rungs, such as 1-5,9; all by default.", metavar="LIST")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="The GPU model to emulate (see `tilewave info`).", metavar="NAME"),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="Start nothing that would take longer than this in all.", metavar="SECONDS"),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(help="Keep the results here, and go on from those already there.", metavar="FILE"),
    ] = None,
    emulate: Annotated[bool, typer.Option("--emulate", help="Emulate even if there is a GPU.")] = False,
    jobs: Annotated[
        int | None,
        typer.Option(help="Processes that compile and emulate; one a core by default.", metavar="N"),
    ] = None,
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
    rungs: Annotated[
        str | None, typer.Option(help="Which rungs, such as 1-5,9; all by default.", metavar="LIST")
    ] = None,
    library: Annotated[
        bool, typer.Option("--library", help="The library's kernels; without --rungs, no rungs.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(help="The GPU model to emulate (see `tilewave info`).", metavar="NAME"),
    ] = None,
    emulate: Annotated[bool, typer.Option("--emulate", help="Emulate even if there is a GPU.")] = False,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the data, to repeat a run; fresh by default.", metavar="N")
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="Start nothing that would take longer than this in all; 60.", metavar="SECONDS"),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all results here.", metavar="FILE")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Processes that compile and emulate; one a core by default.", metavar="N"),
    ] = None,
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
    device: Annotated[
        str | None,
        typer.Option(help="The GPU model to emulate (see `tilewave info`).", metavar="NAME"),
    ] = None,
    emulate: Annotated[bool, typer.Option("--emulate", help="Emulate even if there is a GPU.")] = False,
    budget: Annotated[
        float | None,
        typer.Option(help="Start nothing that would take longer than this in all.", metavar="SECONDS"),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all results here.", metavar="FILE")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Processes that compile and emulate; one a core by default.", metavar="N"),
    ] = None,
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
    saved: Annotated[
        Path | None, typer.Option("--from", help="Show a run that was made; needs no GPU.", metavar="FILE")
    ] = None,
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
    device: Annotated[
        str | None,
        typer.Option(help="The GPU model to emulate (see `tilewave info`).", metavar="NAME"),
    ] = None,
    emulate: Annotated[bool, typer.Option("--emulate", help="Emulate even if there is a GPU.")] = False,
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
    jobs: Annotated[
        int | None,
        typer.Option(help="Processes that compile and emulate; one a core by default.", metavar="N"),
    ] = None,
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
    jobs: Annotated[
        int | None,
        typer.Option(help="Processes that compile and emulate; one a core by default.", metavar="N"),
    ] = None,
) -> None:
    """Make one page of a ladder: throughput, tiles, bank maps, timelines, schedules, roofline, power."""
    from tilewave.lab.report.command import report_command

    report_command(file, out=out, device=device, power=power, profile=profile, png=png, jobs=jobs)


@app.command()
def calibrate(
    budget: Annotated[
        float, typer.Option(help="How long to measure, compiling included.", metavar="SECONDS")
    ] = 300.0,
    json: Annotated[
        Path, typer.Option(help="Where readings go; an earlier file is added to.", metavar="FILE")
    ] = Path("tilewave-calibration.json"),
    saved: Annotated[
        Path | None, typer.Option("--from", help="Fit a file's readings again; needs no GPU.", metavar="FILE")
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            help="Where the calibration goes; where the planner looks by default.", metavar="FOLDER"
        ),
    ] = None,
    fit: Annotated[bool, typer.Option("--fit/--no-fit", help="Fit once measured, or measure only.")] = True,
) -> None:
    """Time the product's kernels on the GPU here at random products; fit the planner's constants to that."""
    from tilewave.bench.calibrate import PACKAGED, calibrate_command

    calibrate_command(budget=budget, path=json, saved=saved, into=into or PACKAGED, fit=fit, say=typer.echo)


# A negative size is an argument for our own error, not an unknown option.
@app.command(context_settings={"ignore_unknown_options": True})
def plan(
    m: Annotated[int, typer.Argument(help="Rows of A and C.")],
    n: Annotated[int, typer.Argument(help="Columns of B and C.")],
    k: Annotated[int, typer.Argument(help="Columns of A, rows of B.")],
    device: Annotated[
        str | None,
        typer.Option(help="The GPU model (see `tilewave info`); the GPU here by default.", metavar="NAME"),
    ] = None,
    batch: Annotated[int, typer.Option(help="Products of this size.", metavar="N")] = 1,
    family: Annotated[
        str, typer.Option(help="The candidates: three, stream-k or all.", metavar="NAME")
    ] = "stream-k",
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show which of the lab's kernels an M x N x K product would get, and what was turned down; needs no GPU.

    For what `tilewave.matmul` would do see `tilewave explain`.
    """
    from tilewave.planner.report import plan_command

    plan_command(m, n, k, device=device, batch=batch, family=family, as_json=json)


@app.command(context_settings={"ignore_unknown_options": True})
def explain(
    m: Annotated[int, typer.Argument(help="Rows of A and C.")],
    n: Annotated[int, typer.Argument(help="Columns of B and C.")],
    k: Annotated[int, typer.Argument(help="Columns of A, rows of B.")],
    device: Annotated[
        str | None,
        typer.Option(help="The GPU model (see `tilewave info`); the GPU here by default.", metavar="NAME"),
    ] = None,
    batch: Annotated[int, typer.Option(help="Products of this size.", metavar="N")] = 1,
    layouts: Annotated[
        str, typer.Option(help="NN, NT, TN or TT: T for a matrix stored transposed.", metavar="LETTERS")
    ] = "NN",
    schedule: Annotated[
        str | None, typer.Option(help="Ask for a schedule, such as split_k:8.", metavar="NAME")
    ] = None,
) -> None:
    """Show how `tilewave.matmul` would compute an M x N x K product, and why; needs no GPU."""
    import tilewave

    found = tilewave.plan(m, n, k, device=device, batch=batch, layouts=layouts, schedule=schedule)
    typer.echo(f"{found}\n\n{tilewave.explain(found)}")


@app.command()
def bench(
    shapes: Annotated[
        list[str] | None,
        typer.Argument(
            help="M,N,K[,batch][,layouts] such as 64,64,64,4096,NT; a .csv; or the suites workloads and "
            "squares, which is the default. Or: compare A.json B.json.",
            metavar="[SHAPE]...",
        ),
    ] = None,
    contenders: Annotated[
        str | None,
        typer.Option(
            help="Such as ours,ours:split_k:8,torch,cupy,cublaslt; by default ours and what is installed.",
            metavar="LIST",
        ),
    ] = None,
    mode: Annotated[
        str, typer.Option(help="cold: operands rotate beyond the L2 cache; warm: always the same ones.")
    ] = "cold",
    rounds: Annotated[int, typer.Option(help="Rounds; in each, every contender is timed once.")] = 5,
    budget: Annotated[
        float | None,
        typer.Option(help="Start nothing that would take longer than this in all.", metavar="SECONDS"),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(help="Keep the results here, and go on from those already there.", metavar="FILE"),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the results: .png or .svg.", metavar="FILE")
    ] = None,
    saved: Annotated[
        Path | None, typer.Option("--from", help="Show a run that was made; needs no GPU.", metavar="FILE")
    ] = None,
) -> None:
    """Time products of any shapes against cuBLAS, each answer checked; or say what changed in between."""
    from tilewave.bench.products.command import bench_command

    bench_command(
        shapes or [],
        contenders=contenders,
        mode=mode,
        rounds=rounds,
        budget=budget,
        path=json,
        picture=picture,
        saved=saved,
    )


@app.command()
def accuracy(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Your arrays: one .npz that holds a and b, or two .npy; standard data without.",
            metavar="[FILE]...",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Standard data, such as normal,uniform (the default), along-k-30 or relu.", metavar="LIST"
        ),
    ] = None,
    k: Annotated[
        str | None,
        typer.Option(help="Lengths of the sums, such as 64,1024; by default up to 16384.", metavar="K,K,..."),
    ] = None,
    size: Annotated[int, typer.Option(help="Rows of A and columns of B; of arrays, that many of them.")] = 64,
    contenders: Annotated[
        str | None,
        typer.Option(help="Such as ieee,fp16x3,tf32,cublas; all that run here by default.", metavar="LIST"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the data, to repeat a run; fresh by default.", metavar="N")
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="Start nothing that would take longer than this in all.", metavar="SECONDS"),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the results here.", metavar="FILE")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the results: .png or .svg.", metavar="FILE")
    ] = None,
    saved: Annotated[
        Path | None, typer.Option("--from", help="Show a run that was made.", metavar="FILE")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
) -> None:
    """Show how errors grow with K in each precision mode, beside plain FP32 and, on a GPU, cuBLAS."""
    from tilewave.bench.accuracy.command import accuracy_command

    accuracy_command(
        files or [],
        data=data,
        lengths=k,
        size=size,
        contenders=contenders,
        seed=seed,
        budget=budget,
        path=json,
        picture=picture,
        saved=saved,
        markdown=markdown,
    )


@app.command()
def info() -> None:
    """Show devices, driver, compiler, cache and frameworks, and how to get what is missing."""
    from tilewave.lab.info import info_command

    info_command()
