"""Products on the GPU between guard zones that nobody may read into a result or write to."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from tilewave.compiler import Program, compile_source
from tilewave.device import query_device
from tilewave.lab import guarded
from tilewave.lab.registry import Rung
from tilewave.runtime.driver import Device, Stream


@functools.cache
def program_of(rung: Rung, arch: str) -> Program:
    return compile_source(rung.source(), rung.entries, arch)


def guarded_product(
    device: Device,
    stream: Stream,
    rung: Rung,
    arch: str,
    a: NDArray[np.float32],
    b: NDArray[np.float32],
) -> NDArray[np.float32]:
    """a @ b by a rung on the GPU; elements never written stay NaN. Fails if a guard zone was written."""
    spec = query_device(device.ordinal)
    done = guarded.guarded_product(device, spec, stream, rung, program_of(rung, arch), a, b)
    assert not done.damage, f"{rung.title} at {(*a.shape, b.shape[1])}: {', '.join(done.damage)}"
    return done.c
