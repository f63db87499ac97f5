"""Puts the judgement of an H200's calibration into docs/planner.md; `--check` says whether it is there.

    python benchmarks/calibration_page.py [--check]

Everything comes from benchmarks/results/gemm_calibration_h200.json, which `tilewave calibrate` writes, and
stands between `<!-- calibration -->` and `<!-- end of calibration -->`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tilewave.planner.gemm.costs import THEORY

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gemm_calibration_h200.json"
CALIBRATION = ROOT / "src" / "tilewave" / "planner" / "gemm" / "calibration" / "H200.json"
PAGE = ROOT / "docs" / "planner.md"
BEGIN, END = "<!-- calibration -->", "<!-- end of calibration -->"
LABELS = {"theory": "theory's constants", "calibrated": "calibrated, each product's own fold left out"}


def text_of(record: dict[str, Any], calibration: dict[str, Any]) -> str:
    """Tables of a record of readings, fitted and judged."""
    held_out = record["held_out"]
    populations = Counter(reading.get("drawn", "random") for reading in record["readings"])
    drawn = ", ".join(f"{count:,} {name}" for name, count in populations.most_common())
    fitted = calibration["source"].split(": ", 1)[1]
    lines = [
        f"{len(record['readings']):,} readings on an {record['device']} ({drawn}), of which",
        f"{fitted}, those of kernels that were still there, were fitted.",
        "The time of the candidate that the model prefers, over that of the fastest of those measured at the",
        "product:",
        "",
        "| constants | products | median | 95th percentile | worst | random ones: median | 95th percentile |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, label in LABELS.items():
        judged = held_out[name]
        everything, at_random = judged["all"], judged["random"]
        lines.append(
            f"| {label} | {judged['problems']} | {everything['median']:.3f} | {everything['p95']:.3f} | "
            f"{everything['most']:.2f} | {at_random['median']:.3f} | {at_random['p95']:.3f} |"
        )
    shares = {name: held_out[name]["within"] for name in LABELS}
    lines += [
        "",
        "Predicted against measured time of all candidates: root mean square of the logarithm, and the share",
        "of predictions within so much of the reading:",
        "",
        "| constants | error | " + " | ".join(f"{float(share):.0%}" for share in shares["theory"]) + " |",
        "|---|---:|" + "---:|" * len(shares["theory"]),
    ]
    for name, label in LABELS.items():
        within = " | ".join(f"{value:.0%}" for value in shares[name].values())
        lines.append(f"| {label} | {held_out[name]['error']:.3f} | {within} |")
    lines += ["", "| constant | theory | H200 |", "|---|---:|---:|"]
    for name, entry in calibration["constants"].items():
        constant = getattr(THEORY, name)
        lines.append(f"| {name} | {constant.value:.4g} | {entry['value']:.4g} {constant.unit} |")
    lines += [
        "",
        "The twenty choices that lose most, and what was misjudged:",
        "",
        "| product | loses | choice | us | fastest | us | reason |",
        "|---|---:|---|---:|---|---:|---|",
    ]
    for worst in held_out["calibrated"]["worst"]:
        lines.append(
            f"| {worst['problem']} | {worst['ratio']:.2f} | {worst['chosen']} | {worst['us']:.1f} | "
            f"{worst['best']} | {worst['best_us']:.1f} | {worst['reason']} |"
        )
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    options = parser.parse_args()
    record = json.loads(RESULTS.read_text(encoding="utf-8"))
    calibration = json.loads(CALIBRATION.read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    wanted = f"{before}{BEGIN}\n{text_of(record, calibration)}\n{END}{after}"
    if options.check:
        sys.exit(None if page == wanted else f"out of date: {PAGE.relative_to(ROOT)}")
    PAGE.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
