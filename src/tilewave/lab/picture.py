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
# From Okabe and Ito's palette, made to be told apart by colour-blind readers.
_BAR, _LINE = "#56B4E9", "#D55E00"
_ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}


def draw_ladder(ladder: Ladder, out: Path) -> None:
    """Draw TFLOP/s of every rung, one panel a size, with the baseline as a line across each panel.

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
    sizes = sorted({row.size for row in timed})
    with matplotlib.rc_context({"svg.hashsalt": "tilewave", "font.size": 9}):
        figure, grid = pyplot.subplots(
            1,
            len(sizes),
            figsize=(1.6 + 1.95 * len(sizes), 1.4 + 0.27 * len(rungs)),
            sharex=True,
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        for axes, size in zip(grid[0], sizes, strict=True):
            _draw_size(axes, ladder, size, [rung for rung, _ in rungs])
        grid[0][0].set_yticks(range(len(rungs)), [f"{rung:02d} {title}" for rung, title in rungs])
        grid[0][0].invert_yaxis()  # the ladder is read from the top
        speeds = [row.speed for row in timed if row.speed] + [row.speed for row in ladder.baselines]
        fastest = max(speed.tflops for speed in speeds)
        grid[0][0].set_xlim(0, 1.22 * fastest)  # room for the figures behind the bars
        figure.suptitle(_title(ladder), fontsize=10, x=0.01, ha="left")
        figure.supxlabel("TFLOP/s, median; whiskers: slowest and fastest round", fontsize=9)
        figure.savefig(out, dpi=150, facecolor="white", metadata=_metadata(out))
        pyplot.close(figure)


def _draw_size(axes: Axes, ladder: Ladder, size: int, rungs: list[int]) -> None:
    """One panel: a bar for each rung that was timed at this size, and the baseline."""
    for place, rung in enumerate(rungs):
        row = ladder.find(rung, size)
        if row is None or row.speed is None:
            continue
        rate = row.speed.tflops
        low, high = _range(row.speed.milliseconds, size)
        axes.barh(place, rate, height=0.72, color=_BAR)
        axes.plot([low, high], [place, place], color="black", linewidth=1.0)
        share = row.speed.over_baseline
        label = f"{rate:.1f}" + ("" if share is None else f" ({share:.0%})")
        axes.text(max(rate, high) + 0.6, place, label, va="center", fontsize=7, bbox=_ON_WHITE)
    baseline = ladder.baseline(size)
    title = f"N = {size}"
    if baseline is not None:
        axes.axvline(baseline.speed.tflops, color=_LINE, linestyle="--", linewidth=1.2, zorder=0)
        title += f"\ncuBLAS {baseline.speed.tflops:.1f}"
    axes.set_title(title, fontsize=9, color=_LINE if baseline is not None else "black")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _range(milliseconds: tuple[float, ...], size: int) -> tuple[float, float]:
    """Slowest and fastest rate among the rounds, in TFLOP/s."""
    work = 2e-9 * size**3
    return work / max(milliseconds), work / min(milliseconds)


def _title(ladder: Ladder) -> str:
    compilers = sorted({row.build.compiler for row in ladder.rows if row.speed is not None})
    against = f", against {ladder.baselines[-1].name} (dashed)" if ladder.baselines else ""
    return f"FP32 matrix multiply N × N × N on one {ladder.device}, {', '.join(compilers)}{against}"


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
