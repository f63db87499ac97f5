"""What the planner, the occupancy calculation and the emulator need to know of a GPU, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DeviceSpec:
    """One GPU model, or one real GPU as its driver describes it.

    Sizes are in bytes, clocks in MHz, bandwidth in GB/s (10^9 bytes), power in W. Registers have 32 bits and
    are given to warps in units of ``register_allocation_unit``; ``shared_reserved_per_block`` is what the
    driver keeps of an SM's shared memory for each block. ``barriers_per_sm`` is None where barriers limit
    nothing. ``sources`` says for each field where its figure comes from.
    """

    name: str
    arch: str
    compute_capability: tuple[int, int]
    sms: int
    clock_mhz: float
    fp32_lanes_per_sm: int
    registers_per_sm: int
    registers_per_block: int
    registers_per_thread: int
    register_allocation_unit: int
    shared_per_sm: int
    shared_per_block: int
    shared_reserved_per_block: int
    shared_allocation_unit: int
    threads_per_sm: int
    threads_per_block: int
    blocks_per_sm: int
    l2_bytes: int
    bandwidth_gb_s: float
    power_w: float | None
    warp_size: int = 32
    sub_partitions: int = 4
    barriers_per_sm: int | None = None
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def warps_per_sm(self) -> int:
        """Resident warps that an SM can hold."""
        return self.threads_per_sm // self.warp_size

    @property
    def peak_fp32_tflops(self) -> float:
        """Theoretical FP32 peak, in TFLOP/s: two operations a lane and clock."""
        return 2e-6 * self.sms * self.fp32_lanes_per_sm * self.clock_mhz
