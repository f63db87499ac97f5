"""What the command `tilewave bench` does."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from tilewave.bench.products.records import COLD, WARM, BenchRun, load_run
from tilewave.bench.products.shapes import products_of
from tilewave.errors import DeviceError, UsageError

ROUNDS = 5
COMPARE = "compare"


def bench_command(
    words: Sequence[str],
    *,
    contenders: str | None,
    mode: str,
    rounds: int,
    budget: float | None,
    path: Path | None,
    picture: Path | None,
    saved: Path | None,
) -> None:
    """Measure the products that were named, or show a file, or compare two."""
    console = Console(highlight=False)
    if words and words[0] == COMPARE:
        if len(words) != 3:
            raise UsageError(f"compare takes two files of `tilewave bench --json`, not {len(words) - 1}")
        from tilewave.bench.products.compare import compare_runs, print_comparison

        one, other = (load_run(Path(word)) for word in words[1:])
        print_comparison(compare_runs(one, other), console)
        return
    if saved is not None:
        if words:
            raise UsageError("--from shows a file: shapes go without it")
        run = load_run(saved)
    else:
        run = _measured(words, contenders, mode, rounds, budget, path, console)
    from tilewave.bench.products.table import print_run

    print_run(run, console)
    if picture is not None:
        from tilewave.bench.products.picture import draw

        draw(run, picture)
        console.print(f"The picture is in {picture}.", markup=False)
    if path is not None and saved is None:
        console.print(f"The results are in {path}.", markup=False)


def _measured(
    words: Sequence[str],
    contenders: str | None,
    mode: str,
    rounds: int,
    budget: float | None,
    path: Path | None,
    console: Console,
) -> BenchRun:
    begun = time.monotonic()
    products = products_of(words or ("workloads", "squares"))
    if mode not in (COLD, WARM):
        raise UsageError(f"mode {mode!r}: accepted are {COLD} and {WARM}")
    if rounds < 1:
        raise UsageError(f"rounds {rounds}: 1 or more is accepted")
    if budget is not None and not budget > 0:
        raise UsageError(f"budget {budget:g}: a positive number of seconds is accepted")
    before = load_run(path) if path is not None and path.exists() else None
    if path is not None:
        _check_writable(path)

    from tilewave.bench.environment import Environment, GpuState, NvmlReader
    from tilewave.bench.products.contenders import contestants, default_contestants
    from tilewave.bench.products.gpu import Workbench
    from tilewave.bench.products.measure import Setting
    from tilewave.bench.products.run import check_same, compile_ahead, measure_with, run_products
    from tilewave.compiler import compiler_version
    from tilewave.device import query_device
    from tilewave.errors import ToolchainError
    from tilewave.runtime.driver import Device, probe

    found = probe()
    if found.reason is not None:
        raise DeviceError(f"a benchmark needs a GPU: {found.reason}; --from FILE shows one that was made")
    device, spec = Device(), query_device()
    notes: list[str] = []
    if contenders is None:
        chosen, notes = default_contestants()
    else:
        chosen = contestants([word.strip() for word in contenders.split(",")])
    bench = Workbench(device, spec)
    reader: NvmlReader | None = None
    try:
        reader = NvmlReader(device.pci_bus_id)
    except ToolchainError as error:
        notes.append(f"{error}; no clocks, no power")
    try:
        setting = Setting(
            bench,
            chosen,
            mode,
            rounds,
            bench.launch_floor_us(),
            None if reader is None else reader.read,
        )
        environment = Environment.capture(
            device=device,
            compiler=compiler_version(),
            gpu_details={
                "sms": spec.sms,
                "clock_mhz": spec.clock_mhz,
                "arch": spec.arch,
                "state": str(GpuState.read(device)),
            },
        )
        run = BenchRun(
            device=spec.name,
            mode=mode,
            contenders=tuple(chosen),
            names={word: one.name for word, one in chosen.items()},
            peak_tflops=spec.peak_fp32_tflops,
            bandwidth_gb_s=spec.bandwidth_gb_s,
            l2_bytes=spec.l2_bytes,
            launch_floor_us=round(setting.launch_floor_us, 3),
            environment=environment.to_json(),
            notes=tuple(notes),
        )
        if before is not None:
            check_same(before, run)
            run = replace(run, results=before.results)
        missing = [product for product in products if run.find(product) is None]
        compiled = compile_ahead(missing, spec, min(16, os.cpu_count() or 1))
        console.print(
            f"{len(missing)} products to measure; {compiled} kernels ready after "
            f"{time.monotonic() - begun:.0f} s."
        )
        run, left = run_products(
            products,
            run,
            measure_with(setting, np.random.default_rng()),
            budget_s=None if budget is None else budget - (time.monotonic() - begun),
            keep=lambda now: None if path is None else save_run(now, path),
            show=lambda result: console.print(_line(result), markup=False, soft_wrap=True),
        )
    finally:
        if reader is not None:
            reader.close()
    if left:
        again = " (the same command goes on from its --json)" if path is not None else ""
        console.print(f"The budget ended before {left} of the products{again}.")
    return run


def _line(result: object) -> str:
    from tilewave.bench.products.records import Result

    assert isinstance(result, Result)
    shown = [
        f"{one.contender} {one.microseconds:.1f} us" if one.counts else f"{one.contender} rejected"
        for one in result.readings
    ]
    return f"{result.product.name:8} {result.product!s:38} {', '.join(shown)}"


def save_run(run: BenchRun, path: Path) -> None:
    """Write a run whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(run.to_json(), indent=1) + "\n", encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def _check_writable(path: Path) -> None:
    """Make sure, before long work, that a file can be written there."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"cannot write {path}: it is a directory, or may not be written")
