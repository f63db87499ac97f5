"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

Jobs = Annotated[
    int | None, typer.Option(help="Processes that compile and emulate; one a core by default.", metavar="N")
]
Emulated = Annotated[
    str | None, typer.Option(help="The GPU model to emulate (see `tilewave info`).", metavar="NAME")
]
Budget = Annotated[
    float | None,
    typer.Option(help="Start nothing that would take longer than this in all.", metavar="SECONDS"),
]
Emulate = Annotated[bool, typer.Option("--emulate", help="Emulate even if there is a GPU.")]
Rungs = Annotated[
    str | None, typer.Option(help="Which rungs, such as 1-5,9; all by default.", metavar="LIST")
]
Kept = Annotated[
    Path | None,
    typer.Option(help="Keep the results here, and go on from those already there.", metavar="FILE"),
]
Seed = Annotated[
    int | None, typer.Option(help="Seed of the data, to repeat a run; fresh by default.", metavar="N")
]
Results = Annotated[Path | None, typer.Option(help="Write all results here.", metavar="FILE")]
Saved = Annotated[
    Path | None, typer.Option("--from", help="Show a run that was made; needs no GPU.", metavar="FILE")
]
Rows = Annotated[int, typer.Argument(help="Rows of A and C.")]
Columns = Annotated[int, typer.Argument(help="Columns of B and C.")]
Depth = Annotated[int, typer.Argument(help="Columns of A, rows of B.")]
Model = Annotated[
    str | None,
    typer.Option(help="The GPU model (see `tilewave info`); the GPU here by default.", metavar="NAME"),
]
Batch = Annotated[int, typer.Option(help="Products of this size.", metavar="N")]
