"""The ladder: every rung compiled, checked, counted in the emulator and, on a GPU, timed against cuBLAS."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from tilewave.bench.baseline import Baseline
from tilewave.bench.environment import Environment
from tilewave.compiler import choose_arch
from tilewave.compiler.toolchain import compiler_version
from tilewave.device import DeviceSpec
from tilewave.errors import UsageError
from tilewave.lab import emulate
from tilewave.lab.judge import judge
from tilewave.lab.records import BaselineRow, Build, Check, Counted, Ladder, Row, load_ladder, save_ladder
from tilewave.lab.registry import Rung, get_rung
from tilewave.lab.workers import Budget, run_tasks
from tilewave.runtime.driver import Device

#: Version of the procedure; part of every row's key, so that figures of an older procedure are not kept.
PROCEDURE = 2


class Progress(Protocol):
    """Hears how far the ladder has got."""

    def start(self, what: str, steps: int) -> None:
        """A stage of so many steps begins."""
        ...

    def step(self, done: str) -> None:
        """One step of the stage has finished; ``done`` names it."""
        ...


class Silent:
    """Progress that nobody watches."""

    def start(self, what: str, steps: int) -> None:
        """Nothing."""

    def step(self, done: str) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Gpu:
    """The GPU to time on and the library to compare with."""

    device: Device
    baseline: Baseline | None


@dataclass(frozen=True)
class _Task:
    """One piece of work without a GPU, small enough to be sent to another process."""

    rung: int
    size: int
    spec: DeviceSpec
    arch: str
    check: bool
    count: bool


@dataclass(frozen=True)
class _Examined:
    build: Build
    checks: tuple[Check, ...]
    counted: Counted | None


def _examine(task: _Task) -> _Examined:
    """Compile a rung and do what the task asks for. Runs in worker processes, which never touch a GPU."""
    rung = get_rung(task.rung)
    program, kernel, build = emulate.build(rung, task.spec, task.arch, task.size)
    checks: tuple[Check, ...] = ()
    if task.check:
        checks = emulate.check(rung, program, np.random.default_rng(), task.spec)
    counted = emulate.count(rung, program, kernel, task.size, task.spec) if task.count else None
    return _Examined(build, checks, counted)


def run_ladder(
    sizes: Sequence[int],
    rungs: Sequence[Rung],
    spec: DeviceSpec,
    *,
    gpu: Gpu | None = None,
    budget_s: float | None = None,
    path: Path | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
    command: Sequence[str] | None = None,
) -> Ladder:
    """Climb the ladder and return what was found.

    ``spec`` is the emulated GPU, or the description of ``gpu``. With ``path`` the results are kept there as
    they come, and rows already there whose key still fits are not run again. With ``jobs`` above 1 worker
    processes are spawned, so the caller's main module must be importable. Nothing starts that is expected to
    outlast ``budget_s`` (seconds); what was left out is said in the notes.
    """
    run = _Run(sizes, rungs, spec, gpu, Budget(budget_s), path, jobs, progress or Silent(), command)
    run.compile_and_emulate()
    if gpu is not None:
        run.time(gpu)
        run.count()
    run.finish()
    return run.ladder


class _Run:
    """One climb: the state shared by its stages."""

    def __init__(
        self,
        sizes: Sequence[int],
        rungs: Sequence[Rung],
        spec: DeviceSpec,
        gpu: Gpu | None,
        budget: Budget,
        path: Path | None,
        jobs: int,
        progress: Progress,
        command: Sequence[str] | None,
    ) -> None:
        self.sizes, self.rungs, self.spec, self.gpu = sizes, rungs, spec, gpu
        self.budget, self.path, self.jobs, self.progress = budget, path, jobs, progress
        choice = choose_arch(spec.compute_capability)
        self.arch = choice.arch
        self.ladder = self._load()
        self.ladder.notes = [choice.note] if choice.note else []
        environment = Environment.capture(
            device=gpu.device if gpu else None,
            compiler=compiler_version(),
            gpu_details={"sms": spec.sms, "clock_mhz": spec.clock_mhz, "arch": spec.arch} if gpu else None,
            command=command,
        )
        self.session = len(self.ladder.sessions)
        self.ladder.sessions.append({**environment.to_json(), "states": []})
        baseline = gpu.baseline.name if gpu and gpu.baseline else ""
        self.keys = {
            rung.number: row_key(rung, self.arch, spec.name, gpu is not None, baseline) for rung in rungs
        }
        self._drop_stale_rows()

    def _load(self) -> Ladder:
        emulated = self.gpu is None
        if self.path is None or not self.path.exists() or self.path.stat().st_size == 0:
            return Ladder(device=self.spec.name, emulated=emulated)
        ladder = load_ladder(self.path)
        if (ladder.device, ladder.emulated) != (self.spec.name, emulated):
            kinds = {True: "emulated", False: "measured"}
            raise UsageError(
                f"{self.path} holds the ladder {kinds[ladder.emulated]} on {ladder.device}, "
                f"this one is {kinds[emulated]} on {self.spec.name}: give another file"
            )
        return ladder

    def _drop_stale_rows(self) -> None:
        """Forget rows of the rungs at hand that were made from other sources or by another compiler."""
        self.ladder.rows = [
            row for row in self.ladder.rows if row.rung not in self.keys or row.key == self.keys[row.rung]
        ]

    def _pairs(self) -> Iterator[tuple[Rung, int]]:
        for size in self.sizes:
            for rung in self.rungs:
                yield rung, size

    def compile_and_emulate(self) -> None:
        """Compile every rung; without a GPU also check and count it in the emulator."""
        emulated = self.gpu is None
        # The products that are checked do not depend on the size: once a rung is enough.
        to_check = {rung.number for rung in self.rungs if emulated} - {row.rung for row in self.ladder.rows}
        tasks = []
        for rung, size in self._pairs():
            if self.ladder.find(rung.number, size) is None:
                check = rung.number in to_check
                to_check.discard(rung.number)
                tasks.append(_Task(rung.number, size, self.spec, self.arch, check=check, count=emulated))
        what = "compiling and emulating" if emulated else "compiling"
        self._examine_all(what, tasks)

    def count(self) -> None:
        """Let the emulator count what the timed kernels do."""
        tasks = [
            _Task(rung.number, size, self.spec, self.arch, check=False, count=True)
            for rung, size in self._pairs()
            if (row := self.ladder.find(rung.number, size)) is not None and row.counted is None
        ]
        self._examine_all("counting", tasks)

    def _examine_all(self, what: str, tasks: Sequence[_Task]) -> None:
        self.progress.start(what, len(tasks))
        finished = 0
        for task, examined in run_tasks(_examine, tasks, self.jobs, self.budget):
            self._enter(task, examined)
            finished += 1
            self.progress.step(f"rung {task.rung:02d} at {task.size}")
        if finished < len(tasks):
            left = len(tasks) - finished
            self.ladder.notes.append(
                f"{what}: {left} of {len(tasks)} rows were left out, the budget was used up"
            )

    def _enter(self, task: _Task, examined: _Examined) -> None:
        rung = get_rung(task.rung)
        old = self.ladder.find(task.rung, task.size)
        row = old or Row(
            rung=rung.number,
            name=rung.name,
            title=rung.name.replace("_", " "),
            size=task.size,
            key=self.keys[rung.number],
            session=self.session,
            build=examined.build,
            reported=rung.reported.throughput,
            reported_figures=rung.reported.figures,
        )
        row = replace(
            row,
            build=examined.build,
            checks=examined.checks or row.checks,
            counted=examined.counted or row.counted,
        )
        self.ladder.put(row)
        self._save()

    def time(self, gpu: Gpu) -> None:
        """Time every rung at every size against the baseline, all of a size in turn."""
        from tilewave.lab.measure import Candidate, Measurer

        measurer = Measurer(gpu.device, self.spec, gpu.baseline)
        rng = np.random.default_rng()
        todo = [(size, self._untimed(size)) for size in self.sizes]
        todo = [(size, rungs) for size, rungs in todo if rungs]
        self.progress.start("timing", len(todo))
        for index, (size, rungs) in enumerate(todo):
            if self.budget.left <= 0:
                left = ", ".join(str(size) for size, _ in todo[index:])
                self.ladder.notes.append(f"timing: N = {left} left out, the budget was used up")
                break
            candidates = []
            for rung in rungs:
                program, kernel, _ = emulate.build(rung, self.spec, self.arch, size)
                candidates.append(Candidate(rung, program, kernel, self.spec))
            weights = [_time_weight(later) for later, _ in todo[index:]]
            share = self.budget.left * weights[0] / sum(weights)
            found = measurer.measure(size, candidates, rng, None if math.isinf(share) else share)
            for number, measured in found.rungs.items():
                row = self.ladder.find(number, size)
                assert row is not None  # compiling entered it
                self.ladder.put(
                    replace(
                        row,
                        session=self.session,
                        checks=(measured.check,),
                        difference=measured.difference,
                        speed=measured.speed,
                    )
                )
                if not measured.check.holds:
                    self.ladder.notes.append(f"rung {number:02d} is WRONG at N = {size} and was not timed")
            if gpu.baseline is not None and found.baseline is not None:
                self.ladder.put_baseline(
                    BaselineRow(
                        gpu.baseline.name, size, self.session, found.baseline, found.baseline_error or 0.0
                    )
                )
            self.ladder.sessions[self.session]["states"].append(
                {
                    "size": size,
                    "before": asdict(found.before),
                    "after": asdict(found.after),
                    "graphs": found.graphs,
                }
            )
            self._save()
            self.progress.step(f"N = {size}")

    def _untimed(self, size: int) -> list[Rung]:
        rows = ((rung, self.ladder.find(rung.number, size)) for rung in self.rungs)
        return [rung for rung, row in rows if row is not None and row.speed is None]

    def finish(self) -> None:
        """Share the checks among the sizes of a rung, judge the predictions, write the last state."""
        if self.gpu is None:
            checks = {row.rung: row.checks for row in self.ladder.rows if row.checks}
            self.ladder.rows = [
                replace(row, checks=row.checks or checks.get(row.rung, ())) for row in self.ladder.rows
            ]
        self.ladder.rows = judge(self.ladder.rows, self.spec.sms)
        self._save()

    def _save(self) -> None:
        if self.path is not None:
            save_ladder(self.ladder, self.path)


def _time_weight(size: int) -> float:
    """A size's share of the time, relative to a small one's, so that all get about as many rounds.

    A sample lasts a fixed time at least, so small sizes take alike; from about 4096 on single calls of the
    first rungs are longer than that.
    """
    return 1.0 + (size / 4096) ** 3


def row_key(rung: Rung, arch: str, device: str, timed: bool, baseline: str) -> str:
    """A digest of everything that a row's figures depend on, apart from the size."""
    digest = hashlib.sha256()
    source = rung.source()
    parts = [*rung.entries, source.text]
    parts += [text for pair in sorted(source.headers.items()) for text in pair]
    parts += [arch, device, compiler_version(), str(timed), baseline, str(PROCEDURE)]
    for part in parts:
        digest.update(f"{len(part)}:".encode())
        digest.update(part.encode())
    return digest.hexdigest()[:16]
