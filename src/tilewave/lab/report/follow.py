"""Runs a rung on one small product in the emulator and follows a warp: the source of several pictures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from tilewave.compiler import compile_source
from tilewave.device import DeviceSpec
from tilewave.emulator import Buffer, Memory, launch
from tilewave.emulator.trace import Trace, Traced
from tilewave.lab.emulate import workspace_arguments
from tilewave.lab.launches import launch_of
from tilewave.lab.registry import Rung


@dataclass(frozen=True)
class Followed:
    """One warp of the only block of a bm x bn x (slices * bk) product, with the three matrices' places."""

    rung: Rung
    slices: int
    steps: tuple[Traced, ...]
    a: Buffer
    b: Buffer
    c: Buffer

    @property
    def k(self) -> int:
        """The product's depth."""
        return self.slices * self.rung.tile.bk


@cache
def follow(rung: Rung, spec: DeviceSpec, slices: int, warp: int = 0) -> Followed:
    """Compile ``rung`` for ``spec`` and follow a warp of a product of exactly one tile."""
    m, n, k = rung.tile.bm, rung.tile.bn, slices * rung.tile.bk
    planned = launch_of(rung, m, n, k, spec)
    program = compile_source(rung.source(), rung.entries, spec.arch)
    memory = Memory()
    a = memory.put(np.zeros((m, k), np.float32), name="A")
    b = memory.put(np.zeros((k, n), np.float32), name="B")
    c = memory.empty((m, n), np.float32, name="C")
    trace = Trace(0, warp)
    launch(
        program.ptx,
        program.kernels[planned.entry].symbol,
        planned.grid,
        planned.block,
        [a, b, c, m, n, k, *workspace_arguments(planned, memory)],
        memory,
        values=False,
        trace=trace,
    )
    return Followed(rung, slices, tuple(trace.instructions()), a, b, c)
