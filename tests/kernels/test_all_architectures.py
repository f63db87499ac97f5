"""Every instance compiles for every architecture that ships, and the planner's table says what came out."""

from __future__ import annotations

import json
from importlib import resources as package_files

import pytest

from tilewave.compiler import compiler_version
from tilewave.kernels.build import compile_instance
from tilewave.kernels.ship import SHIPPED_ARCHITECTURES, every_kernel

UNTUNED = ("sm_120", "sm_121")
MOST_SPILLED = 128
"""Bytes, on those: three instances spill a little around the loop over K, never in it."""

RECORD = json.loads(package_files.files("tilewave.kernels").joinpath("resources.json").read_text())
by_architecture = pytest.mark.parametrize(
    "arch",
    [
        arch if arch == "sm_90" else pytest.param(arch, marks=pytest.mark.long)
        for arch in SHIPPED_ARCHITECTURES
    ],
)


def test_the_table_has_every_instance_on_every_architecture() -> None:
    names = [instance.name for instance in every_kernel()]
    assert {arch: list(rows) for arch, rows in RECORD["architectures"].items()} == dict.fromkeys(
        SHIPPED_ARCHITECTURES, names
    ), f"make it anew: {RECORD['command']}"


@by_architecture
@pytest.mark.timeout(900)  # a cold cache compiles for minutes
def test_every_instance_compiles_as_the_table_says(arch: str) -> None:
    found = {}
    for instance in every_kernel():
        resources = compile_instance(instance, arch)[1].resources
        spilled = resources.spill_store_bytes + resources.spill_load_bytes
        found[instance.name] = [resources.registers, spilled, resources.static_shared_bytes]
        most = MOST_SPILLED if arch in UNTUNED else 0
        assert spilled <= most, f"{instance} spills {spilled} bytes on {arch}"
    if RECORD["compiler"] == compiler_version():
        recorded = RECORD["architectures"][arch]
        changed = {name: row for name, row in found.items() if recorded.get(name) != row}
        assert not changed, f"make the table anew: {RECORD['command']}"
