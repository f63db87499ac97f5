"""Probes under Nsight Compute: counters, L2 hit rate and stalls of each variant.

``python -m tilewave.lab.probe_profile PROBE:VARIANT:SIZE ...`` launches each variant once; `profile_launches`
runs that under ncu and pairs its launches with what was asked for.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewave.errors import ToolchainError, UsageError
from tilewave.lab import ncu
from tilewave.lab.probe_words import L2_HIT_RATE

COUNTERS = {
    "smsp__inst_executed.sum": "warp_instructions",
    "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum": "thread_fma",
    "smsp__inst_executed_op_shared_ld.sum": "shared_loads",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": "shared_load_passes",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": "shared_load_conflicts",
    "smsp__inst_executed_op_shared_st.sum": "shared_stores",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum": "shared_store_passes",
    "smsp__inst_executed_op_global_ld.sum": "global_loads",
    "smsp__inst_executed_op_ldgsts.sum": "copies",
}
"""The profiler's metrics and the emulator's counters that they stand beside."""

STALLS = (
    "long_scoreboard",
    "short_scoreboard",
    "mio_throttle",
    "lg_throttle",
    "barrier",
    "dispatch_stall",
    "math_pipe_throttle",
    "not_selected",
    "wait",
    "no_instruction",
    "selected",
)
"""Why a warp does not issue: long_scoreboard is global memory, short_scoreboard and mio_throttle shared."""

METRICS = (
    *COUNTERS,
    L2_HIT_RATE,
    "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    *(f"smsp__average_warps_issue_stalled_{stall}_per_issue_active.ratio" for stall in STALLS),
)
MINIMUM_S = 20.0
"""The profiler alone takes some seconds to start."""


@dataclass(frozen=True)
class Launch:
    """One launch of one variant of a probe."""

    probe: str
    variant: str
    size: int

    def __str__(self) -> str:
        return f"{self.probe}:{self.variant}:{self.size}"

    @classmethod
    def parse(cls, text: str) -> Launch:
        """The launch that ``str`` wrote."""
        probe, _, rest = text.partition(":")
        variant, _, size = rest.partition(":")
        if not (probe and variant and size.isdecimal()):
            raise UsageError(f"a launch is PROBE:VARIANT:SIZE, not {text!r}")
        return cls(probe, variant, int(size))


def profile_launches(launches: Sequence[Launch], limit_s: float | None) -> list[dict[str, float]]:
    """The metrics of each launch, by the emulator's names where there is one; raises ``ToolchainError``."""
    if limit_s is not None and limit_s < MINIMUM_S:
        raise ToolchainError(f"the profiler needs at least {MINIMUM_S:.0f} seconds of the budget")
    tool = ncu.find_ncu()
    command = [sys.executable, "-m", "tilewave.lab.probe_profile", *map(str, launches)]
    timeout = 600.0 if limit_s is None else limit_s
    try:
        known, _ = ncu.split_known(METRICS, ncu.available_metrics(tool))
        profiled, _ = ncu.profile(tool, command, known, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise ToolchainError(f"ncu did not finish in {timeout:.0f} seconds") from error
    ours = [kernel for kernel in profiled if "sgemm_" in kernel.kernel]
    if len(ours) != len(launches):
        raise ToolchainError(f"ncu saw {len(ours)} of {len(launches)} launches")
    return [{COUNTERS.get(name, name): value for name, value in kernel.metrics.items()} for kernel in ours]


def stall_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """The share of each reason in all of a launch's stalled warps (those issuing not counted)."""
    stalls = {}
    for stall in STALLS:
        value = metrics.get(f"smsp__average_warps_issue_stalled_{stall}_per_issue_active.ratio")
        if value is not None and stall != "selected":
            stalls[stall] = value
    total = sum(stalls.values())
    return {stall: value / total for stall, value in stalls.items()} if total else {}


def main(arguments: Sequence[str]) -> None:
    """Launch each variant named by the arguments once, in their order, on the first GPU."""
    import numpy as np

    from tilewave.compiler import choose_arch
    from tilewave.device import query_device
    from tilewave.lab.probe import compile_variant, get_probe, prepare_variant
    from tilewave.runtime.driver import Device, DeviceArray, Stream

    device, spec = Device(), query_device()
    stream, arch = Stream(device), choose_arch(spec.compute_capability).arch
    rng = np.random.default_rng()
    matrices: dict[int, tuple[DeviceArray, DeviceArray, DeviceArray]] = {}
    for launch in map(Launch.parse, arguments):
        size = launch.size
        if size not in matrices:
            a, b = (
                DeviceArray.from_numpy(device, rng.standard_normal((size, size), dtype=np.float32))
                for _ in range(2)
            )
            matrices[size] = a, b, DeviceArray.empty(device, (size, size))
        variant = get_probe(launch.probe).variant(launch.variant)
        program = compile_variant(variant, arch)
        prepare_variant(variant, program, spec, device, stream, *matrices[size])()
        stream.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
