"""The selftest: every kernel of the package on the user's own GPU, or in the emulator, against float64.

A *case* is one product of a rung: a shape and a kind of data. Its operands depend on the seed, the rung and
the case alone, so that a case that failed can be run again without the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tilewave.compiler import Program, choose_arch, compile_source
from tilewave.device import DeviceSpec
from tilewave.errors import CompileError, DeviceError, EmulationError
from tilewave.lab import emulate
from tilewave.lab.guarded import differing, guarded_product
from tilewave.lab.ladder import Progress, Silent
from tilewave.lab.launches import launch_of
from tilewave.lab.registry import Rung
from tilewave.lab.selftest_library import LibraryOutcome
from tilewave.lab.workers import Budget, run_tasks
from tilewave.precision import errors_in_bounds
from tilewave.runtime.driver import Device, Stream

Float32 = NDArray[np.float32]
Shape = tuple[int, int, int]

NORMAL, POSITIVE, SPECIAL = "N(0,1)", "U(0,1)", "special values"
DATA = (NORMAL, POSITIVE, SPECIAL)
"""Kinds of data: signs that cancel; nothing that cancels; NaN, Inf, zeros of both signs and subnormals."""

SPECIAL_VALUES = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-42)
#: Up to this many multiply-adds a GPU's result is compared with the emulator's, bit for bit.
LARGEST_COMPARED = 1 << 23
#: Up to this many elements of C shapes are tried to find one for which a rung picks its rarer kernels.
LARGEST_SEARCHED = 1 << 23


@dataclass(frozen=True)
class Case:
    """One product of a rung."""

    shape: Shape
    data: str

    def operands(self, rung: Rung, seed: int) -> tuple[Float32, Float32]:
        """A (M x K) and B (K x N)."""
        m, n, k = self.shape
        rng = np.random.default_rng([seed, rung.number, *self.shape, DATA.index(self.data)])
        if self.data == POSITIVE:
            return rng.random((m, k), np.float32), rng.random((k, n), np.float32)
        a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
        if self.data == SPECIAL:
            for matrix in (a, b):
                for value in SPECIAL_VALUES:
                    matrix[rng.integers(matrix.shape[0]), rng.integers(matrix.shape[1])] = value
        return a, b

    def __str__(self) -> str:
        return "M N K = {} {} {}, {}".format(*self.shape, self.data)


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be: what is wrong with which kernel, in words and in figures."""

    what: str
    detail: str
    wrong_elements: int | None = None
    worst: tuple[int, int] | None = None
    got: float | None = None
    expected: float | None = None


@dataclass(frozen=True)
class Outcome:
    """One case and what came of it; `error_in_bounds` is None where there is no result."""

    rung: int
    title: str
    kernel: str
    case: Case
    allowed: float
    error_in_bounds: float | None = None
    findings: tuple[Finding, ...] = ()


@dataclass
class Selftest:
    """What was run on what, and what was found."""

    device: str
    arch: str
    emulated: bool
    seed: int
    rungs: tuple[int, ...]
    outcomes: list[Outcome] = field(default_factory=list)
    compared_bits: list[int] = field(default_factory=list)
    """Rungs whose result on the GPU was compared with the emulator's, bit for bit."""
    not_run: list[int] = field(default_factory=list)
    library: list[LibraryOutcome] = field(default_factory=list)
    """What the library's kernels came to, where they were asked for (`selftest_library`)."""
    library_not_run: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failures(self) -> list[Outcome]:
        """The outcomes with something wrong."""
        return [outcome for outcome in self.outcomes if outcome.findings]

    @property
    def library_failures(self) -> list[LibraryOutcome]:
        """The library's outcomes with something wrong."""
        return [outcome for outcome in self.library if outcome.findings]

    @property
    def passed(self) -> bool:
        """Whether everything ran and nothing is wrong."""
        return not (self.failures or self.not_run or self.library_failures or self.library_not_run)

    def to_json(self) -> dict[str, Any]:
        """Plain data for a JSON file."""
        return asdict(self) | {"passed": self.passed}


class Runner(Protocol):
    """Where products are computed."""

    def product(
        self, rung: Rung, program: Program, a: Float32, b: Float32
    ) -> tuple[Float32, tuple[str, ...]]:
        """a @ b by the rung, unwritten elements NaN, and in words what the kernel did that it should not."""
        ...


class EmulatedRunner:
    """Products in the emulator, where an access outside an operand is an error by itself."""

    def __init__(self, spec: DeviceSpec) -> None:
        self._spec = spec

    def product(
        self, rung: Rung, program: Program, a: Float32, b: Float32
    ) -> tuple[Float32, tuple[str, ...]]:
        """See `Runner`."""
        return emulate.product(rung, program, a, b, self._spec), ()


class GpuRunner:
    """Products on a GPU, between guard zones, each launched twice."""

    def __init__(self, device: Device, spec: DeviceSpec) -> None:
        self._device = device
        self._spec = spec
        self._stream = Stream(device)

    def product(
        self, rung: Rung, program: Program, a: Float32, b: Float32
    ) -> tuple[Float32, tuple[str, ...]]:
        """See `Runner`."""
        done = guarded_product(self._device, self._spec, self._stream, rung, program, a, b)
        return done.c, done.damage


def cases(rung: Rung, spec: DeviceSpec, seed: int, *, thorough: bool) -> tuple[tuple[Case, ...], list[str]]:
    """The cases of a rung; the first ones, all `NORMAL`, reach every kernel that it has at ragged sizes.

    `thorough` (for a GPU) adds edges of every kind. Kernels that the rung picks on this GPU at no size that
    was tried are returned beside the cases.
    """
    tile, (n_multiple, k_multiple) = rung.tile, _multiples(rung)
    depth = _round_up(2 * tile.bk, k_multiple)
    ragged = list(emulate.ragged_shapes(rung))
    found, missing = _shapes_of_other_kernels(rung, spec, ragged)
    chosen = [Case(shape, NORMAL) for shape in (*ragged, *found)]
    # Part of a tile, by each of the kernels for it: data of another kind does not care how many there are.
    partial: list[Shape] = [(max(1, tile.bm - 5), max(1, tile.bn - 3), 2 * tile.bk + 3)]
    if rung.needs is not None:
        partial.append((max(1, tile.bm - 5), tile.bn - n_multiple, depth))
    chosen += [Case(shape, data) for shape in partial for data in (POSITIVE, SPECIAL)]
    rng = np.random.default_rng([seed, rung.number])
    m, n, k = (int(rng.integers(1, 2 * extent + 8)) for extent in (tile.bm, tile.bn, max(tile.bk, 4)))
    edges: list[Shape] = [(1, 1, 1), (m, n, k)]
    if thorough:
        edges += [
            (max(1, tile.bm - 1), max(1, tile.bn - 1), max(1, tile.bk - 1)),
            (tile.bm + 1, 1, 2 * tile.bk + 1),
            (1, tile.bn + 1, tile.bk + 1),
            (tile.bm, tile.bn, 2 * tile.bk),
            (2 * tile.bm + 37, 2 * tile.bn + 37, 257),
            (tile.bm + 11, tile.bn + n_multiple, depth),
            (67, 71, 73),
        ]
        chosen += [Case(shape, data) for shape in ragged for data in (POSITIVE, SPECIAL)]
    chosen += [Case(shape, NORMAL) for shape in edges]
    return tuple(dict.fromkeys(chosen)), missing


def _multiples(rung: Rung) -> tuple[int, int]:
    """What N and K must be multiples of for the rung's kernel with wide loads."""
    return (1, 1) if rung.needs is None else (rung.needs.n_multiple, rung.needs.k_multiple)


def _round_up(least: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `least`."""
    return -(-least // unit) * unit


def _shapes_of_other_kernels(
    rung: Rung, spec: DeviceSpec, shapes: Iterable[Shape]
) -> tuple[list[Shape], list[str]]:
    """Ragged shapes for the kernels of a rung that none of these reach, and the kernels that none reaches."""
    missing = set(rung.entries) - {launch_of(rung, *shape, spec).entry for shape in shapes}
    found: list[Shape] = []
    if not missing:
        return found, []
    tile, (n_multiple, k_multiple) = rung.tile, _multiples(rung)
    depth = _round_up(tile.bk, k_multiple)
    for factor in range(1, 65):
        for rows, columns in ((factor, factor), (factor, 1), (1, factor), (factor, 2 * factor)):
            for more, k in ((1, tile.bk + 3), (n_multiple, depth)):
                shape = (rows * tile.bm + 1, columns * tile.bn + more, k)
                if not missing or shape[0] * shape[1] > LARGEST_SEARCHED:
                    continue
                entry = launch_of(rung, *shape, spec).entry
                if entry in missing:
                    missing.remove(entry)
                    found.append(shape)
    return found, sorted(missing)


def examine(
    rung: Rung, program: Program, case: Case, spec: DeviceSpec, seed: int, runner: Runner
) -> tuple[Outcome, Float32 | None]:
    """Run one case and compare it with float64; the product is returned too, if there is one.

    A ``DeviceError`` (the GPU is lost to this process) is raised on.
    """
    kernel = launch_of(rung, *case.shape, spec).entry
    a, b = case.operands(rung, seed)
    outcome = Outcome(rung.number, rung.title, kernel, case, rung.tolerance)
    try:
        c, damage = runner.product(rung, program, a, b)
    except EmulationError as error:
        return replace(outcome, findings=(Finding("failed", str(error)),)), None
    findings = [Finding(text, f"the kernel {text}") for text in damage]
    errors = errors_in_bounds(c, a, b)
    wrong = ~(errors <= rung.tolerance)
    if wrong.any():
        row, column = (int(index) for index in np.unravel_index(np.argmax(errors), errors.shape))
        findings.append(_wrong_value(c, a, b, errors, wrong, (row, column)))
    return replace(outcome, error_in_bounds=float(errors.max()), findings=tuple(findings)), c


def _wrong_value(
    c: Float32,
    a: Float32,
    b: Float32,
    errors: NDArray[np.float64],
    wrong: NDArray[np.bool_],
    worst: tuple[int, int],
) -> Finding:
    row, column = worst
    with np.errstate(invalid="ignore"):
        expected = float(a[row].astype(np.float64) @ b[:, column].astype(np.float64))
    got, count = float(c[row, column]), int(wrong.sum())
    detail = (
        f"{count:,} of {c.size:,} elements are wrong; worst C[{row}, {column}] = {got!r}, float64 says "
        f"{expected!r}: an error of {errors[row, column]:.4g} bounds"
    )
    return Finding("wrong value", detail, count, (row, column), got, expected)


@dataclass(frozen=True)
class _Task:
    """Work that needs no GPU: a rung to compile, and its cases to run in the emulator."""

    rung: Rung
    arch: str
    spec: DeviceSpec
    seed: int
    cases: tuple[Case, ...] = ()


def _compile(task: _Task) -> Program | CompileError:
    try:
        return compile_source(task.rung.source(), task.rung.entries, task.arch)
    except CompileError as error:
        return error


def _emulate(task: _Task) -> list[Outcome]:
    program = _compile(task)
    if isinstance(program, CompileError):
        return [_not_compiled(task.rung, program)]
    runner = EmulatedRunner(task.spec)
    return [examine(task.rung, program, case, task.spec, task.seed, runner)[0] for case in task.cases]


def _exact_product(task: _Task) -> Float32 | EmulationError:
    """The product of the task's one case as a GPU rounds it, or how the emulator found a fault instead."""
    (case,) = task.cases
    program = compile_source(task.rung.source(), task.rung.entries, task.arch)
    a, b = case.operands(task.rung, task.seed)
    try:
        return emulate.product(task.rung, program, a, b, task.spec, exact_fma=True)
    except EmulationError as error:
        return error


def _not_compiled(rung: Rung, error: CompileError) -> Outcome:
    case = Case((1, 1, 1), NORMAL)
    finding = Finding("does not compile", str(error))
    return Outcome(rung.number, rung.title, rung.entry, case, rung.tolerance, None, (finding,))


def run_selftest(
    rungs: Sequence[Rung],
    spec: DeviceSpec,
    *,
    seed: int,
    gpu: Runner | None = None,
    budget_s: float | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Selftest:
    """Test every kernel of the rungs on ``gpu``, or in the emulator of ``spec``.

    With ``jobs`` above 1 worker processes are spawned. No rung is started that is expected to outlast
    ``budget_s`` (seconds); the result says which were not run.
    """
    started = time.monotonic()
    choice = choose_arch(spec.compute_capability)
    result = Selftest(spec.name, choice.arch, gpu is None, seed, tuple(rung.number for rung in rungs))
    result.notes = [choice.note] if choice.note else []
    tasks = []
    for rung in rungs:
        chosen, missing = cases(rung, spec, seed, thorough=gpu is not None)
        tasks.append(_Task(rung, choice.arch, spec, seed, chosen))
        result.notes += [f"{entry} runs at no size that was tried on {spec.name}" for entry in missing]
    budget, watching = Budget(budget_s), progress or Silent()
    if gpu is None:
        _run_in_emulator(result, tasks, jobs, budget, watching)
    else:
        _run_on_gpu(result, tasks, gpu, jobs, budget, watching)
    tested = {outcome.rung for outcome in result.outcomes}
    result.not_run = [number for number in result.rungs if number not in tested]
    result.outcomes.sort(key=lambda outcome: outcome.rung)
    result.seconds = time.monotonic() - started
    return result


def _run_in_emulator(
    result: Selftest, tasks: Sequence[_Task], jobs: int, budget: Budget, progress: Progress
) -> None:
    """Every kernel once, then all other cases as far as the time goes."""
    leading, others = [], []
    for task in tasks:
        first_others = next(i for i, case in enumerate(task.cases) if case.data != NORMAL)
        leading.append(replace(task, cases=task.cases[:first_others]))
        others.append(replace(task, cases=task.cases[first_others:]))
    progress.start("emulating", len(leading) + len(others))
    left = {id(task): task for task in others}
    for task, outcomes in run_tasks(_emulate, [*leading, *others], jobs, budget):
        result.outcomes += outcomes
        left.pop(id(task), None)
        progress.step(task.rung.title)
    tested = {outcome.rung for outcome in result.outcomes}
    if cut := [task.rung.number for task in left.values() if task.rung.number in tested]:
        result.notes.append(f"for want of time, one kind of data only: rungs {', '.join(map(str, cut))}")


def _run_on_gpu(
    result: Selftest, tasks: Sequence[_Task], gpu: Runner, jobs: int, budget: Budget, progress: Progress
) -> None:
    progress.start("compiling", len(tasks))
    programs: dict[int, Program] = {}
    for task, program in run_tasks(_compile, tasks, jobs, budget):
        progress.step(task.rung.title)
        if isinstance(program, CompileError):
            result.outcomes.append(_not_compiled(task.rung, program))
        else:
            programs[task.rung.number] = program
    compiled = [task for task in tasks if task.rung.number in programs]
    progress.start("testing", len(compiled))
    kept: list[_Kept] = []
    for task in compiled:
        if budget.left <= 0:
            return
        try:
            kept += _test_on_gpu(result, task, programs[task.rung.number], gpu)
        except DeviceError as error:
            result.notes.append(f"the GPU is lost to this process: {error}")
            return
        progress.step(task.rung.title)
    _compare_bits(result, kept, jobs, budget, progress)


@dataclass(frozen=True)
class _Kept:
    """A result of the GPU that the emulator is to compute too; `position` is its place in the outcomes."""

    task: _Task
    c: Float32
    position: int


def _test_on_gpu(result: Selftest, task: _Task, program: Program, gpu: Runner) -> list[_Kept]:
    """Test a rung; the results to compare in bits are those at ragged shapes that the emulator can manage."""
    rung, spec, seed = task.rung, task.spec, task.seed
    kept = []
    for case in task.cases:
        try:
            outcome, c = examine(rung, program, case, spec, seed, gpu)
        except DeviceError as error:
            kernel = launch_of(rung, *case.shape, spec).entry
            failed = Finding("failed", str(error))
            result.outcomes.append(
                Outcome(rung.number, rung.title, kernel, case, rung.tolerance, None, (failed,))
            )
            raise
        ragged = case.shape in emulate.ragged_shapes(rung) and case.data == NORMAL
        if c is not None and ragged and math.prod(case.shape) <= LARGEST_COMPARED:
            kept.append(_Kept(replace(task, cases=(case,)), c, len(result.outcomes)))
        result.outcomes.append(outcome)
    return kept


def _compare_bits(
    result: Selftest, kept: Sequence[_Kept], jobs: int, budget: Budget, progress: Progress
) -> None:
    """Let the emulator compute the same with the hardware's rounding, one product of every rung first."""
    first = {entry.task.rung.number: entry for entry in reversed(kept)}
    ordered = sorted(kept, key=lambda entry: first[entry.task.rung.number] is not entry)
    progress.start("comparing bits", len(ordered))
    results = {id(entry.task): entry for entry in ordered}
    for task, exact in run_tasks(_exact_product, [entry.task for entry in ordered], jobs, budget):
        entry = results[id(task)]
        progress.step(task.rung.title)
        result.compared_bits = sorted({*result.compared_bits, task.rung.number})
        outcome = result.outcomes[entry.position]
        found = _other_bits(entry.c, exact)
        # A value that is wrong has been reported already.
        if found is not None and (isinstance(exact, EmulationError) or not outcome.findings):
            result.outcomes[entry.position] = replace(outcome, findings=(*outcome.findings, found))
    uncompared = sorted(set(first) - set(result.compared_bits))
    if uncompared:
        numbers = ", ".join(map(str, uncompared))
        result.notes.append(f"not compared with the emulator's bits, for want of time: rungs {numbers}")


def _other_bits(c: Float32, exact: Float32 | EmulationError) -> Finding | None:
    """How the GPU's result differs from the emulator's, if it does."""
    if isinstance(exact, EmulationError):
        return Finding("failed in the emulator", str(exact))
    differs = np.argwhere(differing(c, exact))
    if not len(differs):
        return None
    row, column = (int(index) for index in differs[0])
    got, expected = float(c[row, column]), float(exact[row, column])
    detail = (
        f"{len(differs):,} of {exact.size:,} elements are not the emulator's bit for bit; first "
        f"C[{row}, {column}] = {got!r}, the emulator says {expected!r}"
    )
    return Finding("other bits", detail, len(differs), (row, column), got, expected)
