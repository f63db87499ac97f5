"""Products on the GPU between guard zones that nobody may read into a result or write to."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from tilewave.compiler import Program, compile_source
from tilewave.device import query_device
from tilewave.lab.launches import launch_of
from tilewave.lab.measure import workspace_arguments
from tilewave.lab.registry import Rung
from tilewave.runtime.driver import Device, DeviceArray, Module, Stream

#: Elements before and after each matrix. A multiple of 64 keeps the matrices aligned to 256 bytes.
GUARD = 64 * 1024
#: NaN with a payload of ours: it shows in a result that took it in, and any write to it shows in the bits.
CANARY = 0x7FC0BEEF


@functools.cache
def program_of(rung: Rung, arch: str) -> Program:
    return compile_source(rung.source(), rung.entries, arch)


class Guarded:
    """A matrix in device memory between two guard zones."""

    def __init__(self, device: Device, contents: NDArray[np.float32]) -> None:
        whole = np.full(contents.size + 2 * GUARD, CANARY, np.uint32).view(np.float32)
        whole[GUARD:-GUARD] = contents.ravel()
        self._whole = DeviceArray.from_numpy(device, whole)
        self.matrix = self._whole.view(GUARD, contents.shape)

    def guards_are_intact(self) -> bool:
        bits = self._whole.to_numpy().view(np.uint32)
        return bool((bits[:GUARD] == CANARY).all() and (bits[-GUARD:] == CANARY).all())


def guarded_product(
    device: Device,
    stream: Stream,
    rung: Rung,
    arch: str,
    a: NDArray[np.float32],
    b: NDArray[np.float32],
) -> NDArray[np.float32]:
    """a @ b by a rung on the GPU; elements never written stay NaN. Fails if a guard zone was written."""
    (m, k), n = a.shape, b.shape[1]
    program = program_of(rung, arch)
    planned = launch_of(rung, m, n, k, query_device(device.ordinal))
    function = Module(device, program.cubin).function(program.kernels[planned.entry].symbol)
    poison = np.full((m, n), np.nan, np.float32)
    left, right, out = (Guarded(device, matrix) for matrix in (a, b, poison))
    arguments = [left.matrix, right.matrix, out.matrix, m, n, k, *workspace_arguments(planned, device)]
    launch = function.prepare(planned.grid, planned.block, arguments, stream)
    launch()
    c = out.matrix.to_numpy()
    for name, guarded in (("A", left), ("B", right), ("C", out)):
        assert guarded.guards_are_intact(), f"{rung.title} wrote outside {name} at {(m, n, k)}"
    np.testing.assert_array_equal(left.matrix.to_numpy(), a)
    np.testing.assert_array_equal(right.matrix.to_numpy(), b)
    return c
