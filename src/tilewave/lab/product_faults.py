"""Faults planted in the library's kernels: emulator and compute-sanitizer must find each of them.

None is for synccheck, which compute-sanitizer 2025.3.1.0 on an H200 was blind to wherever a rung had one
(`lab/faults.py`); the emulator finds those.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewave.compiler import Source
from tilewave.kernels.build import source_of
from tilewave.kernels.families import FAMILIES
from tilewave.kernels.instances import Instance
from tilewave.lab.faults import Edit
from tilewave.lab.product_samples import Dealing


@dataclass(frozen=True)
class ProductFault:
    """An edit of a file of kernels, an instance (the first of its family with ``part`` in its name) and what
    finds it, as in `tilewave.lab.faults.Fault`."""

    name: str
    header: str
    edit: Edit
    family: str
    part: str
    dealing: Dealing
    tool: str
    says: str
    emulator: str

    @property
    def instance(self) -> Instance:
        """The instance that is launched."""
        family = next(family for family in FAMILIES if family.name == self.family)
        return next(instance for instance in family.instances() if self.part in instance.name)

    def source(self) -> Source:
        """The instance's source with the fault."""
        source = source_of(self.instance.header)
        headers = dict(source.headers)
        headers[self.header] = self.edit.apply(headers[self.header], self.header)
        return Source.from_text(source.name, source.text, headers)


_RACE = r"Race reported between (Write|Read) access"

FAULTS = (
    ProductFault(
        "small_tile: no barrier before a slice is read",
        "kernels/small_tile.cuh",
        Edit("__syncthreads();  // the slice is here for all threads", "//"),
        "small_tile",
        "_nn_4",
        Dealing.SPLIT_K,
        "racecheck",
        _RACE,
        "RaceError",
    ),
    ProductFault(
        "large_tile: no barrier before a slice is read",
        "kernels/large_tile.cuh",
        Edit("wait_for_copies<0>();\n            __syncthreads();", "wait_for_copies<0>();"),
        "large_tile",
        "_nn_16",
        Dealing.DATA_PARALLEL,
        "racecheck",
        _RACE,
        "RaceError",
    ),
    ProductFault(
        "small_tile: one row too many is stored",
        "kernels/small_tile.cuh",
        Edit("window = {row0, args.m,", "window = {row0, args.m + 1,"),
        "small_tile",
        "_nt_4",
        Dealing.STREAM_K,
        "memcheck",
        r"Invalid __global__ (read|write) of size \d+",  # the epilogue reads c there before it writes
        "MemoryFault",
    ),
    ProductFault(
        "column_stream: one k too many is copied",
        "kernels/column_stream.cuh",
        Edit("- group + GROUPS - 1) / GROUPS", "- group + 2 * GROUPS - 1) / GROUPS"),
        "column_stream",
        "_4b",
        Dealing.DATA_PARALLEL,
        "memcheck",
        r"Invalid __global__ read of size \d+",
        "MemoryFault",
    ),
    ProductFault(
        "column_stream: a partial sum is not stored",
        "streams.cuh",
        Edit(
            "for (int i = 4 * threadIdx.x; i < OUTPUTS; i += 4 * THREADS)",
            "for (int i = 4 * threadIdx.x + 4; i < OUTPUTS; i += 4 * THREADS)",
        ),
        "column_stream",
        "_4b",
        Dealing.STREAM_K_WALK,
        "initcheck",
        r"Uninitialized __global__ memory read of size \d+",
        "NaN",
    ),
)
