"""Rungs in columns: what was predicted, what the emulator counts, what the profiler reads, and cuBLAS."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from tilewave.bench.environment import Environment
from tilewave.compiler import choose_arch
from tilewave.compiler.toolchain import compiler_version
from tilewave.device import DeviceSpec
from tilewave.errors import ToolchainError, UsageError
from tilewave.lab import emulate, ncu
from tilewave.lab.ladder import Gpu
from tilewave.lab.launches import launch_of
from tilewave.lab.profile.metrics import (
    derived,
    library_kernel,
    reading_of,
    rung_of,
    wanted_metrics,
)
from tilewave.lab.profile.records import (
    EMULATED,
    EMULATOR,
    HARDWARE,
    NCU,
    PREDICTION,
    TIMING,
    KernelProfile,
    LibraryKernel,
    Profile,
    Reading,
)
from tilewave.lab.records import Speed
from tilewave.lab.registry import RESOURCES, Rung, get_rung
from tilewave.lab.workers import Budget, run_tasks

PROFILER_LIMIT_S = 600.0


@dataclass(frozen=True)
class _Task:
    rung: int
    size: int
    spec: DeviceSpec
    arch: str


@dataclass(frozen=True)
class Hardware:
    """What a GPU told: a reading for each rung's number, the library's kernels, and how it was had."""

    how: str
    rungs: Mapping[int, Reading]
    library: tuple[LibraryKernel, ...] = ()
    profiler: str = ""
    notes: tuple[str, ...] = ()


def profile_rungs(
    rungs: Sequence[Rung],
    size: int,
    spec: DeviceSpec,
    *,
    gpu: Gpu | None = None,
    hardware: Hardware | None = None,
    budget_s: float | None = None,
    jobs: int = 1,
) -> Profile:
    """All columns of the rungs for N = M = K = ``size`` on ``spec``.

    With ``gpu`` the profiler runs there, or if it may not, the stopwatch; ``hardware`` is what was read
    before. ``budget_s`` (seconds) bounds the profiler alone.
    """
    kernels = without_gpu(rungs, size, spec, jobs)
    if gpu is not None:
        hardware = measure(rungs, size, spec, gpu, budget_s)
    if hardware is not None:
        kernels = [
            replace(kernel, readings={**kernel.readings, HARDWARE: hardware.rungs[kernel.rung]})
            if kernel.rung in hardware.rungs
            else kernel
            for kernel in kernels
        ]
    environment = Environment.capture(
        device=gpu.device if gpu else None,
        compiler=compiler_version(),
        gpu_details={"sms": spec.sms, "clock_mhz": spec.clock_mhz, "arch": spec.arch} if gpu else None,
    )
    return Profile(
        device=spec.name,
        size=size,
        how=EMULATED if hardware is None else hardware.how,
        environment=environment.to_json(),
        kernels=tuple(kernels),
        library_name=gpu.baseline.name if gpu and gpu.baseline else "",
        library=() if hardware is None else hardware.library,
        profiler="" if hardware is None else hardware.profiler,
        notes=() if hardware is None else hardware.notes,
    )


def without_gpu(rungs: Sequence[Rung], size: int, spec: DeviceSpec, jobs: int) -> list[KernelProfile]:
    """The columns that need no GPU: prediction (where there is any) and emulator."""
    counted = emulated_readings(rungs, size, spec, jobs)
    kernels = []
    for rung in rungs:
        predicted = predicted_reading(rung, size, spec, counted)
        readings = {PREDICTION: predicted} if predicted.figures else {}
        readings[EMULATOR] = counted[rung.number]
        entry = launch_of(rung, size, size, size, spec).entry
        kernels.append(KernelProfile(rung.number, rung.title, entry, readings))
    return kernels


def recounted(profile: Profile, spec: DeviceSpec, jobs: int) -> Profile:
    """A profile with the columns that need no GPU made anew, by the same compiler or not at all."""
    compiler = profile.environment["compiler"]
    if compiler != compiler_version():
        raise UsageError(f"the profile was made with {compiler}, and here is {compiler_version()}")
    rungs = [get_rung(kernel.rung) for kernel in profile.kernels]
    anew = without_gpu(rungs, profile.size, spec, jobs)
    kernels = [
        replace(new, readings={**new.readings, HARDWARE: old.readings[HARDWARE]})
        if HARDWARE in old.readings
        else new
        for new, old in zip(anew, profile.kernels, strict=True)
    ]
    return replace(profile, kernels=tuple(kernels))


def emulated_readings(rungs: Sequence[Rung], size: int, spec: DeviceSpec, jobs: int) -> dict[int, Reading]:
    """The emulator's column of the rungs, and of those that their predictions refer to."""
    arch = choose_arch(spec.compute_capability).arch
    numbers = {rung.number for rung in rungs}
    numbers |= {
        rung.builds_on
        for rung in rungs
        if rung.builds_on is not None and any(p.ratio is not None for p in rung.predictions)
    }
    tasks = [_Task(number, size, spec, arch) for number in sorted(numbers)]
    return {task.rung: reading for task, reading in run_tasks(_emulate, tasks, jobs, Budget(None))}


def _emulate(task: _Task) -> Reading:
    rung = get_rung(task.rung)
    program, kernel, build = emulate.build(rung, task.spec, task.arch, task.size)
    counted = asdict(emulate.count(rung, program, kernel, task.size, task.spec))
    figures: dict[str, float] = {
        "registers": build.registers,
        "spill_store_bytes": build.spill_store_bytes,
        "static_shared_bytes": build.shared_bytes,
        "blocks_per_sm": build.blocks_per_sm,
        "outputs_per_thread": build.fma_per_step,
    }
    figures |= {name: value for name, value in counted.items() if not name.startswith("blocks_")}
    figures["global_load_sectors"] += figures["copy_sectors"]  # as the profiler counts
    return Reading(figures | derived(figures))


def predicted_reading(rung: Rung, size: int, spec: DeviceSpec, counted: Mapping[int, Reading]) -> Reading:
    """What the registry predicts for this size and GPU, ratios applied to the emulator's figures."""
    figures: dict[str, float] = {}
    for prediction in rung.predictions:
        if prediction.counter not in RESOURCES and prediction.size != size:
            continue
        if prediction.sms not in (None, spec.sms):
            continue
        if prediction.counter == "global_load_sectors" and counted[rung.number].figures["copies"]:
            continue  # the registry's is without copies, the profiler's with them
        if prediction.value is not None:
            figures[prediction.counter] = prediction.value
            continue
        base = counted[rung.builds_on].figures if rung.builds_on is not None else {}
        if prediction.counter in base and prediction.ratio is not None:
            # Where a value is predicted beside the ratio, the value says more.
            figures.setdefault(prediction.counter, prediction.ratio * base[prediction.counter])
    return Reading(figures | derived(figures))


def measure(rungs: Sequence[Rung], size: int, spec: DeviceSpec, gpu: Gpu, budget_s: float | None) -> Hardware:
    """Counters where the profiler may read them, else times; the notes say which and why."""
    try:
        return profiled(rungs, size, budget_s)
    except ToolchainError as error:
        return timed(rungs, size, spec, gpu, str(error))


def profiled(rungs: Sequence[Rung], size: int, budget_s: float | None) -> Hardware:
    """Run ncu over the rungs and the library; raises ``ToolchainError`` where it cannot tell."""
    tool = ncu.find_ncu()
    limit = PROFILER_LIMIT_S if budget_s is None else budget_s
    numbers = [str(rung.number) for rung in rungs]
    command = [sys.executable, "-m", "tilewave.lab.profile.launch", str(size), *numbers]
    try:
        known, missing = ncu.split_known(wanted_metrics(), ncu.available_metrics(tool))
        launches, refused = ncu.profile(tool, command, known, timeout=limit)
        version = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"ncu did not finish ({type(error).__name__}, limit {limit:.0f} s)") from error
    found = split_launches(launches, size, NCU)
    lacking = [rung.title for rung in rungs if rung.number not in found.rungs]
    if lacking:
        raise ToolchainError(f"ncu saw no launch of {', '.join(lacking)}")
    notes = []
    if missing or refused:
        notes.append(f"this GPU's profiler lacks {', '.join([*missing, *refused])}")
    if not found.library:
        notes.append("no kernel of cuBLAS was seen")
    lines = version.strip().splitlines()
    return Hardware(NCU, found.rungs, found.library, lines[-1] if lines else "", tuple(notes))


def split_launches(launches: Sequence[ncu.KernelCounters], size: int, how: str) -> Hardware:
    """The launches of a report: ours by their names (the last of each rung), all others the library's."""
    rungs: dict[int, Reading] = {}
    library: list[LibraryKernel] = []
    for counters in launches:
        number = rung_of(counters.kernel)
        if number is None:
            library.append(library_kernel(counters, size))
        else:
            rungs[number] = reading_of(counters, size)
    return Hardware(how, rungs, tuple(library))


def timed(rungs: Sequence[Rung], size: int, spec: DeviceSpec, gpu: Gpu, why: str) -> Hardware:
    """Times alone, rungs and library in turn; the note says why there are no counters."""
    from tilewave.lab.measure import Candidate, Measurer

    arch = choose_arch(spec.compute_capability).arch
    candidates = []
    for rung in rungs:
        program, kernel, _ = emulate.build(rung, spec, arch, size)
        candidates.append(Candidate(rung, program, kernel, spec))
    found = Measurer(gpu.device, spec, gpu.baseline).measure(size, candidates, np.random.default_rng())
    readings = {
        number: _speed(measured.speed)
        for number, measured in found.rungs.items()
        if measured.speed is not None
    }
    library: tuple[LibraryKernel, ...] = ()
    if found.baseline is not None and gpu.baseline is not None:
        library = (LibraryKernel("", _speed(found.baseline), derivation="only its time is known"),)
    notes = [f"times only, no counters: {why}"]
    notes += [
        f"{get_rung(number).title} is WRONG at N = {size} and was not timed"
        for number, measured in found.rungs.items()
        if measured.speed is None
    ]
    return Hardware(TIMING, readings, library, "", tuple(notes))


def _speed(speed: Speed) -> Reading:
    return Reading({"milliseconds": speed.median_ms, "tflops": speed.tflops})
