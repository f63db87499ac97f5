"""Commands of the library: plans, measurements against other libraries, precision."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewave.commands.app import app
from tilewave.commands.options import Batch, Budget, Columns, Depth, Kept, Model, Rows, Saved, Seed


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
    m: Rows,
    n: Columns,
    k: Depth,
    device: Model = None,
    batch: Batch = 1,
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
    m: Rows,
    n: Columns,
    k: Depth,
    device: Model = None,
    batch: Batch = 1,
    layouts: Annotated[
        str, typer.Option(help="NN, NT, TN or TT: T for a matrix stored transposed.", metavar="LETTERS")
    ] = "NN",
    schedule: Annotated[
        str | None, typer.Option(help="Ask for a schedule, such as split_k:8.", metavar="NAME")
    ] = None,
    precision: Annotated[str, typer.Option(help="ieee, or fp16x3 on Hopper.", metavar="NAME")] = "ieee",
) -> None:
    """Show how `tilewave.matmul` would compute an M x N x K product, and why; needs no GPU."""
    import tilewave

    found = tilewave.plan(
        m, n, k, device=device, batch=batch, layouts=layouts, schedule=schedule, precision=precision
    )
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
    budget: Budget = None,
    json: Kept = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the results: .png or .svg.", metavar="FILE")
    ] = None,
    saved: Saved = None,
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
    seed: Seed = None,
    budget: Budget = None,
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
