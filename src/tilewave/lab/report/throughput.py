"""Throughput of every rung beside the library, and what each step was worth beside the article's figures."""

from __future__ import annotations

from tilewave.lab.records import Ladder, Row, Speed
from tilewave.lab.registry import Rung, get_rung
from tilewave.lab.report.parts import Panel, Part, Table
from tilewave.lab.report.svg import CHARACTER, WIDTH, Drawing, round_ticks

ARTICLE_SIZE = 2048
"""The size at which the article gives the gain of each step."""

_STEP, _TOP, _LEFT, _RIGHT = 17, 40, 122, 66


def throughput(ladder: Ladder) -> Part:
    """The part about speed; without times, the reason why there are none."""
    part = Part(
        "throughput",
        "Throughput",
        "Every rung computes the same product in true FP32; what changes is how the work is arranged.",
    )
    timed = [row for row in ladder.rows if row.speed is not None]
    if not timed:
        part.missing.append(
            f"No times: this ladder was climbed in the emulator, as {ladder.device} would. "
            "Run `tilewave ladder --json FILE` on a GPU and give FILE to see them."
        )
    else:
        part.lead += (
            " Bars are medians over rounds in which all contenders take turns, whiskers the slowest and the "
            "fastest round, and the dashed line is the library. Percentages are shares of it."
        )
        part.panels += [_size_panel(ladder, size) for size in sorted({row.size for row in timed})]
        gains = _gains(ladder)
        if gains:
            part.panels.append(_gain_panel(ladder, gains))
    part.tables.append(_article_table(ladder))
    return part


def _size_panel(ladder: Ladder, size: int) -> Panel:
    rows = [row for row in ladder.rows if row.size == size and row.speed is not None]
    baseline = ladder.baseline(size)
    speeds = [row.speed for row in rows if row.speed] + ([baseline.speed] if baseline else [])
    most = max(_extent(speed, size)[1] for speed in speeds)
    span = WIDTH - _LEFT - _RIGHT
    height = _TOP + _STEP * len(rows) + 24
    drawing = Drawing(
        f"throughput-{size}",
        f"TFLOP/s of every rung at N = {size} on {ladder.device}",
        _about(rows, size, baseline.speed if baseline else None),
        height,
    )
    drawing.text(0, 14, f"N = {size}", "bold")
    bottom = _TOP + _STEP * len(rows)
    for tick in round_ticks(most, 5):
        x = _LEFT + span * tick / most
        drawing.line(x, _TOP - 4, x, bottom)
        drawing.text(x, bottom + 14, f"{tick:g}", "muted", "middle")
    drawing.text(WIDTH, bottom + 14, "TFLOP/s", "muted", "end")
    for place, row in enumerate(rows):
        assert row.speed is not None
        y = _TOP + _STEP * place
        rate = row.speed.tflops
        low, high = _extent(row.speed, size)
        share = row.speed.over_baseline
        drawing.text(_LEFT - 6, y + 12, _short(row.rung, row.title), anchor="end")
        tip = f"{row.rung:02d} {row.title}: {rate:.2f} TFLOP/s, {low:.2f} to {high:.2f}"
        drawing.rect(_LEFT, y + 2, span * rate / most, _STEP - 5, "f-sky", tip)
        middle = y + 2 + (_STEP - 5) / 2
        drawing.line(_LEFT + span * low / most, middle, _LEFT + span * high / most, middle, "s-ink")
        drawing.text(WIDTH - 36, y + 12, f"{rate:.1f}", anchor="end")
        if share is not None:
            drawing.text(WIDTH, y + 12, f"{share:.0%}", anchor="end")
    if baseline is not None:
        x = _LEFT + span * baseline.speed.tflops / most
        drawing.path([(x, _TOP - 6), (x, bottom)], "s-orange dash")
        drawing.text(
            WIDTH, 14, f"{_library(baseline.name)} {baseline.speed.tflops:.1f}", "bold orange", "end"
        )
    table = Table(
        f"Throughput at N = {size}",
        ("rung", "TFLOP/s", "slowest", "fastest", "of the library"),
        tuple(
            (
                f"{row.rung:02d} {row.title}",
                f"{row.speed.tflops:.2f}",
                *(f"{rate:.2f}" for rate in _extent(row.speed, size)),
                "" if row.speed.over_baseline is None else f"{row.speed.over_baseline:.1%}",
            )
            for row in rows
            if row.speed
        )
        + ((((baseline.name, f"{baseline.speed.tflops:.2f}", "", "", "")),) if baseline else ()),
        folded=True,
    )
    best = max(rows, key=lambda row: row.speed.tflops if row.speed else 0.0)
    assert best.speed is not None
    share = best.speed.over_baseline
    against = "" if share is None else f", {share:.0%} of {_library(baseline.name) if baseline else 'it'}"
    return Panel(
        drawing,
        f"N = {size}: {best.rung:02d} {best.title} is the fastest, {best.speed.tflops:.1f} TFLOP/s{against}.",
        table,
    )


def _short(number: int, title: str) -> str:
    """A rung's number and as much of its title as fits beside the bars."""
    room = int((_LEFT - 6) / CHARACTER)
    text = f"{number:02d} {title}"
    return text if len(text) <= room else text[: room - 1].rstrip() + "…"


def _library(name: str) -> str:
    return name.split()[0] if name else "the library"


def _about(rows: list[Row], size: int, baseline: Speed | None) -> str:
    found = ", ".join(f"{row.rung:02d} {row.title} {row.speed.tflops:.1f}" for row in rows if row.speed)
    against = "" if baseline is None else f" The library reaches {baseline.tflops:.1f}."
    return f"Bars of TFLOP/s at N = {size}: {found}.{against}"


def _extent(speed: Speed, size: int) -> tuple[float, float]:
    """Slowest and fastest round, in TFLOP/s."""
    work = 2e-9 * size**3
    return work / max(speed.milliseconds), work / min(speed.milliseconds)


def _gains(ladder: Ladder) -> list[tuple[Rung, float, float]]:
    """Rungs of which the article gives a gain: the rung, the gain measured here, the article's."""
    found = []
    for row in ladder.rows:
        rung = get_rung(row.rung)
        if row.size != ARTICLE_SIZE or rung.reported.gain is None or rung.builds_on is None:
            continue
        before = ladder.find(rung.builds_on, row.size)
        if row.speed and before and before.speed:
            found.append((rung, row.speed.tflops / before.speed.tflops - 1, rung.reported.gain))
    return found


def _gain_panel(ladder: Ladder, gains: list[tuple[Rung, float, float]]) -> Panel:
    low = min(0.0, *(value for _, *pair in gains for value in pair))
    high = max(0.0, *(value for _, *pair in gains for value in pair))
    left, right = _LEFT + 8, WIDTH - 20
    step, top = 24, 44

    def x(value: float) -> float:
        return left + (right - left) * (value - low) / ((high - low) or 1.0)

    bottom = top + step * len(gains)
    drawing = Drawing(
        "gains",
        f"What each step was worth at N = {ARTICLE_SIZE}: {ladder.device} beside the article's GB10",
        "Change of throughput against the rung it builds on. "
        + "; ".join(
            f"{rung.title}: {here:+.0%} on {ladder.device}, {there:+.0%} in the article"
            for rung, here, there in gains
        ),
        bottom + 26,
    )
    drawing.text(0, 14, f"What each step was worth, N = {ARTICLE_SIZE}", "bold")
    drawing.rect(left, 22, 10, 10, "f-blue")
    drawing.text(left + 14, 31, ladder.device.removeprefix("NVIDIA "))
    drawing.dot(left + 95, 27, 4.5, "f-paper s-orange thick")
    drawing.text(left + 104, 31, "the article's GB10")
    step_of_ticks = max([0.01, *round_ticks(max(high, -low), 3)[1:2]])
    for tick in (step_of_ticks * i for i in range(-9, 10)):
        if not low - 1e-9 <= tick <= high + 1e-9:
            continue
        drawing.line(x(tick), top - 2, x(tick), bottom, "axis" if tick == 0 else "rule")
        drawing.text(x(tick), bottom + 14, f"{tick:+.0%}" if tick else "0", "muted", "middle")
    for place, (rung, here, there) in enumerate(gains):
        y = top + step * place
        drawing.text(left - 10, y + 15, _short(rung.number, rung.name.replace("_", " ")), anchor="end")
        tip = f"{rung.title}: {here:+.1%} here, {there:+.0%} in the article"
        drawing.rect(min(x(0), x(here)), y + 5, max(1.5, abs(x(here) - x(0))), 12, "f-blue", tip)
        drawing.dot(x(there), y + 11, 4.5, "f-paper s-orange thick", tip)
    table = Table(
        f"Change of throughput against the rung it builds on, N = {ARTICLE_SIZE}",
        ("rung", f"{ladder.device}", "the article's GB10"),
        tuple((rung.title, f"{here:+.1%}", f"{there:+.0%}") for rung, here, there in gains),
        folded=True,
    )
    return Panel(
        drawing,
        "Bars: measured here against the rung before. Rings: what the article reports for its GB10.",
        table,
    )


def _article_table(ladder: Ladder) -> Table:
    """Idea, throughput at every size and the article's words, rung by rung."""
    sizes = [size for size in ladder.sizes() if any(row.speed for row in ladder.rows if row.size == size)]
    rows = []
    for number in sorted({row.rung for row in ladder.rows}):
        rung = get_rung(number)
        cells = []
        for size in sizes:
            row = ladder.find(number, size)
            cells.append(_cell(row.speed) if row and row.speed else "")
        reported = rung.reported
        words = "; ".join(text for text in (reported.throughput, reported.figures) if text) or "—"
        rows.append((rung.title, rung.idea, words, *cells))
    if ladder.baselines and sizes:
        cells = [f"{found.speed.tflops:.1f}" if (found := ladder.baseline(size)) else "" for size in sizes]
        rows.append((ladder.baselines[-1].name, "", "", *cells))
    measured = f", TFLOP/s and share of the library on {ladder.device}" if sizes else ""
    return Table(
        f"The rungs: idea, what the article says of it (GB10){measured}",
        ("rung", "idea", "the article", *(f"N = {size}" for size in sizes)),
        tuple(rows),
        words=3,
    )


def _cell(speed: Speed) -> str:
    share = speed.over_baseline
    return f"{speed.tflops:.1f}" + ("" if share is None else f" ({share:.0%})")
