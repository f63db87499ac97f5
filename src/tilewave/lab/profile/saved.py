"""Reports that Nsight Compute saved: read them, and find out whether they fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tilewave.device import DeviceSpec, get_spec, spec_names
from tilewave.errors import UsageError
from tilewave.lab import ncu
from tilewave.lab.launches import launch_of
from tilewave.lab.profile.metrics import BLOCKS, rung_of, wanted_metrics
from tilewave.lab.profile.records import SAVED
from tilewave.lab.profile.run import Hardware, split_launches
from tilewave.lab.registry import get_rung, load_rungs

_ATTRIBUTE = "device__attribute_"
_AS_CSV = "ncu --import FILE.ncu-rep --csv --page raw > FILE.csv"


def read_report(file: Path) -> list[ncu.KernelCounters]:
    """The launches of a saved report, .ncu-rep (which takes ncu to read) or CSV of its raw page."""
    if not file.is_file():
        raise UsageError(f"cannot read {file}: there is no such file")
    if file.suffix == ".ncu-rep":
        launches = ncu.import_report(ncu.find_ncu(), file)
    else:
        try:
            launches = ncu.parse_csv(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise UsageError(
                f"{file} is no CSV of Nsight Compute ({error}): make it with {_AS_CSV}"
            ) from error
    if not launches:
        raise UsageError(f"{file} holds no launch: make it with {_AS_CSV}")
    wanted = {*wanted_metrics()}
    if not any(wanted & set(launch.metrics) for launch in launches):
        raise UsageError(f"{file} holds none of the metrics that are shown: make it with {_AS_CSV}")
    return launches


def spec_of_report(launches: Sequence[ncu.KernelCounters]) -> DeviceSpec | None:
    """The known GPU model whose attributes the report holds; None if it holds none or none fits.

    Models of one chip are told apart by their memory bandwidth.
    """
    metrics = launches[0].metrics
    names = ("compute_capability_major", "compute_capability_minor", "multiprocessor_count")
    if not all(_ATTRIBUTE + name in metrics for name in names):
        return None
    major, minor, sms = (int(metrics[_ATTRIBUTE + name]) for name in names)
    fitting = [
        spec
        for spec in map(get_spec, spec_names())
        if (spec.compute_capability, spec.sms) == ((major, minor), sms)
    ]
    kilohertz = metrics.get(f"{_ATTRIBUTE}memory_clock_rate", 0.0)
    bits = metrics.get(f"{_ATTRIBUTE}global_memory_bus_width", 0.0)
    bandwidth = 2 * kilohertz * bits / 8 * 1e-6
    return min(fitting, key=lambda spec: abs(spec.bandwidth_gb_s - bandwidth), default=None)


def check_fits(file: Path, launches: Sequence[ncu.KernelCounters], size: int, spec: DeviceSpec) -> Hardware:
    """The report's figures, if its rungs are known and were launched for this size; else ``UsageError``."""
    known = {rung.number for rung in load_rungs()}
    for launch in launches:
        number = rung_of(launch.kernel)
        if number is None:
            continue
        if number not in known:
            raise UsageError(f"{file} holds {launch.kernel}, which is no rung of this version")
        planned = launch_of(get_rung(number), size, size, size, spec)
        blocks = launch.metrics.get(BLOCKS)
        if blocks is not None and blocks != planned.blocks:
            raise UsageError(
                f"{file} holds {launch.kernel} with {blocks:,.0f} blocks; at N = {size} on {spec.name} it "
                f"has {planned.blocks:,}: name the size and the GPU of the report with --size and --device"
            )
    found = split_launches(launches, size, SAVED)
    if not found.rungs:
        raise UsageError(f"{file} holds no launch of a rung (kernels named sgemm_NN_...)")
    return replace(found, profiler=f"report {file.name}")
