"""Puts the suite's readings into README.md and docs/speed.md, and draws them; `--check` says whether it has.

    python benchmarks/suite_page.py [--check]

Everything comes from benchmarks/results/suite_h200.json, which `tilewave bench workloads squares --json FILE`
writes. The texts stand between `<!-- suite NAME -->` and `<!-- end of suite NAME -->`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilewave.bench.products.picture import draw as draw_run
from tilewave.bench.products.records import BenchRun, load_run
from tilewave.bench.products.table import pair, ratios
from tilewave.kernels.ship import every_instance

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "suite_h200.json"
PICTURE = ROOT / "docs" / "images" / "suite-h200.png"
ROOFLINE = ROOT / "docs" / "images" / "suite-h200-roofline.png"
PAGES = ("README.md", "docs/speed.md")
FAMILIES = {
    "deepbench": "DeepBench",
    "harvested-mixed": "other collections",
    "llm": "transformers",
    "gnn": "graph networks",
    "md-potential": "potentials for molecular dynamics",
    "kmeans-knn": "k-means, nearest neighbours",
    "pca-covariance": "covariance for PCA",
    "batched-small": "batches of small products",
    "conv-im2col": "convolutions as products",
    "recsys": "recommender layers",
    "attention-fp32": "attention",
    "square-hpl": "squares of HPL",
    "odd": "odd sizes",
    "square": "squares, 256 to 8193",
}
# From Okabe and Ito's palette, made to be told apart by colour-blind readers.
FASTER, SLOWER = "#0072B2", "#D55E00"
HIGHEST = 4.0
"""Where the picture's axis ends: one product far above it would flatten all others."""
WIDTH = 118
"""Characters of a line of prose in the pages."""

Row = dict[str, Any]


class Suite:
    """The readings of one file: `ratio` is how many times as fast as cuBLAS a product ran."""

    def __init__(self, run: BenchRun) -> None:
        self.run = run
        ours, cublas = pair(run)
        self.rows: list[Row] = []
        for result, ratio in ratios(run).values():
            mine, theirs = result.reading(ours or ""), result.reading(cublas or "")
            assert mine is not None  # or there would be no ratio
            assert theirs is not None
            self.rows.append(
                {
                    "product": asdict(result.product),
                    "title": str(result.product),
                    "microseconds": mine.microseconds,
                    "cublas_microseconds": theirs.microseconds,
                    "ratio": ratio,
                    "plan": mine.plan,
                }
            )
        self.wrong = [one for one in run.results if one.product.name not in ratios(run)]
        self.environment: dict[str, Any] = run.environment

    @property
    def digest(self) -> str:
        """What the picture carries, so that one of other readings is found out."""
        shown = [[row["title"], f"{row['ratio']:.2f}"] for row in self.rows]
        return hashlib.sha256(json.dumps([shown, self.environment["gpu"]]).encode()).hexdigest()

    @property
    def ratios(self) -> list[float]:
        return [row["ratio"] for row in self.rows]

    def summary(self) -> Iterator[str]:
        """What all readings together say, the mean without its best reading beside the mean with it."""
        best = max(self.rows, key=lambda row: row["ratio"])
        others = statistics.geometric_mean([row["ratio"] for row in self.rows if row is not best])
        faster = sum(ratio > 1 for ratio in self.ratios)
        yield (
            f"Speed of `tilewave.matmul` in units of cuBLAS FP32 (TF32 off) over {len(self.rows)} products: "
            f"**{statistics.geometric_mean(self.ratios):.2f} in the geometric mean**, "
            f"{statistics.median(self.ratios):.2f} in the median, faster in {faster}. The mean leans on one "
            f"product ({best['title']}: {best['ratio']:.1f} times); without it, it is {others:.2f}."
        )
        if self.wrong:
            yield f"{len(self.wrong)} products failed and are left out."
        present = {instance.name for instance in every_instance()}
        gone = sum((row["plan"] or "").split(" ")[0] not in present for row in self.rows)
        if gone:
            yield (
                "**These are readings of earlier kernels**, most of which have been rewritten since "
                f"({gone} of the products' are gone). The library as it stands has not been measured over "
                "the suite yet."
            )

    def conditions(self) -> Iterator[str]:
        """Where and how it was measured."""
        at = self.environment
        packages = at["packages"]
        yield (
            f"One {at['gpu']}, driver {at['driver']}, {at['compiler']}, cuBLAS "
            f"{packages['nvidia-cublas']} through PyTorch {packages['torch']}, {at['date'][:10]}. Both from "
            "CUDA graphs in turn, random data, operands cold in L2, medians; answers checked against float64."
        )

    def families(self) -> Iterator[str]:
        """A row a kind of work."""
        yield "| products of | how many | times cuBLAS, geometric mean | slowest | fastest |"
        yield "| --- | ---: | ---: | ---: | ---: |"
        for family, title in FAMILIES.items():
            found = [row["ratio"] for row in self.rows if row["product"]["family"] == family]
            if found:
                mean = statistics.geometric_mean(found)
                yield f"| {title} | {len(found)} | {mean:.2f} | {min(found):.2f} | {max(found):.2f} |"

    def products(self) -> Iterator[str]:
        """A row a product."""
        yield "| | M x N x K, layout | us | cuBLAS, us | times cuBLAS | kernel and schedule |"
        yield "| --- | --- | ---: | ---: | ---: | --- |"
        for row in self.rows:
            yield (
                f"| {row['product']['name']} | {row['title']} | {row['microseconds']:.1f} | "
                f"{row['cublas_microseconds']:.1f} | {row['ratio']:.2f} | {row['plan']} |"
            )

    def part(self, name: str) -> str:
        """The text of this name."""
        parts = {
            "summary": textwrap.wrap(" ".join([*self.summary(), *self.conditions()]), WIDTH),
            "families": self.families(),
            "products": self.products(),
        }
        if name not in parts:
            raise SystemExit(f"unknown part {name!r}; known are {', '.join(parts)}")
        return "\n".join(parts[name])


def load(path: Path = RESULTS) -> Suite:
    """The committed readings. A family without a title is an error."""
    suite = Suite(load_run(path))
    unknown = {row["product"]["family"] for row in suite.rows} - set(FAMILIES)
    if unknown:
        raise SystemExit(f"{path.name} holds families without a title: {', '.join(sorted(unknown))}")
    return suite


def make(text: str, suite: Suite) -> str:
    """A page with all parts made anew."""
    pattern = re.compile(r"(<!-- suite (\w+) -->\n).*?(<!-- end of suite \2 -->)", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}{suite.part(found[2])}\n{found[3]}", text)


def draw(suite: Suite, path: Path) -> None:
    """One bar a product from 1, the speed of cuBLAS, sorted, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = sorted(suite.rows, key=lambda row: row["ratio"])
    ratios = [row["ratio"] for row in rows]
    with matplotlib.rc_context({"font.size": 9}):
        figure, axes = pyplot.subplots(figsize=(9, 3.4), layout="constrained")
        for place, ratio in enumerate(ratios):
            axes.bar(place, ratio - 1, bottom=1, width=0.8, color=FASTER if ratio > 1 else SLOWER)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_yscale("log")
        low, high = ratios[0] / 1.35, min(ratios[-1] * 1.2, HIGHEST)
        ticks = [tick for tick in (0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 2.8, 4) if low < tick < high]
        axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
        axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axes.set_xticks([])
        axes.set_xlim(-1, len(rows))
        axes.set_ylim(low, high)
        for side in ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)
        axes.set_ylabel("times cuBLAS FP32")
        axes.set_xlabel(f"{len(rows)} products, slowest beside cuBLAS first")
        for place in (0, len(rows) - 1):
            slowest = place == 0
            beyond = " (beyond this axis)" if ratios[place] > high else ""
            axes.annotate(
                f"{rows[place]['title']}: {ratios[place]:.2f}{beyond}",
                (place, min(ratios[place], high)),
                xytext=(-3, -3) if slowest else (-6, -3),
                textcoords="offset points",
                ha="left" if slowest else "right",
                va="top",
                fontsize=8,
            )
        gpu = suite.environment["gpu"]
        figure.suptitle(f"tilewave.matmul beside cuBLAS on an {gpu}", fontsize=10, x=0.01, ha="left")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, facecolor="white", metadata={"Software": None, "Source": suite.digest})
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if a page is out of date")
    options = parser.parse_args()
    suite = load()
    stale = []
    for name in PAGES:
        page = ROOT / name
        text = page.read_text(encoding="utf-8")
        made = make(text, suite)
        if made != text:
            stale.append(name)
            if not options.check:
                page.write_text(made, encoding="utf-8")
    if not PICTURE.exists() or suite.digest.encode() not in PICTURE.read_bytes():
        stale.append(str(PICTURE.relative_to(ROOT)))
    if options.check:
        sys.exit(f"out of date: {', '.join(stale)}" if stale else 0)
    draw(suite, PICTURE)
    draw_run(suite.run, ROOFLINE)
    print("\n".join(suite.summary()))


if __name__ == "__main__":
    main()
