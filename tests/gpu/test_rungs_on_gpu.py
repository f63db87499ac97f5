"""Every rung on a real GPU: right at ragged sizes, inside its operands, and with the emulator's bits."""

from __future__ import annotations

import numpy as np
import pytest
from guarded import guarded_product, program_of

from tilewave.device import DeviceSpec
from tilewave.lab.emulate import product, ragged_shapes
from tilewave.lab.registry import Rung, load_rungs
from tilewave.precision import error_in_bounds
from tilewave.runtime.driver import Device, Module, Stream

pytestmark = pytest.mark.gpu

RUNGS = pytest.mark.parametrize("rung", load_rungs(), ids=lambda rung: rung.title.replace(" ", "_"))


def edge_shapes(rung: Rung) -> list[tuple[int, int, int]]:
    """Each of M, N, K in turn at 1, around its tile and at a prime, the others at a size of their own."""
    tile = rung.tile
    around = {
        0: (1, tile.bm - 1, tile.bm, tile.bm + 1, 2 * tile.bm + 37),
        1: (1, tile.bn - 1, tile.bn, tile.bn + 1, 2 * tile.bn + 37),
        2: (1, max(1, tile.bk - 1), tile.bk, tile.bk + 1, 3 * tile.bk + 4, 257),
    }
    shapes = []
    for axis, extents in around.items():
        for extent in extents:
            shape = [tile.bm + 11, tile.bn + 13, 2 * tile.bk + 5]
            shape[axis] = extent
            shapes.append(tuple(shape))
            aligned = [tile.bm + 11, tile.bn + 12, 2 * tile.bk + 4]  # where wide loads are taken
            aligned[axis] = extent
            shapes.append(tuple(aligned))
    return list(dict.fromkeys([(1, 1, 1), *shapes]))


@RUNGS
def test_right_at_every_edge_and_inside_the_operands(
    rung: Rung, device: Device, stream: Stream, arch: str, rng: np.random.Generator
) -> None:
    for m, n, k in edge_shapes(rung):
        for draw in (rng.standard_normal, rng.random):  # all-positive data shows errors that signs hide
            a, b = draw((m, k)).astype(np.float32), draw((k, n)).astype(np.float32)
            c = guarded_product(device, stream, rung, arch, a, b)
            error = error_in_bounds(c, a, b)
            assert error <= rung.tolerance, f"{rung.title} at {(m, n, k)}: {error:.3g} bounds"


@RUNGS
@pytest.mark.parametrize("scale", [0, -70], ids=["normal", "subnormal"])
def test_bits_equal_the_emulators(
    rung: Rung,
    device: Device,
    stream: Stream,
    arch: str,
    spec: DeviceSpec,
    rng: np.random.Generator,
    scale: int,
) -> None:
    for m, n, k in ragged_shapes(rung):
        a = np.ldexp(rng.standard_normal((m, k), dtype=np.float32), scale).astype(np.float32)
        b = np.ldexp(rng.standard_normal((k, n), dtype=np.float32), scale).astype(np.float32)
        program = program_of(rung, arch)
        emulated = product(rung, program, a, b, spec, exact_fma=True)
        real = guarded_product(device, stream, rung, arch, a, b)
        if scale:
            tiny = np.finfo(np.float32).tiny
            assert np.count_nonzero((np.abs(emulated) < tiny) & (emulated != 0)) > emulated.size // 2
        different = np.flatnonzero(emulated.view(np.uint32).ravel() != real.view(np.uint32).ravel())
        assert different.size == 0, (
            f"{rung.title} at {(m, n, k)}: {different.size} of {real.size} elements differ, first "
            f"{different[0]}: emulator {emulated.flat[different[0]]!r}, GPU {real.flat[different[0]]!r}"
        )


@RUNGS
def test_special_values_travel_as_ieee_says(
    rung: Rung, device: Device, stream: Stream, arch: str, rng: np.random.Generator
) -> None:
    m, n, k = ragged_shapes(rung)[0]
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n)))
    a[3, 1], a[m - 1, k - 1], b[k - 1, n - 1] = np.inf, np.nan, -np.inf
    c = guarded_product(device, stream, rung, arch, a, b)
    assert error_in_bounds(c, a, b) <= rung.tolerance
    assert np.isnan(c[m - 1]).all()
    assert np.isinf(c[3, : n - 1]).all()
    assert np.isneginf(c[:3, n - 1]).any() or np.isposinf(c[:3, n - 1]).any()


@RUNGS
def test_the_driver_agrees_with_the_compilers_log(
    rung: Rung, device: Device, arch: str, spec: DeviceSpec
) -> None:
    program = program_of(rung, arch)
    for entry in rung.entries:
        kernel = program.kernels[entry]
        function = Module(device, program.cubin).function(kernel.symbol)
        assert function.attribute("NUM_REGS") == kernel.resources.registers
        assert function.attribute("SHARED_SIZE_BYTES") == kernel.resources.static_shared_bytes
        assert function.attribute("MAX_THREADS_PER_BLOCK") >= rung.threads_of(entry)
        assert kernel.resources.registers <= spec.registers_per_thread
