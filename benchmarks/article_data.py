"""The committed results behind docs/article.md, and the figures that its text may ask for by name."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tilewave.device import get_spec
from tilewave.lab.judge import judge
from tilewave.lab.launches import launch_of
from tilewave.lab.records import Build, Counted, Ladder, Row, load_ladder
from tilewave.lab.registry import get_rung, load_rungs

RESULTS = Path("benchmarks/results")
MISSING = "not measured yet"
GPUS = ("GB10", "H200")
ARTICLE_TFLOPS = 1.035 * 17.119
"""Rung 15's rate on the article's GB10 at N = 4096: 103 to 104 % of cuBLAS's 17,119 GFLOP/s."""


def load(path: Path) -> Any:
    """A result file; None if it has not been made."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


@dataclass(frozen=True)
class Results:
    """Everything that the page is made from. A file that does not exist leaves its figures not measured."""

    folder: Path = RESULTS
    calls: dict[str, Callable[..., str]] = field(init=False)

    def __post_init__(self) -> None:
        names = ("tflops", "share", "change", "count", "registers", "spills", "probe", "hit", "per_tile")
        names += ("scalar", "passes", "selected", "of_peak", "busy", "stall", "clocks", "cublas", "held")
        names += ("cut", "fma_share", "slower", "demand", "bandwidth", "lone")
        names += ("library", "zeros", "watts")
        object.__setattr__(self, "calls", {name: getattr(self, name) for name in names})

    @cached_property
    def ladder(self) -> Ladder:
        """The ladder on an H200."""
        return load_ladder(self.folder / "ladder-h200.json")

    @cached_property
    def probes(self) -> dict[str, Any]:
        """What the probes found on an H200, by name."""
        record = load(self.folder / "probes_h200.json")
        return {entry["probe"]: entry for entry in record["probes"]}

    @cached_property
    def counts(self) -> dict[str, list[Row]]:
        """The emulator's rows by GPU, predictions judged."""
        record = load(self.folder / "article_counts.json")
        found = {}
        for gpu in GPUS:
            rows = [_row(entry) for entry in record["rows"] if entry["device"] == gpu]
            found[gpu] = judge(rows, get_spec(gpu).sms)
        return found

    @cached_property
    def counts_compiler(self) -> str:
        """What compiled the kernels that were counted."""
        return str(load(self.folder / "article_counts.json")["compiler"])

    @cached_property
    def counters_of_hardware(self) -> list[dict[str, Any]]:
        """The rungs' readings of an H200's own counters."""
        return list(load(self.folder / "truth_table_h200.json")["rungs"])

    @cached_property
    def ragged(self) -> Any:
        """Times and places of the kernels for ragged sizes, or None."""
        return load(self.folder / "ragged_h200.json")

    @cached_property
    def ragged_counts(self) -> Any:
        """The emulator's counters of these kernels."""
        return load(self.folder / "ragged_counts.json")

    @cached_property
    def selection(self) -> Any:
        """The selection suite, or None."""
        return load(self.folder / "selection_h200.json")

    def row(self, gpu: str, rung: int, size: int) -> Row:
        """The emulator's row of a rung on a GPU."""
        return next(row for row in self.counts[gpu] if (row.rung, row.size) == (rung, size))

    def speed(self, rung: int, size: int) -> float | None:
        """TFLOP/s on the H200."""
        row = self.ladder.find(rung, size)
        return None if row is None or row.speed is None else row.speed.tflops

    def ratio(self, rung: int, other: int, size: int) -> float | None:
        """Throughput over another rung's, by the medians."""
        ours, theirs = self.speed(rung, size), self.speed(other, size)
        return None if ours is None or theirs is None else ours / theirs

    def timed(self, probe: str, variant: str, size: int) -> dict[str, Any] | None:
        """A variant's times in a probe."""
        entry = self.probes.get(probe)
        for at in () if entry is None else entry["sizes"]:
            if at["size"] == size:
                return at["timed"].get(variant)
        return None

    def metric(self, variant: str, size: int, name: str) -> float | None:
        """A metric of the profiler in the probe of rung 19's L2 reuse."""
        for at in self.probes["l2-reuse"]["sizes"]:
            if at["size"] == size and variant in at["profiled"]:
                return at["profiled"][variant].get(name)
        return None

    # What the text may ask for: `<!-- = share 15 2048 -->87 %<!-- end -->`.

    def tflops(self, rung: str, size: str) -> str:
        """TFLOP/s of a rung on the H200."""
        speed = self.speed(int(rung), int(size))
        return MISSING if speed is None else f"{speed:.1f} TFLOP/s"

    def share(self, rung: str, size: str) -> str:
        """Its share of cuBLAS's throughput."""
        row = self.ladder.find(int(rung), int(size))
        if row is None or row.speed is None or row.speed.over_baseline is None:
            return MISSING
        return f"{row.speed.over_baseline:.0%}".replace("%", " %")

    def change(self, rung: str, other: str, size: str) -> str:
        """Its throughput against another rung's."""
        return percent(self.ratio(int(rung), int(other), int(size)))

    def count(self, gpu: str, rung: str, size: str, counter: str) -> str:
        """One of the emulator's counters."""
        return f"{getattr(self.row(gpu, int(rung), int(size)).counted, counter):,}"

    def registers(self, gpu: str, rung: str) -> str:
        """Registers a thread."""
        return str(self.row(gpu, int(rung), 2048).build.registers)

    def spills(self, gpu: str, rung: str) -> str:
        """Bytes a thread that the compiler stores to local memory."""
        return str(self.row(gpu, int(rung), 2048).build.spill_store_bytes)

    def probe(self, probe: str, variant: str, size: str) -> str:
        """A variant's throughput against the one that it is compared with."""
        timed = self.timed(probe, variant, int(size))
        return percent(None if timed is None else timed["ratio"])

    def hit(self, variant: str, size: str) -> str:
        """L2 hit rate of rung 15 (``rung-15``) or rung 19 (``walk``)."""
        rate = self.metric(variant, int(size), "lts__t_sector_hit_rate.pct")
        return MISSING if rate is None else f"{rate:.0f} %"

    def per_tile(self, size: str) -> str:
        """How much longer rung 19 takes for a tile than rung 15, all SMs taken together."""
        walk, whole = (self.timed("l2-reuse", key, int(size)) for key in ("walk", "rung-15"))
        if walk is None or whole is None:
            return MISSING
        sms, tile = get_spec("H200").sms, get_rung(15).tile
        tiles = -(-int(size) // tile.bm) * -(-int(size) // tile.bn)
        times = [statistics.median(timed["speed"]["milliseconds"]) for timed in (walk, whole)]
        return percent((times[0] / (tiles / sms)) / (times[1] / -(-tiles // sms)))

    def scalar(self, rung: str, case: str, counter: str) -> str:
        """A counter of a kernel at 2048 (``wide``, ``scalar``) or 2049 (``both``), for 64 multiply-adds."""
        from tilewave.lab.ragged import per_64_fmas

        counted = self.ragged_counts["counts"][case][rung]["counted"]
        if counter == "sectors":
            scaled = per_64_fmas(counted)
            return f"{scaled['global_load_sectors'] + scaled['copy_sectors']:.2f}"
        return f"{per_64_fmas(counted)[counter]:.2f}"

    def passes(self, gpu: str, rung: str, size: str) -> str:
        """Passes of an average shared load."""
        counted = self.row(gpu, int(rung), int(size)).counted
        assert counted is not None
        return f"{counted.passes_per_read:.3g}"

    def selected(self, selector: str, what: str) -> str:
        """A figure of the selection suite: ``mean``, ``worst``, ``best`` (times) or ``close`` (times)."""
        from tilewave.lab.selection import verdicts

        if self.selection is None or not self.selection["rows"]:
            return MISSING
        found = list(verdicts(self.selection, int(selector)))
        losses = [verdict.loss for verdict in found]
        match what:
            case "mean":
                return percent(statistics.geometric_mean(losses))
            case "worst":
                return percent(max(losses))
            case "best":
                return f"{sum(verdict.chosen == verdict.best for verdict in found)} of {len(found)}"
            case "close":
                return f"{sum(loss <= 1.02 for loss in losses)} of {len(found)}"
        raise SystemExit(f"unknown figure of the selection: {what}")

    def cut(self, gpu: str, rung: str, size: str, what: str) -> str:
        """How a rung deals its tiles: ``pieces`` a cut tile, ``cut_tiles``, ``busiest`` (slices of an SM)."""
        spec = get_spec(gpu)
        planned = launch_of(get_rung(int(rung)), int(size), int(size), int(size), spec).cut
        assert planned is not None
        return str(planned.busiest_slices(spec.sms) if what == "busiest" else getattr(planned, what))

    def fma_share(self, gpu: str, rung: str, size: str) -> str:
        """Multiply-adds among all PTX instructions."""
        counted = self.row(gpu, int(rung), int(size)).counted
        assert counted is not None
        return f"{100 * counted.fma_share:.0f} %"

    def library(self, what: str) -> str:
        """What the profiler read of cuBLAS's kernel at N = 2048: ``busy`` (FMA pipe) or ``passes`` a read."""
        record = load(self.folder / "profile_h200.json")
        if record is None or not record["library"]:
            return MISSING
        figures = record["library"][0]["reading"]["figures"]
        if what == "passes":
            return f"{figures['shared_load_passes'] / figures['shared_loads']:.2f}"
        return f"{figures['fma_pipe_percent']:.0f} %"

    def zeros(self, contender: str) -> str:
        """The throughput of ``ours`` or ``cublas`` on zeros against random data, in a run of 50 s."""
        found = self._power(contender)
        return percent(found["zeros"]["tflops"] / found["random"]["tflops"]) if found else MISSING

    def watts(self, contender: str, data: str) -> str:
        """Median power in that run."""
        found = self._power(contender)
        return f"{found[data]['median_w']:.0f} W" if found else MISSING

    def _power(self, contender: str) -> dict[str, Any]:
        record = load(self.folder / "power_h200.json")
        summaries = [] if record is None else record["summaries"]
        return {one["data"]: one for one in summaries if one["contender"] == contender}

    def lone(self) -> str:
        """Time of a small tile alone on an SM relative to two that share one."""
        from article_sizes import lone_small_tile

        return f"{lone_small_tile(self):.2f}"

    def slower(self, rung: str, size: str, other: str) -> str:
        """How many times as long as at another size a rung takes on the H200, slice for slice of K."""
        times = []
        for n in (int(size), int(other)):
            row = self.ladder.find(int(rung), n)
            if row is None or row.speed is None:
                return MISSING
            times.append(row.speed.median_ms / -(-n // get_rung(int(rung)).tile.bk))
        return f"x {times[0] / times[1]:.2f}"

    def bandwidth(self, gpu: str) -> str:
        """Memory bandwidth by the device's record."""
        return f"{get_spec(gpu).bandwidth_gb_s:,.0f} GB/s"

    def demand(self, gpu: str) -> str:
        """What rung 15 would ask of memory at N = 4096 if L2 held nothing, at the rate that it runs at."""
        counted = self.row(gpu, 15, 2048).counted
        assert counted is not None
        speed = self.speed(15, 4096) if gpu == "H200" else ARTICLE_TFLOPS
        if speed is None:
            return MISSING
        bytes_per_flop = 32 * counted.copy_sectors / (2 * counted.thread_fma)
        return f"{1000 * speed * bytes_per_flop:,.0f} GB/s"

    def of_peak(self, rung: str, size: str) -> str:
        """Share of the H200's FP32 peak, of a rung or of ``cublas``."""
        base = self.ladder.baseline(int(size))
        found = self.speed(int(rung), int(size)) if rung != "cublas" else base and base.speed.tflops
        return MISSING if not found else f"{100 * found / get_spec('H200').peak_fp32_tflops:.0f} %"

    def busy(self, variant: str, size: str) -> str:
        """How busy the FMA pipe is, of rung 15 (``rung-15``) or rung 19 (``walk``)."""
        rate = self.metric(variant, int(size), _FMA_PIPE)
        return MISSING if rate is None else f"{rate:.0f} %"

    def stall(self, variant: str, size: str, reason: str) -> str:
        """Warps that wait for a reason, for each instruction issued."""
        name = f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"
        found = self.metric(variant, int(size), name)
        return MISSING if found is None else f"{found:.2f}"

    def clocks(self) -> str:
        """The SM clocks that the ladder's session saw before and after its sizes."""
        states = [state[when] for state in self.ladder.sessions[-1]["states"] for when in ("before", "after")]
        seen = sorted({round(state["sm_clock_mhz"]) for state in states if state["sm_clock_mhz"]})
        return f"{seen[0]} to {seen[-1]} MHz" if len(seen) > 1 else f"{seen[0]} MHz" if seen else MISSING

    def cublas(self, size: str, other: str = "") -> str:
        """cuBLAS's rate, or its change against another size's."""
        found, base = (self.ladder.baseline(int(n)) if n else None for n in (size, other))
        if found is None or (other and base is None):
            return MISSING
        return (
            percent(found.speed.tflops / base.speed.tflops) if base else f"{found.speed.tflops:.1f} TFLOP/s"
        )

    def held(self, gpu: str) -> str:
        """How many of the registry's predictions held in the emulator."""
        outcomes = [one.holds for row in self.counts[gpu] for one in row.outcomes if one.holds is not None]
        return f"{sum(outcomes)} of {len(outcomes)}"

    def reported(self, rung: str) -> str:
        """What the registry cites from the article."""
        reported = get_rung(int(rung)).reported
        return "; ".join(filter(None, (reported.throughput, reported.figures))) or "tells nothing"


_FMA_PIPE = "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active"


def percent(ratio: float | None) -> str:
    """A ratio as a change: +9 %, to a tenth below 10 %."""
    if ratio is None:
        return MISSING
    change = (ratio - 1) * 100
    if abs(change) < 0.05:
        return "0 %"
    return f"{change:+.0f} %" if abs(change) >= 9.95 else f"{change:+.1f} %"


def _row(entry: dict[str, Any]) -> Row:
    rung = get_rung(entry["rung"])
    build = {**entry["build"], "limited_by": tuple(entry["build"]["limited_by"])}
    return Row(
        rung.number, rung.name, rung.title, entry["size"], "", 0, Build(**build), Counted(**entry["counted"])
    )


def table(
    header: Sequence[object], rows: Iterable[Sequence[object]], left: Container[int] = (0,)
) -> Iterator[str]:
    """A Markdown table; the columns ``left`` are flush left, the others flush right."""
    yield f"| {' | '.join(map(str, header))} |"
    yield "|" + "|".join("---" if index in left else "---:" for index in range(len(header))) + "|"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def all_numbers() -> list[int]:
    """The numbers of all rungs."""
    return [rung.number for rung in load_rungs()]
