"""Pictures and Markdown tables made from a ladder file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from tilewave.errors import UsageError
from tilewave.lab.options import check_writable
from tilewave.lab.records import Ladder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORMATS = (".png", ".svg")
# Okabe and Ito's palette, made to be told apart by colour-blind readers; the yellow is too pale on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def draw_ladder(ladder: Ladder, out: Path) -> None:
    """Draw TFLOP/s of every rung at every size, with the baseline as a dashed line of the same colour.

    ``out`` ends in .png or .svg. A ladder without times has nothing to draw: UsageError.
    """
    if out.suffix.lower() not in _FORMATS:
        raise UsageError(f"cannot draw {out}: a name that ends in {' or '.join(_FORMATS)} is accepted")
    timed = [row for row in ladder.rows if row.speed is not None]
    if not timed:
        raise UsageError("this ladder holds no times to draw: it was made without a GPU")
    check_writable(out)

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rungs = sorted({(row.rung, row.title) for row in timed})
    places = {rung: place for place, (rung, _) in enumerate(rungs)}
    with matplotlib.rc_context(
        {"svg.hashsalt": "tilewave", "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure, axes = pyplot.subplots(figsize=(9.5, 5.4), layout="constrained")
        for index, size in enumerate(sorted({row.size for row in timed})):
            colour = _COLOURS[index % len(_COLOURS)]
            rows = [row for row in timed if row.size == size]
            low, high = zip(*(_range(row.speed.milliseconds, size) for row in rows if row.speed), strict=True)
            rates = [row.speed.tflops for row in rows if row.speed]
            errors = [[r - a for r, a in zip(rates, low, strict=True)],
                      [b - r for r, b in zip(rates, high, strict=True)]]  # fmt: skip
            axes.errorbar(
                [places[row.rung] for row in rows],
                rates,
                yerr=errors,
                color=colour,
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=5,
                linewidth=1.4,
                capsize=2,
                label=f"N = {size}",
            )
            _draw_baseline(axes, ladder, size, colour, len(rungs))
        axes.set_xticks(range(len(rungs)), [f"{rung:02d} {title}" for rung, title in rungs])
        axes.tick_params(axis="x", labelrotation=35)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")
            label.set_rotation_mode("anchor")
        axes.set_ylabel("TFLOP/s")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_title(_title(ladder), loc="left", fontsize=11)
        if ladder.baselines:
            axes.plot([], [], color="#555555", linestyle="--", label=ladder.baselines[-1].name)
        axes.legend(frameon=False, ncols=2, loc="upper left")
        figure.savefig(out, dpi=150, facecolor="white", metadata=_metadata(out))
        pyplot.close(figure)


def _draw_baseline(axes: Axes, ladder: Ladder, size: int, colour: str, rungs: int) -> None:
    baseline = ladder.baseline(size)
    if baseline is not None:
        axes.hlines(
            baseline.speed.tflops, -0.4, rungs - 0.6, colors=colour, linestyles="dashed", linewidth=1.0
        )


def _range(milliseconds: tuple[float, ...], size: int) -> tuple[float, float]:
    """Slowest and fastest rate among the rounds, in TFLOP/s."""
    work = 2e-9 * size**3
    return work / max(milliseconds), work / min(milliseconds)


def _title(ladder: Ladder) -> str:
    compilers = sorted({row.build.compiler for row in ladder.rows if row.speed is not None})
    return f"Single-precision matrix multiply, N × N × N, on one {ladder.device} ({', '.join(compilers)})"


def _metadata(out: Path) -> dict[str, str | None]:
    """No date in the picture, so that the same ladder gives the same file."""
    return {"Date": None} if out.suffix.lower() == ".svg" else {}


def markdown_tables(ladder: Ladder) -> str:
    """The ladder as Markdown: speed over sizes first, then what compiler and emulator say of each rung."""
    text = io.StringIO()
    sizes = ladder.sizes()
    rungs = sorted({(row.rung, row.title) for row in ladder.rows})
    if any(row.speed for row in ladder.rows):
        text.write("TFLOP/s, and the share of cuBLAS at that size in brackets.\n\n")
        _markdown_row(text, ["rung", *(f"N = {size}" for size in sizes)])
        _markdown_row(text, ["---", *("---:" for _ in sizes)])
        for rung, title in rungs:
            _markdown_row(text, [f"{rung:02d} {title}", *(_speed_cell(ladder, rung, size) for size in sizes)])
        if ladder.baselines:
            cells = []
            for size in sizes:
                baseline = ladder.baseline(size)
                cells.append(f"{baseline.speed.tflops:.1f}" if baseline else "")
            _markdown_row(text, [ladder.baselines[-1].name, *cells])
        text.write("\n")
    largest = max(sizes, default=0)
    text.write(f"Compiled for {_architectures(ladder)}; counters of one launch at N = {largest}.\n\n")
    _markdown_row(
        text,
        ["rung", "registers", "spill bytes", "shared KiB", "blocks per SM", "limited by",
         "passes per shared read", "conflicts, millions", "error, bounds"],
    )  # fmt: skip
    _markdown_row(text, ["---", *["---:"] * 4, "---", *["---:"] * 3])
    for rung, title in rungs:
        row = ladder.find(rung, largest)
        if row is None:
            continue
        build, counted = row.build, row.counted
        passes = counted.passes_per_read if counted else None
        _markdown_row(
            text,
            [
                f"{rung:02d} {title}",
                str(build.registers),
                str(build.spill_store_bytes + build.spill_load_bytes),
                f"{build.shared_bytes / 1024:g}",
                str(build.blocks_per_sm),
                " and ".join(build.limited_by),
                "" if passes is None else f"{passes:.2f}",
                "" if counted is None else f"{counted.shared_load_conflicts / 1e6:.1f}",
                "" if row.worst_error is None else f"{row.worst_error:.3f}",
            ],
        )
    return text.getvalue()


def _speed_cell(ladder: Ladder, rung: int, size: int) -> str:
    row = ladder.find(rung, size)
    if row is None or row.speed is None:
        return ""
    share = row.speed.over_baseline
    return f"{row.speed.tflops:.1f}" + ("" if share is None else f" ({share:.0%})")


def _architectures(ladder: Ladder) -> str:
    return ", ".join(sorted({f"{row.build.arch} by {row.build.compiler}" for row in ladder.rows}))


def _markdown_row(text: io.StringIO, cells: list[str]) -> None:
    text.write("| " + " | ".join(cells) + " |\n")
