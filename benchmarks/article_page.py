"""Puts the measured figures into docs/article.md; with `--check` says whether they are in it already.

    python benchmarks/article_page.py

The page's words are written by hand. Its tables stand between `<!-- NAME -->` and `<!-- end of NAME -->`,
single figures between `<!-- = NAME ARGUMENTS -->` and `<!-- end -->`; both come from `benchmarks/results`,
the registry of the rungs and that of the probes. Figures that have not been taken read "not measured yet".
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from article_data import MISSING, Results, all_numbers, percent, table
from article_sizes import SIZE_PARTS
from tilewave.device import get_spec
from tilewave.lab.judge import CLOSE
from tilewave.lab.probe_catalog import PROBES
from tilewave.lab.records import Row
from tilewave.lab.registry import Rung, get_rung
from truth_report import RUNG_FIGURES

PAGE = Path("docs/article.md")
Part = Callable[[Results], Iterator[str]]


def make(text: str, results: Results) -> str:
    """The page with all parts and figures made anew."""
    for name in re.findall(r"^<!-- ((?!end)[^=\n]+?) -->$", text, re.MULTILINE):
        lines = "\n".join(part_of(name)(results))
        pattern = re.compile(
            rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end of {re.escape(name)} -->)", re.DOTALL
        )
        if len(pattern.findall(text)) != 1:
            raise SystemExit(f"the page has no end, or more than one, of part {name!r}")
        text = pattern.sub(lambda found, lines=lines: f"{found[1]}{lines}\n{found[2]}", text)
    return re.sub(
        r"<!-- = (.+?) -->.*?<!-- end -->", lambda found: _figure(found[1], results), text, flags=re.DOTALL
    )


def _figure(asked: str, results: Results) -> str:
    name, *arguments = asked.split()
    if name not in results.calls:
        raise SystemExit(f"unknown figure {asked!r}; known are {', '.join(results.calls)}")
    return f"<!-- = {asked} -->{results.calls[name](*arguments)}<!-- end -->"


def part_of(name: str) -> Part:
    """What makes the part of this name."""
    kind, _, argument = name.partition(" ")
    if kind == "rung":
        return lambda results: rung_part(get_rung(argument), results)
    if kind == "probe":
        return lambda results: probe_part(argument, results)
    parts: dict[str, Part] = {"machines": machines, "overview": overview, "origin": origin, **SIZE_PARTS}
    parts["other probes"] = other_probes
    if name not in parts:
        raise SystemExit(f"unknown part {name!r}; known are rung NN, probe NAME, {', '.join(parts)}")
    return parts[name]


def machines(results: Results) -> Iterator[str]:
    """The two GPUs side by side."""
    specs = [get_spec(name) for name in ("GB10", "H200")]
    peaks = [spec.peak_fp32_tflops for spec in specs]
    rows: list[tuple[str, list[str]]] = [
        ("SMs", [str(spec.sms) for spec in specs]),
        ("FP32 peak, TFLOP/s", [f"{peak:.1f}" for peak in peaks]),
        ("FP32 peak an SM, GFLOP/s", [f"{1000 * p / s.sms:.0f}" for p, s in zip(peaks, specs, strict=True)]),
        ("registers an SM", [f"{spec.registers_per_sm:,}" for spec in specs]),
        ("shared memory an SM, KiB", [f"{spec.shared_per_sm / 1024:.0f}" for spec in specs]),
        ("L2 cache, MiB", [f"{spec.l2_bytes / 2**20:.0f}" for spec in specs]),
        ("memory bandwidth, GB/s", [f"{spec.bandwidth_gb_s:,.0f}" for spec in specs]),
        (
            "operations at peak for each byte of bandwidth",
            [f"{1000 * p / s.bandwidth_gb_s:.0f}" for p, s in zip(peaks, specs, strict=True)],
        ),
        ("power, W", [f"{spec.power_w:.0f}" if spec.power_w else "" for spec in specs]),
    ]
    yield from table(["", "GB10 (the article's)", "H200 (ours)"], [(name, *cells) for name, cells in rows])


def overview(results: Results) -> Iterator[str]:
    """Every step's gain on both GPUs."""
    rows = []
    for number in all_numbers():
        rung = get_rung(number)
        article = rung.reported.throughput or ("-" if rung.builds_on is None else "not told")
        base = "-" if rung.builds_on is None else f"{rung.builds_on:02d}"
        gains = []
        for size in (1024, 2048, 2049, 4096):
            ratio = None if rung.builds_on is None else results.ratio(number, rung.builds_on, size)
            gains.append("-" if rung.builds_on is None else percent(ratio))
        rows.append((f"[{rung.title}](#{anchor(rung)})", base, article, *gains))
    header = ["rung", "against", "the article, GB10", "H200, 1024", "2048", "2049", "4096"]
    yield from table(header, rows, left=(0, 1, 2))


def anchor(rung: Rung) -> str:
    """The link target of a rung's heading, as Markdown renderers make it."""
    return re.sub(r"[^a-z0-9 -]", "", f"rung {rung.title}".lower()).replace(" ", "-")


def origin(results: Results) -> Iterator[str]:
    """Where the figures come from."""
    ladder = results.ladder
    session = ladder.sessions[-1]
    compiler = session["compiler"]
    yield (
        f"Times: one {ladder.device}, driver {session['driver']}, {compiler}, against "
        f"{ladder.baselines[-1].name} with TF32 off; fresh N(0,1) data, contenders in turn, medians. "
        "Rounds and cuBLAS's rate by size:"
    )
    yield ""
    sizes = ladder.sizes()
    rounds = []
    for size in sizes:
        taken = {len(row.speed.milliseconds) for row in ladder.rows if row.size == size and row.speed}
        rounds.append(str(min(taken)) if taken else MISSING)
    rates = [results.ladder.baseline(size) for size in sizes]
    cells = [
        ("rounds", *rounds),
        ("cuBLAS, TFLOP/s", *(f"{row.speed.tflops:.1f}" if row else "" for row in rates)),
    ]
    yield from table(["N", *sizes], cells)
    yield ""
    yield f"Counts: the emulator, kernels compiled by {results.counts_compiler} for each of the two GPUs."


def rung_part(rung: Rung, results: Results) -> Iterator[str]:
    """A rung's speed, compiled figures, predictions and hardware readings."""
    sizes = results.ladder.sizes()
    rows: list[list[object]] = [["H200, TFLOP/s"], ["share of cuBLAS"]]
    if rung.builds_on is not None:
        rows.append([f"against rung {rung.builds_on:02d}"])
    for size in sizes:
        speed = results.speed(rung.number, size)
        rows[0].append(MISSING if speed is None else f"{speed:.1f}")
        rows[1].append(results.share(str(rung.number), str(size)))
        if rung.builds_on is not None:
            rows[2].append(percent(results.ratio(rung.number, rung.builds_on, size)))
    yield from table(["N", *sizes], rows)
    yield ""
    yield f"The article (GB10): {results.reported(str(rung.number))}. {_compiled(rung, results)}"
    if rung.predictions:
        yield ""
        yield from table(
            ["figure", "predicted", "emulator, GB10", "emulator, H200", "because"],
            _predictions(rung, results),
            left=(0, 4),
        )
    yield ""
    yield _hardware(rung, results)


def _compiled(rung: Rung, results: Results) -> str:
    parts = []
    for gpu in ("GB10", "H200"):
        build = results.row(gpu, rung.number, 2048).build
        blocks = f"{build.blocks_per_sm} block{'s' if build.blocks_per_sm > 1 else ''} an SM"
        parts.append(
            f"{gpu}: {build.registers} registers, {build.spill_store_bytes} bytes of spills, {blocks}"
        )
    timed = results.ladder.find(rung.number, 2048)
    if timed is not None:
        parts[-1] += f" (as timed: {timed.build.registers} and {timed.build.spill_store_bytes})"
    return f"Compiled for the {'; for the '.join(parts)}."


def _predictions(rung: Rung, results: Results) -> Iterator[Sequence[object]]:
    for prediction in rung.predictions:
        cells = []
        wanted = ""
        for gpu in ("GB10", "H200"):
            row = results.row(gpu, rung.number, prediction.size)
            outcome = _outcome(row, prediction.counter, prediction.why)
            if outcome is None:
                cells.append("-")
                continue
            wanted = outcome.predicted
            cells.append(f"{outcome.found}{'' if outcome.holds is not False else ' (!)'}")
        where = f"N = {prediction.size}" + (f", {prediction.sms} SMs" if prediction.sms else "")
        yield prediction.counter.replace("_", " "), f"{wanted} ({where})", *cells, prediction.why


def _outcome(row: Row, counter: str, why: str):
    what = counter.replace("_", " ")
    return next((one for one in row.outcomes if (one.what, one.why) == (what, why)), None)


def _hardware(rung: Rung, results: Results) -> str:
    compared = equal = 0
    shapes = []
    for entry in results.counters_of_hardware:
        if entry["rung"] != rung.title:
            continue
        shapes.append(" x ".join(map(str, entry["shape"])))
        emulator = entry["emulator"]
        counts = dict(emulator)
        # The profiler's loads hold the copies, and its requests only accesses that some lane takes part in.
        counts["global_load_requests"] = emulator.get("global_loads", 0) + emulator.get("copies", 0)
        counts["global_store_requests"] = emulator.get("global_stores", 0)
        counts["global_load_sectors"] = emulator.get("global_load_sectors", 0) + emulator.get(
            "copy_sectors", 0
        )
        for name in RUNG_FIGURES:
            if name in entry["hardware"] and name != "copy_conflicts":  # these hang on what L1 holds
                compared += 1
                equal += entry["hardware"][name] == counts.get(name, 0)
    if not compared:
        return f"Read by a profiler: {MISSING}."
    return (
        f"Nsight Compute on an H200 at {' and '.join(shapes)}: {equal} of {compared} counters are the "
        "emulator's ([truth table](truth-table.md))."
    )


def probe_part(name: str, results: Results) -> Iterator[str]:
    """What a probe asks, and what came out."""
    probe = PROBES.get(name)
    if probe is None:
        raise SystemExit(f"there is no probe {name!r}; there are {', '.join(PROBES)}")
    entry = results.probes.get(name)
    yield f"`tilewave probe {name}`: {probe.question}"
    yield ""
    if entry is None:
        yield f"On an H200: {MISSING}."
        return
    sizes = [at["size"] for at in entry["sizes"] if at["timed"]]
    rows = []
    for key, variant in entry["variants"].items():
        label = variant["label"] + ("" if variant["product"] else " (not a product)")
        cells: list[str] = []
        for size in sizes:
            timed = results.timed(name, key, size)
            if timed is None or timed["speed"] is None:
                cells.append(MISSING)
                continue
            against = "" if timed["ratio"] is None else f", {percent(timed['ratio'])}"
            cells.append(f"{timed['speed']['tflops']:.1f}{against}")
        build = entry["examined"].get(key, {}).get("build")
        built = "" if build is None else f"{build['registers']} / {build['spill_store_bytes']}"
        article = variant["reported"]
        if variant["reported_ratio"] is not None and "%" not in article:
            article = f"{article}, {percent(variant['reported_ratio'])}"
        rows.append((label, article or "-", built, *cells))
    header = ["kernel", "the article", "registers / spills", *(f"H200, N = {size}" for size in sizes)]
    yield from table(header, rows, left=(0, 1))
    judged = [one for one in entry["judged"] if one["emulated"] is not None]
    if judged:
        missed = [
            one for one in judged if abs(one["emulated"] - one["expected"]) > CLOSE * abs(one["expected"])
        ]
        yield ""
        told = "".join(
            f"; not {one['figure'].replace('_', ' ')} of {one['variant']}: {one['expected']:.4g} expected, "
            f"{one['emulated']:.4g} found"
            + ("" if one["hardware"] is None else f", {one['hardware']:.4g} read on the H200")
            for one in missed
        )
        held = len(judged) - len(missed)
        yield f"Expected of the counters, and found in the emulator: {held} of {len(judged)}{told}."


def other_probes(results: Results) -> Iterator[str]:
    """The probes that have no place of their own on the page."""
    named = set(re.findall(r"^<!-- probe (\S+) -->$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    rest = [name for name in PROBES if name not in named]
    for index, name in enumerate(rest):
        if index:
            yield ""
        yield from probe_part(name, results)
    if not rest:
        yield "None: every probe of the registry has its place above."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if the page is out of date"
    )
    options = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    made = make(text, Results())
    if options.check:
        sys.exit(0 if made == text else f"{PAGE} is out of date: run python benchmarks/article_page.py")
    PAGE.write_text(made, encoding="utf-8")
    print(f"{PAGE}: {'unchanged' if made == text else 'written'}")


if __name__ == "__main__":
    main()
