"""Every rung, and every planted fault, under the tools of NVIDIA's compute-sanitizer.

`prepare` compiles everything into a folder, `run_targets` launches it (the program that runs under a tool: it
imports little, since everything is slow there), `Sanitizer` starts the tool and reads what it says.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tilewave.device import DeviceSpec
from tilewave.errors import CompileError, ToolchainError
from tilewave.precision import error_in_bounds

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")

#: Options for every tool: carry on behind an error, print all there is, no host stacks (they are Python's).
COMMON_OPTIONS = (
    "--target-processes=all",
    "--destroy-on-device-error=kernel",
    "--show-backtrace=no",
    "--print-limit=1000",
)
#: Failed calls of the driver are reported by the driver layer itself; cuda-bindings makes some on purpose,
#: when it looks for functions that a driver lacks.
TOOL_OPTIONS = {
    "memcheck": ("--report-api-errors=no", "--leak-check=no"),
    "racecheck": ("--racecheck-report=analysis", "--racecheck-memcpy-async=yes"),
    "initcheck": (),
    "synccheck": (),
}


@dataclass(frozen=True)
class Target:
    """One launch: a kernel of a cubin for one shape, and what it takes behind M, N and K."""

    title: str
    kernel: str
    symbol: str
    cubin: str
    shape: tuple[int, int, int]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    tolerance: float
    fault: str | None = None
    scheduled: bool = False
    partial_floats: int = 0
    tickets: int = 0
    integers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Targets:
    """What there is to launch, for one GPU."""

    arch: str
    compiler: str
    digest: str
    launches: tuple[Target, ...]

    def of_rungs(self) -> list[int]:
        """Indices of the launches of the rungs as they are."""
        return [index for index, target in enumerate(self.launches) if target.fault is None]

    def of_fault(self, name: str) -> list[int]:
        """Indices of the launches of a planted fault."""
        return [index for index, target in enumerate(self.launches) if target.fault == name]

    def save(self, folder: Path) -> None:
        """Write them beside the cubins."""
        (folder / "targets.json").write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(folder: Path) -> Targets:
        """Read what `save` wrote."""
        data = json.loads((folder / "targets.json").read_text())
        launches = []
        for entry in data["launches"]:
            for name in ("shape", "grid", "block", "integers"):
                entry[name] = tuple(entry[name])
            launches.append(Target(**entry))
        return Targets(data["arch"], data["compiler"], data["digest"], tuple(launches))


def prepare(folder: Path, spec: DeviceSpec, arch: str, jobs: int = 1) -> Targets:
    """Compile all rungs and faults into ``folder`` and write what is to be launched on ``spec``."""
    from tilewave.compiler import Program, Source, compiler_version
    from tilewave.lab.faults import FAULTS
    from tilewave.lab.launches import launch_of
    from tilewave.lab.registry import Rung, get_rung, load_rungs
    from tilewave.lab.selftest import NORMAL, cases
    from tilewave.lab.workers import Budget, run_tasks

    folder.mkdir(parents=True, exist_ok=True)
    planned: list[tuple[Rung, Source, list[tuple[int, int, int]], str | None]] = []
    for rung in load_rungs():
        tile = rung.tile
        chosen, _ = cases(rung, spec, seed=0, thorough=False)
        leading = [case.shape for case in chosen[: [case.data != NORMAL for case in chosen].index(True)]]
        below = (max(1, tile.bm - 1), max(1, tile.bn - 1), max(1, tile.bk - 1))
        planned.append((rung, rung.source(), [*leading, below, (1, 1, 1)], None))
    planned += [(get_rung(fault.rung), fault.source(), [fault.shape], fault.name) for fault in FAULTS]
    tasks = [_Compile(index, entry[1], entry[0].entries, arch) for index, entry in enumerate(planned)]
    programs: dict[int, Program] = {}
    for task, program in run_tasks(_compile, tasks, jobs, Budget(None)):
        programs[task.index] = program
    digest = hashlib.sha256(repr((COMMON_OPTIONS, TOOL_OPTIONS)).encode())
    launches = []
    for index, (rung, _, shapes, fault) in enumerate(planned):
        cubin = f"{index:02d}.cubin"
        (folder / cubin).write_bytes(programs[index].cubin)
        digest.update(programs[index].cubin)
        for m, n, k in shapes:
            launch = launch_of(rung, m, n, k, spec)
            launches.append(
                Target(
                    title=rung.title,
                    kernel=launch.entry,
                    symbol=programs[index].kernels[launch.entry].symbol,
                    cubin=cubin,
                    shape=(m, n, k),
                    grid=launch.grid,
                    block=launch.block,
                    tolerance=rung.tolerance,
                    fault=fault,
                    scheduled=launch.cut is not None,
                    partial_floats=launch.partial_floats,
                    tickets=launch.tickets,
                    integers=launch.integers,
                )
            )
    digest.update(repr(launches).encode())
    targets = Targets(arch, compiler_version(), digest.hexdigest()[:16], tuple(launches))
    targets.save(folder)
    return targets


@dataclass(frozen=True)
class _Compile:
    index: int
    source: Any
    entries: tuple[str, ...]
    arch: str


def _compile(task: _Compile) -> Any:
    from tilewave.compiler import compile_source

    try:
        return compile_source(task.source, task.entries, task.arch)
    except CompileError as error:
        raise ToolchainError(f"{task.source.name} does not compile: {error}") from error


def run_targets(folder: Path, indices: Iterable[int], results: Path, *, poison: bool) -> None:
    """Launch targets in order; after each, add a line with its index and error in bounds to ``results``.

    Without ``poison`` no output is filled beforehand, so that initcheck sees what was never written.
    """
    from tilewave.runtime.driver import Device, DeviceArray, Module, Stream

    targets = Targets.load(folder)
    device = Device()
    stream = Stream(device)
    rng = np.random.default_rng()

    def unwritten(*shape: int) -> DeviceArray:
        array = DeviceArray.empty(device, shape)
        if poison:
            array.poison()
        return array

    with results.open("a", encoding="utf-8") as lines:
        for index in indices:
            target = targets.launches[index]
            m, n, k = target.shape
            a, b = (rng.standard_normal(shape, np.float32) for shape in ((m, k), (k, n)))
            out = unwritten(m, n)
            arguments: list[Any] = [*(DeviceArray.from_numpy(device, x) for x in (a, b)), out, m, n, k]
            if target.scheduled:
                tickets = np.zeros(max(1, target.tickets), np.uint32)
                arguments += [
                    unwritten(max(1, target.partial_floats)),
                    DeviceArray.from_numpy(device, tickets),
                ]
                arguments += target.integers
            function = Module(device, (folder / target.cubin).read_bytes()).function(target.symbol)
            function.prepare(target.grid, target.block, arguments, stream)()
            error = error_in_bounds(out.to_numpy(), a, b)
            lines.write(json.dumps({"index": index, "error_in_bounds": error}) + "\n")
            lines.flush()


@dataclass(frozen=True)
class Report:
    """What a tool said: the number of errors in its summary (None without one), and its single reports."""

    total: int | None
    records: tuple[str, ...]

    def by_kernel(self) -> dict[str, int]:
        """Reports for each kernel by the name before its template arguments; "" for those that name none."""
        counts: dict[str, int] = {}
        for record in self.records:
            found = _KERNEL.search(record)
            name = found.group() if found else ""
            counts[name] = counts.get(name, 0) + 1
        return counts

    def says(self, pattern: str) -> str | None:
        """The first report with this regular expression."""
        return next((record for record in self.records if re.search(pattern, record)), None)


#: A rung's name, or that of one of the library's templates.
_KERNEL = re.compile(r"sgemm_\d\d_\w+|(?<=tilewave::)\w+(?=<)")
_PREFIX = re.compile(r"^========= ?")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
#: Lines at the margin that report nothing.
_SILENT = re.compile(r"COMPUTE-SANITIZER|\w+ SUMMARY:|$")


def parse_log(text: str) -> Report:
    """Read the log of a tool: every line at the margin opens a report, indented lines belong to it."""
    total: int | None = None
    records: list[list[str]] = []
    for line in text.splitlines():
        if not line.startswith("========="):
            continue
        content = _PREFIX.sub("", line)
        if found := _SUMMARY.match(content):
            total = int(found.group(1))
        if content.startswith(" "):
            if records:
                records[-1].append(content.strip())
        elif not _SILENT.match(content):
            records.append([content.strip()])
    return Report(total, tuple("\n".join(record) for record in records))


@dataclass
class ToolRun:
    """One run of a program under a tool."""

    tool: str
    options: tuple[str, ...]
    seconds: float
    exit_code: int | None
    """None if it was stopped at its limit."""
    report: Report
    errors_in_bounds: dict[int, float] = field(default_factory=dict)
    """For each launch that was finished, how far its result was from float64."""
    output: str = ""
    """The end of what the program printed itself."""


class Sanitizer:
    """compute-sanitizer, and the program to run under it."""

    def __init__(self, executable: str, program: Sequence[str], folder: Path) -> None:
        self._executable = executable
        self._program = tuple(program)
        self._folder = folder

    @staticmethod
    def find() -> str:
        """The path of the executable."""
        usual = [Path("/usr/local/cuda/bin/compute-sanitizer")]
        usual += [Path("/usr/local/cuda/compute-sanitizer/compute-sanitizer")]
        usual += sorted(Path("/usr/local").glob("cuda-*/bin/compute-sanitizer"))[::-1]
        found = shutil.which("compute-sanitizer") or next((str(p) for p in usual if p.exists()), None)
        if found is None:
            raise ToolchainError(
                "compute-sanitizer was not found: put it (from the CUDA toolkit) on the PATH"
            )
        return found

    def version(self) -> str:
        """What it calls itself, such as "2025.3.1.0"."""
        done = subprocess.run([self._executable, "--version"], capture_output=True, text=True, timeout=60)
        found = re.search(r"\d{4}\.\d+\.\d+(?:\.\d+)?", done.stdout)
        return found.group() if found else "unknown"

    def run(self, tool: str, indices: Sequence[int], limit_s: float) -> ToolRun:
        """Launch targets under a tool, for at most ``limit_s`` seconds."""
        log, results, printed = (self._folder / f"run.{kind}" for kind in ("log", "jsonl", "txt"))
        for file in (log, results):
            file.unlink(missing_ok=True)
        options = (f"--tool={tool}", *COMMON_OPTIONS, *TOOL_OPTIONS[tool])
        command = [self._executable, *options, f"--log-file={log}", *self._program]
        command += ["--folder", str(self._folder), "--targets", ",".join(map(str, indices))]
        command += ["--results", str(results), *([] if tool == "initcheck" else ["--poison"])]
        started = time.monotonic()
        code = _run_in_group(command, printed, limit_s)
        text = log.read_text(errors="replace") if log.exists() else ""
        lines = results.read_text().splitlines() if results.exists() else []
        finished = {line["index"]: line["error_in_bounds"] for line in map(json.loads, lines)}
        return ToolRun(
            tool,
            options,
            round(time.monotonic() - started, 1),
            code,
            parse_log(text),
            finished,
            printed.read_text(errors="replace")[-2000:].replace(f"{Path.cwd()}/", ""),
        )


def _run_in_group(command: Sequence[str], printed: Path, limit_s: float) -> int | None:
    """Run a command and return its exit code, or None if it and all that it started were ended at the limit.

    The tool starts the program as a process of its own, which could outlive it in a kernel that hangs.
    """
    with printed.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def judge_rungs(targets: Targets, run: ToolRun) -> dict[str, Any]:
    """The result of a tool on all rungs, as plain data; `clean` if it ran to its end and found nothing."""
    indices = targets.of_rungs()
    unfinished = [index for index in indices if index not in run.errors_in_bounds]
    wrong = [
        index
        for index, error in run.errors_in_bounds.items()
        if not error <= targets.launches[index].tolerance
    ]
    reports = run.report.by_kernel()
    names = {targets.launches[i].title: targets.launches[i].kernel.partition("<")[0] for i in indices}
    by_rung = {title: reports.pop(name, 0) for title, name in names.items()}
    return {
        "clean": run.exit_code == 0
        and run.report.total == 0
        and not (run.report.records or unfinished or wrong),
        "errors": run.report.total,
        "errors_by_rung": by_rung,
        "reports_of_no_rung": sum(reports.values()),
        "launches": len(indices),
        "unfinished": [_describe(targets.launches[index]) for index in unfinished],
        "wrong_results": [_describe(targets.launches[index]) for index in wrong],
        "largest_error_in_bounds": max(run.errors_in_bounds.values(), default=None),
        "first_reports": list(run.report.records[:5]),
        "options": list(run.options),
        "exit_code": run.exit_code,
        "seconds": run.seconds,
        "output": "" if run.exit_code == 0 else run.output,
    }


def judge_fault(targets: Targets, name: str, says: str, run: ToolRun) -> dict[str, Any]:
    """Whether a tool found a planted fault, as plain data."""
    target = targets.launches[targets.of_fault(name)[0]]
    report = run.report.says(says)
    named = report is not None and target.kernel.partition("<")[0] in report
    errors = list(run.errors_in_bounds.values())
    return {
        "found": named,
        "kernel": target.kernel,
        "shape": list(target.shape),
        "tool": run.tool,
        "errors": run.report.total,
        "report": report,
        "other_reports": [] if named else list(run.report.records[:5]),
        "result_was_right": errors[0] <= target.tolerance if errors else None,
        "exit_code": run.exit_code,
        "seconds": run.seconds,
    }


def _describe(target: Target) -> str:
    return "{}, {}, M N K = {} {} {}".format(target.title, target.kernel, *target.shape)
