"""Running probes: every variant compiled, checked and counted; on a GPU timed in turn, and profiled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tilewave.compiler import Program, choose_arch, compile_source, occupancy
from tilewave.compiler.records import Kernel
from tilewave.device import DeviceSpec
from tilewave.lab import emulate
from tilewave.lab.launches import launch_of
from tilewave.lab.probe_catalog import PROBES
from tilewave.lab.probe_records import (
    Examined,
    Expectation,
    Findings,
    Judged,
    Probe,
    Reading,
    SizeFindings,
    Timed,
    Variant,
    by_name,
)
from tilewave.lab.records import Check, Speed
from tilewave.lab.registry import RESOURCES
from tilewave.lab.workers import Budget, run_tasks
from tilewave.precision import error_in_bounds

if TYPE_CHECKING:
    from tilewave.lab.ladder import Gpu
    from tilewave.runtime.driver import Device, DeviceArray, PreparedLaunch, Stream

#: Counters are taken at this N, or at a smaller one that fits the size asked for: ratios need no large one.
COUNTED_SIZE = 1024
#: What is predicted is predicted for whole tiles and slices: every rung's divide this.
WHOLE_TILES = 256
ROUNDS = 5
CHECKED_ROWS = 64
_SHARED_STEP = 1024


def get_probe(name: str) -> Probe:
    """The probe of this name; raises ``UsageError`` that lists the names there are."""
    return by_name(PROBES, name, ("register-file",))


def counted_size(sizes: Sequence[int]) -> int:
    """The N at which a probe of these sizes is counted: whole tiles, and no more than need be."""
    return min(COUNTED_SIZE, -(-min(sizes) // WHOLE_TILES) * WHOLE_TILES)


def dynamic_shared_for(variant: Variant, kernel: Kernel, spec: DeviceSpec) -> int:
    """Bytes of dynamic shared memory that leave room for no more blocks than the variant wants on an SM."""
    if variant.hold_to is None:
        return 0
    threads, size = variant.rung.threads, 0
    while occupancy(kernel.resources, threads, spec, size).blocks_per_sm > variant.hold_to:
        size += _SHARED_STEP
    return size


@dataclass(frozen=True)
class _Task:
    """One variant to examine, small enough to be sent to another process."""

    probe: str
    variant: str
    size: int
    spec: DeviceSpec
    arch: str
    check: bool


def examine(task: _Task) -> Examined:
    """Compile a variant, check its product if it is one and is not simply a rung, and count what it does."""
    variant = get_probe(task.probe).variant(task.variant)
    rung = variant.rung
    program, kernel, build = emulate.build(rung, task.spec, task.arch, task.size)
    dynamic = dynamic_shared_for(variant, kernel, task.spec)
    fit = occupancy(kernel.resources, rung.threads, task.spec, dynamic)
    build = replace(build, blocks_per_sm=fit.blocks_per_sm, occupancy=fit.fraction, limited_by=fit.limiting)
    checks: tuple[Check, ...] = ()
    if task.check and rung.product and rung.edits:
        checks = emulate.check(rung, program, np.random.default_rng(), task.spec)
    counted = emulate.count(rung, program, kernel, task.size, task.spec)
    return Examined(build, dynamic, checks, counted)


def run_probes(
    probes: Sequence[Probe],
    spec: DeviceSpec,
    *,
    gpu: Gpu | None = None,
    sizes: Sequence[int] | None = None,
    budget_s: float | None = None,
    jobs: int = 1,
    profile: bool | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Findings]:
    """Run probes and return what each found.

    ``spec`` is the emulated GPU, or the description of ``gpu``. ``sizes`` replace the probes' own.
    ``profile`` says whether to run the profiler (None: for the probes that ask for it). Nothing starts that
    is expected to outlast ``budget_s``; what was left out is in the notes. With ``jobs`` above 1 worker
    processes are spawned.
    """
    budget = Budget(budget_s)
    arch = choose_arch(spec.compute_capability).arch
    all_findings = []
    tasks = []
    for probe in probes:
        wanted = tuple(sizes) if sizes else probe.sizes(spec)
        findings = Findings(probe.name, counted_size(wanted))
        findings.sizes = [SizeFindings(size) for size in wanted]
        if probe.tables is not None:
            findings.tables = probe.tables()
        all_findings.append(findings)
        tasks += [
            _Task(probe.name, variant.key, findings.counted_size, spec, arch, check=gpu is None)
            for variant in probe.variants
        ]
    found = {findings.probe: findings for findings in all_findings}
    if gpu is not None:  # times first: they are what a budget is for
        _time_all(probes, found, gpu, spec, arch, budget, tell)
        _profile_all(probes, found, budget, profile, tell)
    tell(f"compiling and emulating {len(tasks)} kernels")
    for task, examined in run_tasks(examine, tasks, jobs, budget):
        found[task.probe].examined[task.variant] = examined
    for probe in probes:
        findings = found[probe.name]
        if len(findings.examined) < len(probe.variants):
            findings.notes.append("not all kernels were counted: the budget was used up")
        findings.notes += spill_notes(probe, findings)
        findings.judged = [judge(probe, findings, expectation) for expectation in probe.expectations]
        for at in findings.sizes:
            at.words = probe.meaning(Reading(spec, findings, at))
    return all_findings


def spill_notes(probe: Probe, findings: Findings) -> list[str]:
    """What to bear in mind where an edit made the compiler spill registers, or stop spilling them."""
    notes = []
    for variant in probe.variants:
        other = probe.against(variant)
        own, base = findings.examined.get(variant.key), findings.examined.get(other or "")
        if own is None or base is None or own.build.spill_store_bytes == base.build.spill_store_bytes:
            continue
        notes.append(
            f'the compiler spills {own.build.spill_store_bytes} bytes a thread in "{variant.label}" and '
            f'{base.build.spill_store_bytes} in "{probe.variant(other or "").label}", so part of the '
            "difference between them may be the compiler's"
        )
    return notes


def judge(probe: Probe, findings: Findings, expectation: Expectation) -> Judged:
    """An expectation beside what the emulator and the hardware counted."""
    other = probe.against(probe.variant(expectation.variant))
    ratio = expectation.ratio_at(findings.counted_size)

    def found(figures: Callable[[str], Mapping[str, float]]) -> float | None:
        own = figures(expectation.variant).get(expectation.figure)
        if ratio is None or own is None:
            return own
        base = None if other is None else figures(other).get(expectation.figure)
        return own / base if base else None

    expected = ratio if ratio is not None else expectation.value
    assert expected is not None  # an expectation is a ratio or a value
    return Judged(
        expectation.variant,
        expectation.figure,
        expected,
        ratio is not None,
        found(lambda key: _emulated_figures(findings.examined.get(key))),
        None if expectation.figure in RESOURCES else found(lambda key: findings.hardware.get(key, {})),
        expectation.why,
    )


def _emulated_figures(examined: Examined | None) -> dict[str, float]:
    """Everything of an examined variant that an expectation may name."""
    if examined is None:
        return {}
    build = examined.build
    figures: dict[str, float] = {
        "registers": build.registers,
        "spill_store_bytes": build.spill_store_bytes,
        "static_shared_bytes": build.shared_bytes,
        "blocks_per_sm": build.blocks_per_sm,
    }
    if examined.counted is not None:
        figures.update(vars(examined.counted))
        if examined.counted.passes_per_read is not None:
            figures["passes_per_read"] = examined.counted.passes_per_read
    return figures


def prepare_variant(
    variant: Variant,
    program: Program,
    spec: DeviceSpec,
    device: Device,
    stream: Stream,
    a: DeviceArray,
    b: DeviceArray,
    c: DeviceArray,
) -> PreparedLaunch:
    """A launch of a variant for c = a @ b, ready to be submitted."""
    from tilewave.lab.measure import Candidate, prepare

    (m, k), n = a.shape, b.shape[1]
    kernel = program.kernels[launch_of(variant.rung, m, n, k, spec).entry]
    dynamic = dynamic_shared_for(variant, kernel, spec)
    return prepare(Candidate(variant.rung, program, kernel, spec), device, stream, a, b, c, dynamic)


def compile_variant(variant: Variant, arch: str) -> Program:
    """All kernels of a variant."""
    return compile_source(variant.rung.source(), variant.rung.entries, arch)


def _time_all(
    probes: Sequence[Probe],
    found: Mapping[str, Findings],
    gpu: Gpu,
    spec: DeviceSpec,
    arch: str,
    budget: Budget,
    tell: Callable[[str], None],
) -> None:
    from tilewave.runtime.driver import Stream

    stream, rng = Stream(gpu.device), np.random.default_rng()
    for probe in probes:
        for at in found[probe.name].sizes:
            if budget.left <= 0:
                found[probe.name].notes.append(f"N = {at.size} was not timed: the budget was used up")
                continue
            tell(f"timing {probe.name} at N = {at.size}")
            left = None if math.isinf(budget.left) else budget.left
            at.timed = time_variants(probe, at.size, gpu.device, stream, spec, arch, rng, left)


def time_variants(
    probe: Probe,
    size: int,
    device: Device,
    stream: Stream,
    spec: DeviceSpec,
    arch: str,
    rng: np.random.Generator,
    budget_s: float | None = None,
) -> dict[str, Timed]:
    """Check and time all variants at N = ``size`` in turn. Only variants that are no product go unchecked."""
    from tilewave.bench.gpu import EventStopwatch, can_capture
    from tilewave.bench.timing import Contender, check_rate, interleave
    from tilewave.runtime.driver import DeviceArray

    a, b = (rng.standard_normal((size, size), dtype=np.float32) for _ in range(2))
    left, right = DeviceArray.from_numpy(device, a), DeviceArray.from_numpy(device, b)
    out = DeviceArray.empty(device, (size, size))
    rows = np.sort(rng.choice(size, min(size, CHECKED_ROWS), replace=False))
    checks: dict[str, Check | None] = {}
    contenders = []
    for variant in probe.variants:
        program = compile_variant(variant, arch)
        launch = prepare_variant(variant, program, spec, device, stream, left, right, out)
        out.poison()
        launch()
        check = None
        if variant.rung.product:
            error = error_in_bounds(out.to_numpy(), a, b, rows)
            check = Check("GPU", (size, size, size), error, variant.rung.tolerance)
        checks[variant.key] = check
        if check is None or check.holds:
            contenders.append(Contender(variant.key, launch))
    graphs = can_capture(stream, [contender.work for contender in contenders])
    stopwatch = EventStopwatch(device, stream, graphs=graphs)
    timings = interleave(contenders, stopwatch, rounds=ROUNDS, budget_s=budget_s)
    timed = {}
    for variant in probe.variants:
        timing, other = timings.get(variant.key), probe.against(variant)
        base = None if other is None else timings.get(other)
        speed = None
        if timing is not None:
            tflops = timing.tflops(2.0 * size**3)
            check_rate(timing.name, tflops, spec.peak_fp32_tflops)
            speed = Speed(timing.rounds_ms, timing.repeats, tflops, timing.spread)
        ratio = None if timing is None or base is None else timing.speed_over(base)
        timed[variant.key] = Timed(checks[variant.key], speed, ratio)
    return timed


def _profile_all(
    probes: Sequence[Probe],
    found: Mapping[str, Findings],
    budget: Budget,
    wanted: bool | None,
    tell: Callable[[str], None],
) -> None:
    """Let the profiler read counters and stalls of every variant that asks for it."""
    from tilewave.errors import ToolchainError
    from tilewave.lab.probe_profile import Launch, profile_launches

    chosen = [probe for probe in probes if (probe.profile if wanted is None else wanted)]
    launches = []
    for probe in chosen:
        findings = found[probe.name]
        for size in dict.fromkeys((findings.counted_size, *(at.size for at in findings.sizes))):
            launches += [Launch(probe.name, variant.key, size) for variant in probe.variants]
    if not launches:
        return
    tell(f"profiling {len(launches)} launches")
    try:
        profiled = profile_launches(launches, None if math.isinf(budget.left) else budget.left)
    except ToolchainError as error:
        for probe in chosen:
            found[probe.name].notes.append(f"no hardware counters: {error}")
        return
    for launch, metrics in zip(launches, profiled, strict=True):
        findings = found[launch.probe]
        if launch.size == findings.counted_size:
            findings.hardware[launch.variant] = metrics
        for at in findings.sizes:
            if at.size == launch.size:
                at.profiled[launch.variant] = metrics
