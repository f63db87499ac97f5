"""A run of `tilewave accuracy` as a picture: error over K, one panel a data set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tilewave.bench.accuracy.records import AccuracyRun
from tilewave.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORMATS = (".png", ".svg")
_COLUMNS = 3
# From Okabe and Ito's palette, made to be told apart by colour-blind readers.
_STYLES = {
    "ieee": ("#D55E00", "-", "o"),
    "fp16x3": ("#0072B2", "-", "s"),
    "fp16x3-large": ("#CC79A7", "-", "v"),
    "fp16x3-alone": ("#56B4E9", "--", "s"),
    "tf32": ("#999999", "--", "^"),
    "gpu-ieee": ("#D55E00", ":", "D"),
    "gpu-fp16x3": ("#0072B2", ":", "D"),
    "gpu-tf32": ("#999999", ":", "D"),
    "cublas": ("#009E73", "-", "x"),
}


def draw_accuracy(run: AccuracyRun, out: Path) -> None:
    """Draw a run; ``out`` ends in .png or .svg. Raises ``UsageError`` for a run without points."""
    if out.suffix.lower() not in _FORMATS:
        raise UsageError(f"cannot draw {out}: a name that ends in {' or '.join(_FORMATS)} is accepted")
    if not any(point.relative for point in run.points):
        raise UsageError("this run holds no errors to draw")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = run.data
    columns = min(_COLUMNS, len(names))
    rows = -(-len(names) // columns)
    with matplotlib.rc_context({"svg.hashsalt": "tilewave", "font.size": 9}):
        figure, panels = pyplot.subplots(
            rows, columns, figsize=(max(6.0, 4.2 * columns), 3.4 * rows + 1.0), layout="constrained",
            squeeze=False, sharex=True, sharey=True,
        )  # fmt: skip
        flat = panels.ravel()
        for axes, name in zip(flat, names, strict=False):
            _draw_panel(axes, run, name)
        for axes in flat[len(names) :]:
            axes.set_visible(False)
        handles = {
            label: handle
            for axes in flat[: len(names)]
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=2, frameon=False
        )
        figure.suptitle(
            f"Error of {run.m} x {run.n} products against float64, relative, Frobenius norm",
            fontsize=10,
            x=0.01,
            ha="left",
        )
        metadata = {"Date": None} if out.suffix.lower() == ".svg" else {"Software": None}
        try:
            figure.savefig(out, dpi=150, facecolor="white", metadata=metadata)
        except OSError as error:
            raise UsageError(f"cannot write {out}: {error.strerror or error}") from error
        finally:
            pyplot.close(figure)


def _draw_panel(axes: Axes, run: AccuracyRun, name: str) -> None:
    for key, label in run.contenders.items():
        points = [point for point in run.series(name, key) if point.relative]
        if not points:
            continue
        colour, line, marker = _STYLES.get(key, ("black", "-", "."))
        axes.plot(
            [point.k for point in points],
            [point.relative or 0.0 for point in points],
            linestyle=line,
            marker=marker,
            color=colour,
            markersize=4.5,
            linewidth=1.3,
            label=label,
        )
    axes.set_xscale("log", base=4)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_title(name, fontsize=9, loc="left")
    axes.set_xlabel("K")
    axes.set_ylabel("relative error")
    axes.label_outer()
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
