"""A run as a picture: speed against the roofline, and the ratio to the baseline by family."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from tilewave.bench.products.records import BenchRun
from tilewave.bench.products.table import pair, ratios
from tilewave.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORMATS = (".png", ".svg")
# From Okabe and Ito's palette, made to be told apart by colour-blind readers.
_OURS, _THEIRS = "#0072B2", "#D55E00"
_MOST = 8.0
"""Where the axis of ratios ends: one product far above would flatten all others."""


def draw(run: BenchRun, out: Path) -> None:
    """Draw a run; ``out`` ends in .png or .svg. Raises ``UsageError`` for a run without readings."""
    if out.suffix.lower() not in _FORMATS:
        raise UsageError(f"cannot draw {out}: a name that ends in {' or '.join(_FORMATS)} is accepted")
    if not any(reading.counts for result in run.results for reading in result.readings):
        raise UsageError("this run holds no readings to draw")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = ratios(run)
    families = list(dict.fromkeys(result.product.family for result, _ in found.values()))
    height = 4.2 + (0.24 * len(families) if families else 0)
    with matplotlib.rc_context({"svg.hashsalt": "tilewave", "font.size": 9}):
        figure, panels = pyplot.subplots(
            1, 2 if families else 1, figsize=(11 if families else 6.5, height), layout="constrained",
            squeeze=False,
        )  # fmt: skip
        _draw_roofline(panels[0][0], run)
        if families:
            _draw_families(panels[0][1], run, families)
        figure.suptitle(
            f"FP32 products on one {run.device}, {run.mode} operands", fontsize=10, x=0.01, ha="left"
        )
        metadata = {"Date": None} if out.suffix.lower() == ".svg" else {"Software": None}
        try:
            figure.savefig(out, dpi=150, facecolor="white", metadata=metadata)
        except OSError as error:
            raise UsageError(f"cannot write {out}: {error.strerror or error}") from error
        finally:
            pyplot.close(figure)


def _draw_roofline(axes: Axes, run: BenchRun) -> None:
    """Rate over intensity, one point a product and contender, below the roof."""
    ours, baseline = pair(run)
    points: list[float] = []
    for word, colour, marker in ((baseline, _THEIRS, "x"), (ours, _OURS, "o")):
        if word is None:
            continue
        xs, ys = [], []
        for result in run.results:
            reading = result.reading(word)
            if reading is not None:
                xs.append(result.product.flops / result.product.nbytes)
                ys.append(result.product.flops / reading.microseconds * 1e-6)
        face = "none" if marker == "o" else colour
        axes.plot(xs, ys, marker, color=colour, markerfacecolor=face, markersize=5, label=run.names[word])
        points += xs
    low, high = min(points) / 2, max(points) * 2
    ridge = 1e3 * run.peak_tflops / run.bandwidth_gb_s
    corners = sorted({low, min(max(ridge, low), high), high})
    roof = [min(run.peak_tflops, x * run.bandwidth_gb_s * 1e-3) for x in corners]
    axes.plot(corners, roof, color="black", linewidth=1.1)
    axes.annotate(
        f"{run.peak_tflops:.1f} TFLOP/s, {run.bandwidth_gb_s / 1000:.1f} TB/s",
        (corners[-1], roof[-1]),
        xytext=(-2, 4),
        textcoords="offset points",
        ha="right",
        fontsize=8,
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(_plain)
    axes.yaxis.set_major_formatter(_plain)
    axes.set_xlabel("operations per byte that must move")
    axes.set_ylabel("TFLOP/s")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=8)


def _plain(value: float, _: float) -> str:
    """A tick of a logarithmic axis as people write it."""
    return f"{value:,g}"


def _draw_families(axes: Axes, run: BenchRun, families: list[str]) -> None:
    """One line a family: its products as points, their geometric mean as a bar's end."""
    import matplotlib

    found = ratios(run)
    _, baseline = pair(run)
    values = {
        family: [ratio for result, ratio in found.values() if result.product.family == family]
        for family in families
    }
    families = sorted(families, key=lambda family: statistics.geometric_mean(values[family]))
    for place, family in enumerate(families):
        mean = statistics.geometric_mean(values[family])
        colour = _OURS if mean >= 1 else _THEIRS
        end = min(mean, _MOST)
        axes.barh(place, end - 1, left=1, height=0.6, color=colour, alpha=0.35)
        shown = [min(value, _MOST) for value in values[family]]
        colours = [_OURS if value >= 1 else _THEIRS for value in shown]
        axes.scatter(shown, [place] * len(shown), s=14, c=colours, zorder=3)
        most = max(values[family])
        beyond = f" (one {most:.0f})" if most > _MOST else ""
        axes.annotate(
            f"{mean:.2f}{beyond}",
            (max(1.0, end, *shown), place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.axvline(1, color="black", linewidth=0.9)
    axes.set_yticks(range(len(families)), families)
    axes.set_xscale("log")
    every = [min(value, _MOST) for group in values.values() for value in group]
    low, high = min(0.8, min(every) / 1.15), max(1.25, max(every) * 2.0)
    ticks = [tick for tick in (0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 2.8, 4, 8) if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.set_xlim(low, high)
    axes.set_xlabel(f"times as fast as {run.names[baseline or '']}; bar: geometric mean")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
