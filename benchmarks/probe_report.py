"""Makes the tables of docs/probes.md from the committed results of the probes.

``tilewave probe all --budget 200 --json benchmarks/results/probes_h200.json`` on an H200 measures anew;
``python benchmarks/probe_report.py`` then writes the page's parts, and with ``--check`` fails if they differ.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tilewave.lab.probe_command import NOT_A_PRODUCT, amount, stalls_told
from tilewave.lab.probe_records import Findings, Probe
from tilewave.lab.probe_results import Results, load_results

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "probes.md"
RESULTS = ROOT / "benchmarks" / "results" / "probes_h200.json"


def main() -> None:
    """Write or check the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    text = PAGE.read_text()
    new = render(text, load_results(RESULTS))
    if not parser.parse_args().check:
        PAGE.write_text(new)
    elif new != text:
        sys.exit(f"{PAGE} is out of date: run python benchmarks/probe_report.py")


def render(text: str, results: Results) -> str:
    """The page with every part between its two comments made anew."""
    parts = {"setting": "\n".join(_setting(results))}
    parts |= {probe.name: "\n".join(_probe(probe, findings)) for probe, findings in results.found}
    pattern = re.compile(r"(<!-- ([\w-]+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
    places = [found[2] for found in pattern.finditer(text)]
    if sorted(places) != sorted(parts):
        raise SystemExit(f"the page has parts for {', '.join(places)}, the results for {', '.join(parts)}")
    return pattern.sub(lambda found: f"{found[1]}{parts[found[2]]}\n{found[3]}", text)


def _setting(results: Results) -> Iterator[str]:
    environment = results.environment
    yield (
        f"Measured on an {environment['gpu']} ({results.spec.sms} SMs, driver {environment['driver']}) with "
        f"{environment['compiler']} on {environment['date'][:10]}."
    )


def _probe(probe: Probe, findings: Findings) -> Iterator[str]:
    yield from _kernels(probe, findings)
    yield ""
    yield from _times(probe, findings)
    yield from _predictions(probe, findings)
    if findings.tables:
        yield from ("", "```", *findings.tables, "```")
    for at in findings.sizes:
        yield ""
        heading = f"N = {at.size}: "
        yield heading.strip()
        yield ""
        yield from (f"- {line.removeprefix(heading)}" for line in at.words)
        for variant in probe.variants:
            told = stalls_told(at.profiled.get(variant.key, {}))
            if told:
                yield f"- Stalls of {variant.label}: {told}."
    if findings.notes:
        yield ""
        yield from (f"Note: {note}.\n" for note in findings.notes[:-1])
        yield f"Note: {findings.notes[-1]}."


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _kernels(probe: Probe, findings: Findings) -> Iterator[str]:
    yield _row("kernel", "registers", "spills", "blocks/SM", "passes/read", "passes/write")
    yield _row(*["---"] * 6)
    for variant in probe.variants:
        examined = findings.examined.get(variant.key)
        cells: list[object] = ["-"] * 5
        if examined is not None:
            build, counted = examined.build, examined.counted
            cells = [build.registers, f"{build.spill_store_bytes} B", build.blocks_per_sm]
            for passes in (counted.passes_per_read, counted.passes_per_write) if counted else (None, None):
                cells.append("-" if passes is None else f"{passes:.2f}")
        yield _row(variant.label + ("" if variant.rung.product else f" ({NOT_A_PRODUCT})"), *cells)


def _times(probe: Probe, findings: Findings) -> Iterator[str]:
    yield _row("N", "kernel", "ms", "TFLOP/s", "throughput against", "the article")
    yield _row(*["---"] * 6)
    for at in findings.sizes:
        for variant in probe.variants:
            timed = at.timed.get(variant.key)
            if timed is None or timed.speed is None:
                yield _row(at.size, variant.label, *["-"] * 3, variant.reported)
                continue
            other = probe.against(variant)
            against = "-"
            if timed.ratio is not None and other is not None:
                against = f"x {timed.ratio:.3f} ({probe.variant(other).label})"
            rate = f"{timed.speed.tflops:.2f}"
            if not variant.rung.product:
                rate += f" ({NOT_A_PRODUCT})"
            yield _row(
                at.size, variant.label, f"{timed.speed.median_ms:.4f}", rate, against, variant.reported
            )


def _predictions(probe: Probe, findings: Findings) -> Iterator[str]:
    yield ""
    told = []
    for source in ("emulated", "hardware"):
        verdicts = [judged.holds(getattr(judged, source)) for judged in findings.judged]
        known = [verdict for verdict in verdicts if verdict is not None]
        if known:
            name = {"emulated": "the emulator", "hardware": "the profiler"}[source]
            told.append(f"{sum(known)} of {len(known)} hold in {name}")
    yield f"Predictions: {'; '.join(told)}."
    for judged in findings.judged:
        for name, value in (("the emulator", judged.emulated), ("the profiler", judged.hardware)):
            if judged.holds(value) is False:
                figure = judged.figure.replace("_", " ")
                label = probe.variant(judged.variant).label
                yield (
                    f"Not so: {figure} of {label}, {amount(judged.expected, judged.is_ratio)} predicted and "
                    f"{amount(value, judged.is_ratio)} in {name}."
                )


if __name__ == "__main__":
    main()
