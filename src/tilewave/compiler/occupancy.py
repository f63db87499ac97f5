"""How many blocks of a kernel an SM holds at once, and what limits them.

The arithmetic is that of NVIDIA's occupancy calculator (``cuda_occupancy.h``): registers go to warps in units
and live in the four sub-partitions; shared memory goes to blocks in units, with a reservation from compute
capability 8.0 on. The whole of the SM's shared memory is taken to be available: a launch can ask for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewave.compiler.resources import Resources
from tilewave.device.spec import DeviceSpec
from tilewave.errors import UsageError


@dataclass(frozen=True)
class Occupancy:
    """Resident blocks and warps of an SM.

    ``limits`` maps each resource (``registers``, ``shared memory``, ``warps``, ``blocks``, ``barriers`` where
    they count) to the blocks that it would allow alone; ``limiting`` names those that bind. ``fraction`` is
    resident warps over the SM's warps. Zero blocks: the kernel cannot be launched.
    """

    blocks_per_sm: int
    warps_per_sm: int
    fraction: float
    limits: Mapping[str, int]
    limiting: tuple[str, ...]

    def __str__(self) -> str:
        plural = "" if self.blocks_per_sm == 1 else "s"
        return (
            f"{self.blocks_per_sm} block{plural} per SM, {self.fraction:.0%} occupancy, "
            f"limited by {' and '.join(self.limiting)}"
        )


def occupancy(
    resources: Resources, threads: int, spec: DeviceSpec, dynamic_shared_bytes: int = 0
) -> Occupancy:
    """The occupancy of a kernel launched with ``threads`` threads a block on ``spec``.

    ``dynamic_shared_bytes`` is the launch's own shared memory, beside the kernel's static one.
    """
    if threads < 1:
        raise UsageError(f"a block needs at least one thread, not {threads}")
    if dynamic_shared_bytes < 0:
        raise UsageError(f"dynamic shared memory cannot be negative: {dynamic_shared_bytes} bytes")
    warps = -(-threads // spec.warp_size)
    limits = {
        "registers": _blocks_by_registers(resources.registers, warps, spec),
        "shared memory": _blocks_by_shared(resources.static_shared_bytes + dynamic_shared_bytes, spec),
        "warps": spec.warps_per_sm // warps if threads <= spec.threads_per_block else 0,
        "blocks": spec.blocks_per_sm,
    }
    if spec.barriers_per_sm is not None and resources.barriers > 0:
        limits["barriers"] = spec.barriers_per_sm // resources.barriers
    blocks = min(limits.values())
    return Occupancy(
        blocks_per_sm=blocks,
        warps_per_sm=blocks * warps,
        fraction=blocks * warps / spec.warps_per_sm,
        limits=limits,
        limiting=tuple(name for name, limit in limits.items() if limit == blocks),
    )


def _blocks_by_registers(registers: int, warps: int, spec: DeviceSpec) -> int:
    per_warp = _round_up(registers * spec.warp_size, spec.register_allocation_unit)
    # The launch check counts a block's warps as if spread evenly over the sub-partitions.
    checked = per_warp * _round_up(warps, spec.sub_partitions)
    if registers > spec.registers_per_thread or checked > spec.registers_per_block:
        return 0
    warps_per_partition = (
        spec.registers_per_sm // spec.sub_partitions // max(per_warp, spec.register_allocation_unit)
    )
    return warps_per_partition * spec.sub_partitions // warps


def _blocks_by_shared(shared_bytes: int, spec: DeviceSpec) -> int:
    if shared_bytes > spec.shared_per_block:
        return 0
    allocated = _round_up(shared_bytes + spec.shared_reserved_per_block, spec.shared_allocation_unit)
    return spec.shared_per_sm // max(allocated, spec.shared_allocation_unit)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
