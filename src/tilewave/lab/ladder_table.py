"""The ladder as tables for a terminal of 80 columns and more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tilewave.lab.records import Ladder, Row
from tilewave.lab.registry import RESOURCES, get_rung

_GOOD, _BAD, _DIM = "green", "bold red", "dim"


def print_ladder(ladder: Ladder, rungs: Sequence[int], sizes: Sequence[int], console: Console) -> None:
    """Print everything the ladder holds about these rungs and sizes."""
    rows = [row for row in ladder.rows if row.rung in rungs and row.size in sizes]
    if not rows:
        return
    for size in sizes:
        here = [row for row in rows if row.size == size]
        if any(row.speed for row in here):
            console.print(_speeds(ladder, here, size))
    by_rung = {row.rung: row for row in rows}  # what does not depend on the size
    console.print(_builds(list(by_rung.values())))
    for size in sizes:
        counted = [row for row in rows if row.size == size and row.counted is not None]
        if counted:
            console.print(_counters(counted, size))
    console.print(_legend(rows))
    for part in _predictions(_best_judged(rows)):
        console.print(part)
    console.print(_verdict(_best_judged(rows), rows))


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_style="bold",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        header_style="bold cyan",
        show_edge=False,
    )


def _columns(table: Table, names: Iterable[str]) -> None:
    table.add_column("rung", no_wrap=True, vertical="bottom")
    for name in names:
        # What the article says is prose: it wraps, so that no figure is cut off on a narrow terminal.
        prose = name.startswith("article")
        table.add_column(
            name,
            justify="right",
            vertical="bottom",
            no_wrap=not prose,
            max_width=17 if prose else None,
        )


def _rung(row: Row) -> Text:
    return Text.assemble((f"{row.rung:02d} ", _DIM), row.title)


def _speeds(ladder: Ladder, rows: Sequence[Row], size: int) -> RenderableType:
    baseline = ladder.baseline(size)
    table = _table(f"\nSpeed on {ladder.device} at N = M = K = {size}")
    _columns(
        table,
        [
            "TFLOP/s",
            "spread\n%",
            "of cuBLAS\n%",
            "step\n%",
            "article's\nstep",
            "error\nbounds",
            "from\ncuBLAS",
        ],
    )
    before: Row | None = None
    for row in rows:
        speed = row.speed
        step = Text("")
        if speed and before and before.speed and before.rung == row.rung - 1:
            gain = speed.tflops / before.speed.tflops - 1
            step = Text(f"{100 * gain:+.1f}")
        table.add_row(
            _rung(row),
            Text("wrong", _BAD) if speed is None else f"{speed.tflops:.2f}",
            "" if speed is None else f"{100 * speed.spread:.1f}",
            "" if speed is None or speed.over_baseline is None else f"{100 * speed.over_baseline:.1f}",
            step,
            Text(row.reported, _DIM),
            _error(row),
            "" if row.difference is None else f"{row.difference:.1e}",
        )
        before = row
    if baseline is not None:
        table.add_row(
            Text("cuBLAS", "bold"),
            f"{baseline.speed.tflops:.2f}",
            f"{100 * baseline.speed.spread:.1f}",
            "100",
            "",
            "",
            f"{baseline.error_in_bounds:.3f}",
            "",
        )
    return table


def _error(row: Row) -> Text:
    worst = row.worst_error
    if worst is None:
        return Text("")
    return Text(f"{worst:.3f}", "" if worst <= 1 else _BAD)


_SHORT = {"shared memory": "shared"}


def _builds(rows: Sequence[Row]) -> RenderableType:
    makers = sorted({f"{row.build.compiler} for {row.build.arch}" for row in rows})
    table = _table(f"\nWhat the compiler made of it ({', '.join(makers)})")
    _columns(
        table,
        ["\nregs", "spills\nB st/ld", "shared\nKiB", "blocks\nper SM", "occu-\npancy",
         "FMAs\na step", "error\nbounds", "limited by"],
    )  # fmt: skip
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
    for row in rows:
        build = row.build
        spills = f"{build.spill_store_bytes}/{build.spill_load_bytes}"
        table.add_row(
            _rung(row),
            str(build.registers),
            Text(spills, "yellow" if build.spill_store_bytes or build.spill_load_bytes else _DIM),
            f"{build.shared_bytes / 1024:.1f}",
            str(build.blocks_per_sm),
            f"{build.occupancy:.0%}",
            str(build.fma_per_step),
            _error(row),
            ", ".join(_SHORT.get(name, name) for name in build.limited_by),
        )
    return table


def _counters(rows: Sequence[Row], size: int) -> RenderableType:
    table = _table(f"\nWhat one launch does at N = M = K = {size} (emulator, in millions)")
    _columns(
        table,
        ["FMA\nshare", "shared\nreads", "16-byte\nreads", "passes\n/ read", "con-\nflicts", "shared\nwrites",
         "passes\n/ write", "global\nsectors"],
    )  # fmt: skip
    for row in rows:
        counted = row.counted
        assert counted is not None
        table.add_row(
            _rung(row),
            f"{counted.fma_share:.0%}",
            _millions(counted.shared_loads),
            _millions(counted.wide_shared_loads),
            _ratio(counted.passes_per_read),
            _millions(counted.shared_load_conflicts),
            _millions(counted.shared_stores),
            _ratio(counted.passes_per_write),
            _millions(counted.global_load_sectors + counted.global_store_sectors),
        )
    return table


def _millions(number: int) -> Text:
    if number == 0:
        return Text("-", _DIM)
    millions = number / 1e6
    digits = 0 if millions >= 1000 else 1 if millions >= 10 else 2
    return Text(f"{millions:,.{digits}f}")


def _ratio(value: float | None) -> Text:
    return Text("-", _DIM) if value is None else Text(f"{value:.2f}")


def _predictions(rows: Sequence[Row]) -> Iterator[RenderableType]:
    """For each rung its idea, what it should change and what came out, and what the article saw."""
    yield Text("\nWhat each rung should change, and what came out", style="bold")
    for row in rows:
        yield Text.assemble("\n", (f"{row.rung:02d} {row.title}  ", "bold cyan"), get_rung(row.rung).idea)
        table = Table.grid(padding=(0, 1))
        table.add_column(width=4, justify="right")
        table.add_column(width=21)
        table.add_column(width=11, justify="right")
        table.add_column(width=11, justify="right")
        table.add_column()
        for outcome in row.outcomes:
            table.add_row(
                _mark(outcome.holds),
                outcome.what,
                Text(outcome.predicted, _DIM),
                outcome.found,
                Text(f" {outcome.why}", _DIM),
            )
        if row.outcomes:
            yield table
        if row.reported or row.reported_figures:
            seen = "; ".join(text for text in (row.reported, row.reported_figures) if text)
            yield Padding(Text(f"article: {seen}", "italic"), (0, 0, 0, 5))


def _mark(holds: bool | None) -> Text:
    return {True: Text("✓", _GOOD), False: Text("✗", _BAD), None: Text("?", _DIM)}[holds]


_LEGEND = {
    "error": "largest distance from the float64 product, in units of what FP32 sums may be off by: at most 1",
    "from cuBLAS": "largest difference between an element here and cuBLAS's",
    "step": "change of TFLOP/s from the rung before; beside it what the article reports for its GB10",
    "spread": "slowest less fastest round, of the median",
    "spills": "bytes a thread stores to and loads from local memory, in the compiler's count",
    "occupancy": "resident warps of the warps an SM can hold, and which resource ends it",
    "FMAs per step": "independent multiply-adds a thread has to issue at each step along K",
    "passes": "turns of shared memory (ncu: wavefronts) that an access takes on average",
    "conflicts": "passes beyond those that the widths of the reads need anyway",
    "sectors": "32-byte pieces of global memory moved, before any cache",
    "FMA share": "multiply-adds among all instructions of the PTX",
}
_ONLY_TIMED = {"from cuBLAS", "step", "spread"}


def _legend(rows: Sequence[Row]) -> RenderableType:
    timed = any(row.speed for row in rows)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(style=_DIM)
    table.add_row("", "")
    for name, meaning in _LEGEND.items():
        if timed or name not in _ONLY_TIMED:
            table.add_row(name, meaning)
    return table


def _best_judged(rows: Sequence[Row]) -> list[Row]:
    """One row a rung: the one at the size that most of its predictions are about."""
    best: dict[int, Row] = {}
    for row in rows:
        if row.rung not in best or len(row.outcomes) > len(best[row.rung].outcomes):
            best[row.rung] = row
    return list(best.values())


def _verdict(judged: Sequence[Row], rows: Sequence[Row]) -> RenderableType:
    """Whether all results were right, and how many predictions held."""
    wrong = sorted({row.rung for row in rows if not all(check.holds for check in row.checks)})
    checked = len({(row.rung, check) for row in rows for check in row.checks})
    lines = Text("\n")
    if wrong:
        lines.append(f"WRONG results: rungs {', '.join(map(str, wrong))}. ", _BAD)
    elif checked:
        lines.append(f"All {checked} products that were checked are right. ", _GOOD)
    outcomes = [outcome for row in judged for outcome in row.outcomes]
    held = sum(outcome.holds is True for outcome in outcomes)
    failed = sum(outcome.holds is False for outcome in outcomes)
    if held + failed:
        lines.append(f"{held} of {held + failed} predictions held", "yellow" if failed else _GOOD)
        unknown = len(outcomes) - held - failed
        lines.append(f", {unknown} could not be judged. " if unknown else ". ")
    others = {
        prediction.size
        for row in judged
        for prediction in get_rung(row.rung).predictions
        if prediction.counter not in RESOURCES
    } - {row.size for row in rows}
    if others:
        lines.append(f"More is predicted about N = {', '.join(map(str, sorted(others)))}.", _DIM)
    return lines
