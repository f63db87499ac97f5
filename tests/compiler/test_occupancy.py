"""Occupancy against NVIDIA's own calculator, against its definition, and on figures that are known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewave.compiler import Resources, occupancy
from tilewave.device import DeviceSpec, get_spec, spec_names
from tilewave.errors import UsageError

CASES = json.loads(Path(__file__).with_name("data").joinpath("occupancy_cases.json").read_text())
BY_CAPABILITY = {"{}.{}".format(*get_spec(name).compute_capability): get_spec(name) for name in spec_names()}


def kernel(registers: int, shared: int = 0, barriers: int = 0) -> Resources:
    return Resources(registers, 0, 0, 0, shared, barriers)


def test_agrees_with_nvidias_calculator() -> None:
    """The table was printed by cuda_occupancy.h of CUDA 13.0 (data/occupancy_oracle.cpp)."""
    assert {case[0] for case in CASES} == set(BY_CAPABILITY)
    assert len({case[-1] for case in CASES}) > 10
    for capability, registers, threads, static, dynamic, barriers, blocks in CASES:
        ours = occupancy(kernel(registers, static, barriers), threads, BY_CAPABILITY[capability], dynamic)
        assert ours.blocks_per_sm == blocks, (capability, registers, threads, static, dynamic, barriers)


@pytest.mark.parametrize("name", spec_names())
@pytest.mark.parametrize(
    ("registers", "blocks"), [(168, 1), (128, 2), (129, 1), (80, 3), (255, 1), (64, 4), (85, 2)]
)
def test_256_threads_by_registers(name: str, registers: int, blocks: int) -> None:
    """The register file decides: 65,536 registers on every architecture."""
    result = occupancy(kernel(registers), 256, get_spec(name))
    assert result.blocks_per_sm == blocks
    assert "registers" in result.limiting
    assert result.warps_per_sm == 8 * blocks


def test_the_articles_course_kernel_on_the_gb10() -> None:
    gb10 = get_spec("GB10")
    one = occupancy(kernel(168, 33280), 256, gb10)
    assert (one.blocks_per_sm, one.limiting) == (1, ("registers",))
    assert one.limits["shared memory"] == 2
    two = occupancy(kernel(128, 33280), 256, gb10)
    assert two.blocks_per_sm == 2
    assert set(two.limiting) == {"registers", "shared memory"}


def test_the_articles_t4_kernel_fills_a_quarter() -> None:
    """One block of 256 threads: 25 % of the T4's 32 warps."""
    assert occupancy(kernel(168, 33280), 256, get_spec("T4")).fraction == 0.25


def test_the_reservation_costs_a_block() -> None:
    """Two blocks of 50 KiB fill the GB10's 100 KiB but for the 1 KiB that each block reserves."""
    gb10 = get_spec("GB10")
    assert occupancy(kernel(32), 128, gb10, 50 * 1024).blocks_per_sm == 1
    assert occupancy(kernel(32), 128, gb10, 49 * 1024).blocks_per_sm == 2
    free = dataclasses.replace(gb10, shared_reserved_per_block=0)
    assert occupancy(kernel(32), 128, free, 50 * 1024).blocks_per_sm == 2


def test_limits_name_what_binds() -> None:
    h200 = get_spec("H200")
    assert occupancy(kernel(16), 32, h200).limiting == ("blocks",)
    assert occupancy(kernel(16), 1024, h200).limiting == ("warps",)
    assert occupancy(kernel(16, 40000), 32, h200).limiting == ("shared memory",)
    assert occupancy(kernel(16, 0, 16), 128, h200).limiting == ("barriers",)
    assert "barriers" not in occupancy(kernel(16, 0, 16), 128, get_spec("A100")).limits


@pytest.mark.parametrize(
    ("registers", "threads", "dynamic", "binding"),
    [(16, 1025, 0, "warps"), (16, 32, 300000, "shared memory"), (128, 1024, 0, "registers")],
)
def test_a_kernel_that_cannot_be_launched(registers: int, threads: int, dynamic: int, binding: str) -> None:
    result = occupancy(kernel(registers), threads, get_spec("H200"), dynamic)
    assert (result.blocks_per_sm, result.fraction, result.limiting) == (0, 0.0, (binding,))


def test_a_blocks_own_register_limit_counts_whole_rows_of_sub_partitions() -> None:
    """Seven warps of 4,352 registers are counted as eight, two in each sub-partition."""
    halved = dataclasses.replace(get_spec("A100"), registers_per_block=32768)
    assert occupancy(kernel(136), 7 * 32, halved).blocks_per_sm == 0
    assert occupancy(kernel(128), 7 * 32, halved).blocks_per_sm == 2


def test_prints_for_a_person() -> None:
    text = str(occupancy(kernel(168, 33280), 256, get_spec("GB10")))
    assert text == "1 block per SM, 17% occupancy, limited by registers"


@pytest.mark.parametrize(("threads", "dynamic"), [(0, 0), (-5, 0), (32, -1)])
def test_refuses_nonsense(threads: int, dynamic: int) -> None:
    with pytest.raises(UsageError, match=str(threads if threads < 1 else dynamic)):
        occupancy(kernel(32), threads, get_spec("T4"), dynamic)


def blocks_by_filling_an_sm(resources: Resources, threads: int, spec: DeviceSpec, dynamic: int) -> int:
    """The definition: put one block after the other on an empty SM until something is missing.

    Each warp takes its registers from the fullest sub-partition that still has room.
    """
    warps = -(-threads // spec.warp_size)
    unit = spec.register_allocation_unit
    per_warp = -(-resources.registers * spec.warp_size // unit) * unit
    shared = resources.static_shared_bytes + dynamic
    if threads > spec.threads_per_block or shared > spec.shared_per_block:
        return 0
    if per_warp * -(-warps // spec.sub_partitions) * spec.sub_partitions > spec.registers_per_block:
        return 0
    shared += spec.shared_reserved_per_block
    shared = -(-shared // spec.shared_allocation_unit) * spec.shared_allocation_unit
    files = [spec.registers_per_sm // spec.sub_partitions] * spec.sub_partitions
    shared_left, warps_left, barriers_left = spec.shared_per_sm, spec.warps_per_sm, spec.barriers_per_sm
    blocks = 0
    while blocks < spec.blocks_per_sm:
        shared_left -= shared
        warps_left -= warps
        if barriers_left is not None:
            barriers_left -= resources.barriers
        if shared_left < 0 or warps_left < 0 or (barriers_left is not None and barriers_left < 0):
            break
        for _ in range(warps):
            roomiest = int(np.argmax(files))
            files[roomiest] -= per_warp
        if min(files) < 0:
            break
        blocks += 1
    return blocks


@given(
    name=st.sampled_from(spec_names()),
    registers=st.integers(1, 255),
    threads=st.integers(1, 1100),
    static=st.integers(0, 49152),
    dynamic=st.integers(0, 240000),
    barriers=st.integers(0, 16),
)
def test_equals_filling_an_sm(
    name: str, registers: int, threads: int, static: int, dynamic: int, barriers: int
) -> None:
    spec = get_spec(name)
    resources = kernel(registers, static, barriers)
    result = occupancy(resources, threads, spec, dynamic)
    assert result.blocks_per_sm == blocks_by_filling_an_sm(resources, threads, spec, dynamic)
    assert result.blocks_per_sm == min(result.limits.values())
    assert set(result.limiting) == {n for n, b in result.limits.items() if b == result.blocks_per_sm}
    assert 0 <= result.fraction <= 1
