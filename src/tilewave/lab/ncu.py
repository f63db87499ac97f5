"""Nsight Compute from Python: which metrics a machine has, and a program's kernels with their counters."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tilewave.errors import ToolchainError

_NAME = re.compile(r"^\s*([a-z0-9]+__\w+)", re.MULTILINE)
_FORBIDDEN = "ERR_NVGPUCTRPERM"
_UNKNOWN = re.compile(r"==ERROR==.*?\b([a-z0-9]+__[\w.]+)")


@dataclass(frozen=True)
class KernelCounters:
    """One profiled launch: the kernel's name and its metrics (those that the profiler could read).

    ``units`` are those that the report names: a saved one may hold times in any.
    """

    kernel: str
    metrics: dict[str, float]
    units: Mapping[str, str] = field(default_factory=dict, compare=False)


class CountersForbidden(ToolchainError):
    """The driver lets this user read no performance counters (ERR_NVGPUCTRPERM)."""


def find_ncu() -> str:
    """The path of the ncu executable."""
    usual = [Path("/usr/local/cuda/bin/ncu"), *sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"))[::-1]]
    found = shutil.which("ncu") or next((str(path) for path in usual if path.exists()), None)
    if found is None:
        raise ToolchainError("Nsight Compute's ncu was not found: put it on the PATH")
    return found


def available_metrics(ncu: str) -> frozenset[str]:
    """Base names (without suffixes such as `.sum`) of the metrics that the GPU here has."""
    answer = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, timeout=120)
    return parse_metric_names(answer.stdout)


def parse_metric_names(text: str) -> frozenset[str]:
    """Metric names from the output of `ncu --query-metrics`."""
    return frozenset(_NAME.findall(text))


def split_known(wanted: Iterable[str], available: frozenset[str]) -> tuple[list[str], list[str]]:
    """The wanted metrics that exist, and those that do not."""
    known: list[str] = []
    missing: list[str] = []
    for name in wanted:
        (known if name.split(".")[0] in available else missing).append(name)
    return known, missing


def profile(
    ncu: str, command: Sequence[str], metrics: Sequence[str], *, timeout: float, only_started: bool = False
) -> tuple[list[KernelCounters], list[str]]:
    """Run a program under ncu; return its launches in order, and the metrics that ncu refused.

    Clocks are left alone; caches are flushed between replays (ncu's default). With ``only_started`` launches
    count only behind the program's own call of ``cuProfilerStart``.
    """
    wanted = list(metrics)
    refused: list[str] = []
    while wanted:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "ncu.csv"
            options = ["--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
            if only_started:
                options += ["--profile-from-start", "off"]
            call = [ncu, *options, "--log-file", str(log), "--metrics", ",".join(wanted), *command]
            answer = subprocess.run(call, capture_output=True, text=True, timeout=timeout)
            text = log.read_text() if log.exists() else ""
        if _FORBIDDEN in text + answer.stdout + answer.stderr:
            raise CountersForbidden(
                f"ncu may not read the GPU's counters (status {answer.returncode}, {_FORBIDDEN}): an "
                "administrator can allow it, as https://developer.nvidia.com/ERR_NVGPUCTRPERM says"
            )
        unknown = [name for name in _UNKNOWN.findall(text + answer.stdout) if name in wanted]
        if not unknown:
            if answer.returncode != 0:
                raise ToolchainError(
                    f"ncu ended with status {answer.returncode}:\n{text[-2000:]}\n{answer.stdout[-2000:]}"
                    f"\n{answer.stderr[-2000:]}"
                )
            return parse_csv(text), refused
        refused += unknown
        wanted = [name for name in wanted if name not in unknown]
    raise ToolchainError(f"ncu knows none of the metrics {', '.join(metrics)}")


def import_report(ncu: str, path: Path, *, timeout: float = 120) -> list[KernelCounters]:
    """The launches of a report that ncu saved (.ncu-rep)."""
    options = ["--import", str(path), "--csv", "--page", "raw", "--print-units", "base"]
    answer = subprocess.run([ncu, *options], capture_output=True, text=True, timeout=timeout)
    if answer.returncode != 0:
        said = (answer.stdout + answer.stderr).strip()[-2000:]
        raise ToolchainError(f"ncu could not read {path} (status {answer.returncode}): {said}")
    return parse_csv(answer.stdout)


def parse_csv(text: str) -> list[KernelCounters]:
    """Launches from ncu's CSV: the raw page (one row a launch) or the details page (one row a metric)."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.reader(io.StringIO("\n".join(lines))))
    if not rows:
        return []
    header, body = rows[0], rows[1:]
    if "Metric Name" in header:
        return _from_details(header, body)
    id_column, kernel_column = header.index("ID"), header.index("Kernel Name")
    # The row behind the header holds the units; it has no ID.
    launches = [row for row in body if row[id_column]]
    units = next((dict(zip(header, row, strict=False)) for row in body if not row[id_column]), {})
    return [
        KernelCounters(
            row[kernel_column],
            {
                name: value
                for name, cell in zip(header, row, strict=True)
                if "__" in name and (value := _number(cell)) is not None
            },
            {name: unit for name, unit in units.items() if "__" in name and unit},
        )
        for row in launches
    ]


def _from_details(header: list[str], body: list[list[str]]) -> list[KernelCounters]:
    names = ("ID", "Kernel Name", "Metric Name", "Metric Value", "Metric Unit")
    columns = [header.index(name) for name in names]
    launches: dict[str, KernelCounters] = {}
    units: dict[str, dict[str, str]] = {}
    for row in body:
        identity, kernel, name, cell, unit = (row[column] for column in columns)
        known = units.setdefault(identity, {})
        launch = launches.setdefault(identity, KernelCounters(kernel, {}, known))
        if (value := _number(cell)) is not None:
            launch.metrics[name] = value
            known[name] = unit
    return list(launches.values())


def _number(cell: str) -> float | None:
    """A figure such as "1,234.5"; None for "n/a" and the like."""
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        return None
