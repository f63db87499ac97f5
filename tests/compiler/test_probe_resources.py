"""Probes whose kernels must not differ in what the compiler makes of them; runs with both compilers."""

from __future__ import annotations

import pytest

from tilewave.compiler import compile_source
from tilewave.lab.probe_catalog import PROBES

every_arch = pytest.mark.parametrize(
    "arch", ["sm_90", *(pytest.param(arch, marks=pytest.mark.long) for arch in ("sm_75", "sm_121"))]
)


@every_arch
def test_the_same_slice_takes_the_registers_and_spills_of_every_slice(arch: str) -> None:
    """What the probe shows is then memory's doing alone, not the compiler's."""
    probe = PROBES["same-slice"]
    programs = {
        variant.key: compile_source(variant.rung.source(), variant.rung.entries, arch)
        for variant in probe.variants
    }
    masked, same = programs["masked"], programs["same-slice"]
    assert masked.kernels.keys() == same.kernels.keys()
    for name, kernel in masked.kernels.items():
        assert kernel.resources == same.kernels[name].resources
    assert masked.cubin != same.cubin
    # And the rung itself is as good as either.
    own = programs["rung-12"].kernels[probe.variants[0].rung.entry].resources
    masked_own = masked.kernels[probe.variants[0].rung.entry].resources
    assert abs(own.registers - masked_own.registers) <= 1
    assert own.spill_store_bytes == masked_own.spill_store_bytes


@every_arch
@pytest.mark.parametrize(("name", "groups"), [("half-warps", [3]), ("lane-maps", [2, 2])])
def test_lane_maps_are_data_that_the_compiler_does_not_see(name: str, groups: list[int], arch: str) -> None:
    """Kernels that differ in their lane map alone take the same registers, and spill the same."""
    mapped = [variant for variant in PROBES[name].variants if variant.rung.edits]
    assert len(mapped) == sum(groups)
    for number in {variant.rung.number for variant in mapped}:
        found = [
            compile_source(variant.rung.source(), variant.rung.entries, arch)
            for variant in mapped
            if variant.rung.number == number
        ]
        assert len(found) in groups
        for other in found[1:]:
            assert other.cubin != found[0].cubin
            assert len(other.cubin) == len(found[0].cubin)
            for entry, kernel in found[0].kernels.items():
                assert other.kernels[entry].resources == kernel.resources
