"""A rung's product on a GPU between guard zones: whatever touches memory outside its operands shows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewave.compiler import Program
from tilewave.device import DeviceSpec
from tilewave.lab.launches import launch_of
from tilewave.lab.measure import Candidate, prepare
from tilewave.lab.registry import Rung
from tilewave.runtime.driver import Device, DeviceArray, Stream

#: Elements before and after each matrix. A multiple of 64 keeps the matrices aligned to 256 bytes.
GUARD = 64 * 1024
#: NaN with a payload of ours: it shows in a result that took it in, and any write to it shows in the bits.
CANARY = 0x7FC0BEEF


class Guarded:
    """A matrix in device memory between two guard zones."""

    def __init__(self, device: Device, contents: NDArray[np.float32]) -> None:
        whole = np.full(contents.size + 2 * GUARD, CANARY, np.uint32).view(np.float32)
        whole[GUARD:-GUARD] = contents.ravel()
        self._whole = DeviceArray.from_numpy(device, whole)
        self.matrix = self._whole.view(GUARD, contents.shape)

    def guards_are_intact(self) -> bool:
        """Whether nothing was written around the matrix."""
        bits = self._whole.to_numpy().view(np.uint32)
        return bool((bits[:GUARD] == CANARY).all() and (bits[-GUARD:] == CANARY).all())


@dataclass(frozen=True)
class GuardedProduct:
    """A product, and in words what its kernel did beside writing it; elements never written are NaN."""

    c: NDArray[np.float32]
    damage: tuple[str, ...]


def guarded_product(
    device: Device,
    spec: DeviceSpec,
    stream: Stream,
    rung: Rung,
    program: Program,
    a: NDArray[np.float32],
    b: NDArray[np.float32],
) -> GuardedProduct:
    """a @ b by a rung on the GPU, launched twice: what a launch leaves behind must not harm the next one."""
    (m, k), n = a.shape, b.shape[1]
    kernel = program.kernels[launch_of(rung, m, n, k, spec).entry]
    unwritten = np.full((m, n), np.nan, np.float32)
    left, right, out = (Guarded(device, matrix) for matrix in (a, b, unwritten))
    launch = prepare(
        Candidate(rung, program, kernel, spec), device, stream, left.matrix, right.matrix, out.matrix
    )
    launch()
    first = out.matrix.to_numpy()
    out.matrix.poison()
    launch()
    c = out.matrix.to_numpy()
    damage = [
        f"wrote outside {name}"
        for name, guarded in (("A", left), ("B", right), ("C", out))
        if not guarded.guards_are_intact()
    ]
    for name, guarded, matrix in (("A", left, a), ("B", right, b)):
        if differing(guarded.matrix.to_numpy(), matrix).any():
            damage.append(f"wrote into {name}")
    if differing(first, c).any():
        damage.append("gave other bits when launched again")
    return GuardedProduct(c, tuple(damage))


def differing(x: NDArray[np.float32], y: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which elements of two arrays differ in their bits; a NaN equals every other NaN."""
    both_nan = np.isnan(x) & np.isnan(y)
    differs: NDArray[np.bool_] = (x.view(np.uint32) != y.view(np.uint32)) & ~both_nan
    return differs
