"""Registers and shared memory of instances, and how many blocks an SM holds at once.

Figures come from `kernels/resources.json` (``python -m tilewave.kernels.ship --resources``), which holds what
ptxas said of every instance on every architecture. An instance that is not in it gets an estimate.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources as package_files

from tilewave.compiler.occupancy import occupancy
from tilewave.compiler.resources import Resources
from tilewave.device.spec import DeviceSpec
from tilewave.kernels.instances import Instance

_BESIDE_THE_TILE = 40
"""Assumed: registers of addresses, counters and the epilogue, beside sums and fragments."""

_STATIC_SHARED_BYTES = 1024
"""Assumed: static shared memory of an instance that is not in the table."""


@cache
def resource_table(arch: str) -> dict[str, Resources]:
    """What ptxas said of the instances on ``arch``, by name; empty where there is no table."""
    file = package_files.files("tilewave.kernels").joinpath("resources.json")
    if not file.is_file():
        return {}
    rows: dict[str, list[int]] = json.loads(file.read_text(encoding="utf-8"))["architectures"].get(arch, {})
    return {
        name: Resources(registers, 0, spilled, 0, static)
        for name, (registers, spilled, static) in rows.items()
    }


def estimated_resources(instance: Instance, spec: DeviceSpec) -> Resources:
    """The most that the instance is taken to need: sums, two fragments of each operand, and the rest, within
    what its threads allow."""
    wanted = instance.tm * instance.tn + 2 * (instance.tm + instance.tn) + _BESIDE_THE_TILE
    allowed = spec.registers_per_block // instance.threads // 8 * 8
    return Resources(min(wanted, allowed, spec.registers_per_thread), 0, 0, 0, _STATIC_SHARED_BYTES)


def resources_of(instance: Instance, spec: DeviceSpec) -> Resources:
    """An instance's resources on a GPU: the table's, or an estimate."""
    found = resource_table(spec.arch).get(instance.name)
    return found if found is not None else estimated_resources(instance, spec)


def blocks_per_sm(instance: Instance, spec: DeviceSpec) -> int:
    """Blocks of the instance that an SM holds at once; 0 when it cannot hold one."""
    return residency(instance, spec)[0]


def residency(instance: Instance, spec: DeviceSpec) -> tuple[int, str | None]:
    """Blocks of the instance that an SM holds at once, and, where that is none, why."""
    needs = resources_of(instance, spec)
    if instance.threads > spec.threads_per_block:
        return 0, f"{instance.threads} threads a block, {spec.name} allows {spec.threads_per_block}"
    shared = instance.shared_bytes + needs.static_shared_bytes
    if shared > spec.shared_per_block:
        return 0, f"{shared:,} bytes of shared memory a block, {spec.name} allows {spec.shared_per_block:,}"
    blocks = occupancy(needs, instance.threads, spec, instance.shared_bytes).blocks_per_sm
    if blocks == 0:
        return 0, f"{instance.threads} threads of {needs.registers} registers do not fit an SM of {spec.name}"
    return blocks, None
