"""The parts of docs/article.md about sizes: what 2049 costs, and what the selectors choose."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator

from article_data import MISSING, Results, percent, table
from tilewave.device import get_spec
from tilewave.lab.ragged import CASES, RUNGS, per_64_fmas, slowdown
from tilewave.lab.registry import get_rung
from tilewave.lab.selection import SELECTORS, VARIANTS, losses_if, times_as_slow, verdicts

WORST = 5


def scalar_counts(results: Results) -> Iterator[str]:
    """What the kernel for ragged sizes asks of the machine, beside the one for wide loads."""
    counts = results.ragged_counts["counts"]
    rows = []
    for number in RUNGS:
        cells: list[object] = [get_rung(number).title]
        for case in ("wide", "scalar", "both"):
            scaled = per_64_fmas(counts[case][str(number)]["counted"])
            loads = scaled["global_loads"] + scaled["copies"]
            sectors = scaled["global_load_sectors"] + scaled["copy_sectors"]
            cells += [f"{loads:.2f}", f"{sectors:.1f}"]
        for case in ("wide", "scalar"):
            cells.append(f"{per_64_fmas(counts[case][str(number)]['counted'])['warp_instructions']:.1f}")
        rows.append(tuple(cells))
    header = ["rung", "loads, wide", "sectors", "loads, scalar", "sectors", "loads, 2049", "sectors"]
    yield from table([*header, "instructions, wide", "scalar"], rows)


def rounds(results: Results) -> Iterator[str]:
    """How much longer 2049 should take than 2048 by the rounds of tiles, from the times at 1024 and 2048."""
    rows = []
    for number in RUNGS:
        rung = get_rung(number)
        times = {size: _time_per_slice(results, number, size) for size in (1024, 1025, 2048, 2049)}
        build = results.ladder.find(number, 2048)
        if build is None or None in times.values():
            continue
        alone, ragged, full, measured = (time or 0.0 for time in times.values())
        tiles = [math.prod(rung.grid(size, size)) for size in (2048, 2049)]
        rows.append(
            (
                rung.title,
                build.build.blocks_per_sm,
                f"{tiles[0]} to {tiles[1]}",
                f"x {1 + alone / full:.2f}",
                "x 2.00" if build.build.blocks_per_sm > 1 else "-",
                f"x {ragged / alone:.2f}",
                f"**x {measured / full:.2f}**",
            )
        )
    header = ["rung", "blocks an SM", "tiles", "late tiles alone", "late tiles in pairs"]
    yield from table([*header, "ragged kernel (1025 : 1024)", "measured (2049 : 2048)"], rows)


def _time_per_slice(results: Results, number: int, size: int) -> float | None:
    """Milliseconds on the H200 for each slice of K."""
    row = results.ladder.find(number, size)
    if row is None or row.speed is None:
        return None
    return row.speed.median_ms / -(-size // get_rung(number).tile.bk)


def ragged_times(results: Results) -> Iterator[str]:
    """How much longer each case takes for equal work."""
    if results.ragged is None or not results.ragged["complete"]:
        yield f"On an H200 (`python benchmarks/ragged.py`): {MISSING}."
        return
    times = results.ragged["times"]
    rows = []
    for number in RUNGS:
        factors = [slowdown(times, case.key, number) for case in CASES[1:]]
        by_key = {case.key: factor for case, factor in zip(CASES[1:], factors, strict=True)}
        product = by_key["odd rows"] * by_key["more tiles"]
        rows.append((get_rung(number).title, *(f"x {factor:.2f}" for factor in factors), f"x {product:.2f}"))
    header = ["rung", *(case.key for case in CASES[1:]), "odd rows times more tiles"]
    yield from table(header, rows)
    yield ""
    yield (
        "Cases: "
        + "; ".join(
            f"*{case.key}* at {' x '.join(map(str, case.shape))} ({case.changes})" for case in CASES[1:]
        )
        + ". Each against wide loads at 2048, per multiply-add of the product."
    )


def ragged_places(results: Results) -> Iterator[str]:
    """Where the tiles of the second round ran."""
    if results.ragged is None or not results.ragged["placements"]:
        yield f"On an H200 (`python benchmarks/ragged.py`): {MISSING}."
        return
    rows = []
    for number in RUNGS:
        cells: list[object] = [get_rung(number).title]
        for key in ("wide", "ragged"):
            found = results.ragged["placements"][key][str(number)]
            late = f"{found['late_alone']} alone, {found['late_shared']} shared"
            lengths = [found["round_us"], found["alone_us"], found["shared_us"]]
            told = " / ".join("-" if length is None else f"{length:.0f}" for length in lengths)
            cells += [late, told, f"{found['total_us']:.0f}"]
        rows.append(tuple(cells))
    header = ["rung", "late blocks, wide", "us: first / alone / shared", "all"]
    yield from table([*header, "late blocks, ragged", "us: first / alone / shared", "all"], rows, left=(0, 1))


def selection(results: Results) -> Iterator[str]:
    """Every product of the selection suite: times of the variants, the choices, and what they cost."""
    data = results.selection
    if data is None or not data["rows"]:
        yield f"On an H200 (`python benchmarks/selection.py`): {MISSING}."
        return
    places = {(place["m"], place["n"], place["k"]): place["kind"] for place in data["places"]}
    taken = sorted(len(row["rungs"][str(VARIANTS[0])]["speed"]["milliseconds"]) for row in data["rows"])
    yield (
        f"{len(data['rows'])} of {len(places)} products, drawn with seed {data['seed']}; TFLOP/s, medians of "
        f"{taken[0]} to {taken[-1]} rounds; the best variant is bold, the choices' times are against it."
    )
    yield ""
    rows = []
    for row in sorted(data["rows"], key=lambda row: (row["kind"], row["m"] * row["n"] * row["k"])):
        cells: list[object] = [f"{row['m']} x {row['n']} x {row['k']}", row["kind"]]
        best = next(verdicts({"rows": [row]}, 23)).best
        for number in VARIANTS:
            rate = f"{row['rungs'][str(number)]['speed']['tflops']:.1f}"
            cells.append(f"**{rate}**" if number == best else rate)
        for selector in SELECTORS:
            found = next(verdicts({"rows": [row]}, selector))
            loss = "best" if found.chosen == found.best else percent(found.loss)
            cells.append(f"{found.chosen}: {loss}")
        base = row["baseline"]
        cells.append("" if base is None else f"{base['tflops']:.1f}")
        rows.append(tuple(cells))
    header = ["M x N x K", "kind", *(f"rung {number}" for number in VARIANTS)]
    yield from table(
        [*header, *(f"rung {selector} takes" for selector in SELECTORS), "cuBLAS"], rows, left=(0, 1)
    )


def selection_summary(results: Results) -> Iterator[str]:
    """How often the selectors are right, by kind of product."""
    data = results.selection
    if data is None or not data["rows"]:
        yield f"On an H200 (`python benchmarks/selection.py`): {MISSING}."
        return
    rows: list[tuple[object, ...]] = []
    kinds = sorted({row["kind"] for row in data["rows"]})
    for kind in [*kinds, None]:
        chosen = [row for row in data["rows"] if kind in (None, row["kind"])]
        cells: list[object] = [kind or "all", len(chosen)]
        for selector in SELECTORS:
            found = list(verdicts({"rows": chosen}, selector))
            losses = [verdict.loss for verdict in found]
            right = sum(verdict.chosen == verdict.best for verdict in found)
            cells += [right, percent(statistics.geometric_mean(losses)), percent(max(losses))]
        rows.append(tuple(cells))
    header = ["kind", "products"]
    for selector in SELECTORS:
        header += [f"rung {selector}: best", "lost on average", "at worst"]
    yield from table(header, rows)


def selection_worst(results: Results) -> Iterator[str]:
    """The costliest choices of rung 23, with what the estimate said and what the clock said."""
    data = results.selection
    if data is None or not data["rows"]:
        yield f"On an H200 (`python benchmarks/selection.py`): {MISSING}."
        return
    found = zip(data["rows"], verdicts(data, 23), strict=True)
    worst = sorted(found, key=lambda pair: -pair[1].loss)[:WORST]
    rows = []
    for row, verdict in worst:
        cells: list[object] = [f"{row['m']} x {row['n']} x {row['k']}", verdict.chosen]
        for number in VARIANTS:
            weighed = row["choices"]["23"]["weighed"][str(number)]
            said = "ruled out" if weighed["cost"] is None else f"{weighed['cost']:.2f}"
            cells.append(f"{said} / {times_as_slow(row, number, verdict.chosen):.2f}")
        rows.append(tuple(cells))
    yield from table(["M x N x K", "taken", *(f"rung {number}" for number in VARIANTS)], rows)
    yield ""
    yield "Each cell: the estimate, then the measured time, relative to the choice's."


def selection_if(results: Results) -> Iterator[str]:
    """What rung 23 would have lost if its estimate had known this GPU a little better."""
    data = results.selection
    if data is None or not data["rows"]:
        yield f"On an H200 (`python benchmarks/selection.py`): {MISSING}."
        return
    lone = lone_small_tile(results)
    rows = []
    for name, combining, share in (
        ("as it is", 1.0, 0.5),
        ("combining at a quarter", 0.25, 0.5),
        ("lone small tiles at their time", 1.0, lone),
        ("both", 0.25, lone),
    ):
        losses = losses_if(data, get_spec("H200"), combining, share)
        close = sum(loss <= 1.02 for loss in losses)
        rows.append((name, close, percent(statistics.geometric_mean(losses)), percent(max(losses))))
    header = [
        "rung 23's estimate",
        f"within 2 % of the best (of {len(data['rows'])})",
        "lost on average",
        "at worst",
    ]
    yield from table(header, rows)


def lone_small_tile(results: Results) -> float:
    """Time of a small tile alone on an SM relative to two that share one, by rung 17 at 1024 and 2048."""
    alone, shared = (_time_per_slice(results, 17, size) for size in (1024, 2048))
    if alone is None or shared is None:
        raise SystemExit("the ladder lacks rung 17 at 1024 or 2048")
    return alone / shared


SIZE_PARTS: dict[str, Callable[[Results], Iterator[str]]] = {
    "scalar counts": scalar_counts,
    "rounds": rounds,
    "ragged times": ragged_times,
    "ragged places": ragged_places,
    "selection": selection,
    "selection summary": selection_summary,
    "selection worst": selection_worst,
    "selection if": selection_if,
}
