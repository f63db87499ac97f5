"""What the command `tilewave power` does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from tilewave.bench.environment import Environment
from tilewave.bench.timing import check_rate
from tilewave.compiler.toolchain import compiler_version
from tilewave.device import DeviceSpec
from tilewave.errors import DeviceError, UsageError
from tilewave.lab import options
from tilewave.lab.command import open_gpu
from tilewave.lab.ladder import Gpu
from tilewave.lab.power.records import (
    CUBLAS,
    FFMA,
    OURS,
    PowerRun,
    load_power_run,
    save_power_run,
)
from tilewave.lab.power.rounds import plan_rounds, run_rounds
from tilewave.lab.power.table import print_run
from tilewave.lab.power.verdict import check_comparable, identity, judged, throttle_notes
from tilewave.lab.power.watch import Blind, SamplingThread, open_nvml
from tilewave.lab.registry import Rung, get_rung
from tilewave.runtime.driver import probe

DEFAULT_SECONDS = 50.0
DEFAULT_SIZE = 8192
_MOST_LOADS = 5


def power_command(
    *,
    seconds: float | None,
    rung: str | None,
    size: str | None,
    compare: Sequence[Path],
    saved: Path | None,
    path: Path | None,
) -> None:
    """Run as asked, or take a saved run; judge it, show it, and keep it."""
    console = Console(highlight=False)
    earlier = [load_power_run(file) for file in compare]
    if saved is not None:
        if seconds is not None or rung is not None or size is not None:
            raise UsageError("--from shows a run that was made: --seconds, --rung and --size go without it")
        run = load_power_run(saved)
    else:
        wanted = DEFAULT_SECONDS if seconds is None else seconds
        plan_rounds(wanted, _MOST_LOADS)  # refuses a length that is too short before anything is set up
        chosen, one_size = _choose(rung, size, earlier)
        if path is not None:
            options.check_writable(path)
        found = probe()
        if found.reason is not None:
            raise DeviceError(f"a power run needs a GPU: {found.reason}; --from FILE shows one that was made")
        gpu, spec, notice = open_gpu()
        console.print(notice, style="bold")
        if chosen is not None:  # what cannot be compared afterwards is not measured first
            baseline = None if gpu.baseline is None else gpu.baseline.name
            mine = identity(spec.name, one_size, chosen.number, baseline)
            for other in earlier:
                check_comparable(mine, other)
        run = measure_run(gpu, spec, chosen, one_size, wanted, console)
    run = judged(run, earlier)
    print_run(run, console)
    if path is not None:
        save_power_run(run, path)
        console.print(f"The run is in {path}.", markup=False)


def _choose(rung: str | None, size: str | None, earlier: Sequence[PowerRun]) -> tuple[Rung | None, int]:
    """The rung (None: the fastest) and N; those of the earlier run unless others are asked for."""
    chosen = get_rung(rung) if rung is not None else get_rung(earlier[0].rung) if earlier else None
    default = earlier[0].size if earlier else DEFAULT_SIZE
    sizes = options.parse_sizes(str(default) if size is None else size)
    if len(sizes) != 1:
        raise UsageError(f"size {size!r}: one size is accepted")
    return chosen, sizes[0]


def measure_run(
    gpu: Gpu, spec: DeviceSpec, rung: Rung | None, size: int, seconds: float, console: Console
) -> PowerRun:
    """Set the stage, run for ``seconds``, and return the record, not judged yet."""
    from tilewave.lab.power.gpu import fastest_rung, set_stage

    if rung is None:
        rung = fastest_rung(gpu, spec, size, options.check_jobs(None))
    stage = set_stage(gpu, spec, rung, size, np.random.default_rng())
    read, close, telemetry = open_nvml(gpu.device.pci_bus_id)
    console.print(f"{rung.title} at N = {size} for {seconds:g} s; {telemetry}.", markup=False)
    begun = time.monotonic()

    def now() -> float:
        return time.monotonic() - begun

    try:
        limit = None if read is None else read().power_limit_w
        watch = Blind() if read is None else SamplingThread(read, now)
        with watch:
            repeats = run_rounds(stage.loads, stage.stopwatch, watch, now, seconds)
    finally:
        close()
    names = {OURS: f"rung {rung.title}", FFMA: "multiply-adds on registers"}
    if gpu.baseline is not None:
        names[CUBLAS] = gpu.baseline.name
    for repeat in repeats:
        check_rate(names[repeat.contender], repeat.tflops, spec.peak_fp32_tflops)
    notes = [*stage.notes, *throttle_notes(names, watch.samples)]
    if isinstance(watch, SamplingThread) and watch.failure is not None:
        notes.append(watch.failure)
    environment = Environment.capture(
        device=gpu.device,
        compiler=compiler_version(),
        gpu_details={"sms": spec.sms, "clock_mhz": spec.clock_mhz, "arch": spec.arch},
    )
    return PowerRun(
        device=spec.name,
        size=size,
        rung=rung.number,
        seconds=seconds,
        peak_tflops=spec.peak_fp32_tflops,
        power_limit_w=limit,
        names=names,
        telemetry=telemetry,
        environment=environment.to_json(),
        samples=tuple(watch.samples),
        repeats=tuple(repeats),
        notes=tuple(notes),
    )
