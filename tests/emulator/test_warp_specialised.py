"""A whole warp-specialised product with everything in it, right to the last bit; and its faults, planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewave.compiler import Program, Source, compile_source
from tilewave.emulator import Memory, launch
from tilewave.emulator.tensor_maps import encode_for_emulator
from tilewave.errors import BarrierError, EmulationError, RaceError
from tilewave.precision.tensor_core import multiply_accumulate
from tilewave.tensor_map import TensorMap

Array = np.ndarray[Any, Any]

SOURCE = (Path(__file__).parent / "split_product.cu").read_text()
ROWS, COLUMNS, BLOCK_K, STAGES = 128, 32, 32, 3
SHARED_BYTES = STAGES * (ROWS + COLUMNS) * 128 + 2 * 64 * COLUMNS * 4 + 16 * STAGES


def compiled(text: str = SOURCE) -> Program:
    """The kernels for Hopper."""
    return compile_source(Source.from_text("split_product.cu", text), ["split", "product"], "sm_90a")


def halves(x: Array, blocks: int) -> tuple[Array, Array]:
    """Upper and lower halves of a matrix, padded along K."""
    padded = np.zeros((x.shape[0], blocks * BLOCK_K), np.float32)
    padded[:, : x.shape[1]] = x
    upper = padded.astype(np.float16)
    return upper, (padded - upper.astype(np.float32)).astype(np.float16)


def model(a: Array, b: Array, blocks: int) -> Array:
    """The product in the kernel's own arithmetic and order."""
    (a_up, a_low), (b_up, b_low) = halves(a, blocks), halves(b, blocks)
    total = np.zeros((len(a), len(b)), np.float32)
    for block in range(blocks):
        part = None
        for left, right in ((a_low, b_up), (a_up, b_low), (a_up, b_up)):
            for k in (0, 16):
                at = slice(block * BLOCK_K + k, block * BLOCK_K + k + 16)
                part = multiply_accumulate(left[:, at], right[:, at].T, part)
        assert part is not None
        total += part
    return total


def start(
    program: Program, name: str, grid: int, block: int, args: list[Any], memory: Memory, **options: Any
) -> None:
    """Launch one of the kernels."""
    launch(program.ptx, program.kernels[name].symbol, (grid,), (block,), args, memory, **options)


def run(program: Program, a: Array, b: Array, **options: Any) -> Array:
    """Split both operands, multiply, return C."""
    (m, k), n = a.shape, len(b)
    blocks = -(-k // BLOCK_K)
    memory = Memory()
    packed = []
    for x, rows in ((a, m), (b, n)):
        source = memory.put(x)
        buffer = memory.empty((rows, blocks * 64), np.float16)
        arguments = [source, buffer, rows, k, blocks]
        start(program, "split", 2, 64, arguments, memory)
        packed.append(buffer)
    written = -(-n // 4) * 4  # of each row: copies write whole pieces of 16 bytes
    room = written + 4
    c = memory.empty((m, room), np.float32)
    maps = [
        TensorMap("float16", buffer.address, (blocks * 64, rows), (blocks * 128,), (64, box), 128)
        for buffer, rows, box in ((packed[0], m, ROWS // 2), (packed[1], n, COLUMNS))
    ]
    maps.append(TensorMap("float32", c.address, (n, m), (room * 4,), (COLUMNS, 64)))
    row_tiles, column_tiles = -(-m // ROWS), -(-n // COLUMNS)
    grid = 2 * row_tiles * -(-column_tiles // 2)
    arguments = [*map(encode_for_emulator, maps), row_tiles, blocks]
    options = {"dynamic_shared_bytes": SHARED_BYTES, "registers": 168, **options}
    start(program, "product", grid, 384, arguments, memory, **options)
    found = memory.get(c)
    assert (found[:, n:written] == 0).all()  # products of rows of B that are not there
    assert np.isnan(found[:, written:]).all()
    return found[:, :n]


def operands(rng: np.random.Generator, m: int, n: int, k: int, signs: bool = True) -> tuple[Array, Array]:
    """Entries of about 2^8, so that lower halves keep their bits."""
    made = []
    for rows in (m, n):
        x = rng.uniform(128, 512, (rows, k)).astype(np.float32)
        made.append(x * rng.choice(np.float32([-1, 1]), (rows, k)) if signs else x)
    return made[0], made[1]


@pytest.mark.parametrize("signs", [True, False])
@pytest.mark.parametrize("options", [{}, {"order": 1}, {"order": 2, "detect_races": True}])
def test_every_bit_is_right(signs: bool, options: dict[str, Any], rng: np.random.Generator) -> None:
    m, n, k = (int(x) for x in rng.integers(1, (150, 80, 400)))
    a, b = operands(rng, m, n, k, signs)
    if "order" in options:
        options = {**options, "order": int(rng.integers(1 << 30))}
    found = run(compiled(), a, b, **options)
    blocks = -(-k // BLOCK_K)
    assert np.array_equal(found, model(a, b, blocks))
    exact = a.astype(np.float64) @ b.T.astype(np.float64)
    # Splitting: 2^-22 an operand, and the product of lower halves; each sum loses up to 2^-23 of its parts.
    bound = (3 * 2.0**-22 + (3 * BLOCK_K + blocks) * 2.0**-23) * (np.abs(a).astype(float) @ np.abs(b.T))
    assert (np.abs(found - exact) <= bound).all()


FAULTS: dict[str, tuple[str, str, type[EmulationError], str]] = {
    "a byte count": (
        "expect(full + 8 * s, STAGE_BYTES)",
        "expect(full + 8 * s, STAGE_BYTES - 128)",
        BarrierError,
        "128 bytes to be expected|fewer bytes were expected",
    ),
    "a byte count too high": (
        "expect(full + 8 * s, STAGE_BYTES)",
        "expect(full + 8 * s, STAGE_BYTES + 128)",
        BarrierError,
        "deadlock.*lacks 128 bytes that were expected",
    ),
    "no release": (
        "if (thread < 2) arrive_at(empty + 8 * s, thread);",
        "",
        BarrierError,
        "deadlock.*lacks 4 of 4 arrivals",
    ),
    "only the own block's release": (
        "if (thread < 2)",
        "if (thread == rank)",
        BarrierError,
        "deadlock.*lacks 2 of 4 arrivals",
    ),
    "a wrong parity of the producer": ("(k / STAGES + 1) & 1", "k / STAGES & 1", BarrierError, "deadlock"),
    "a wrong parity of the consumer": (
        "wait(full + 8 * s, k / STAGES & 1)",
        "wait(full + 8 * s, (k / STAGES + 1) & 1)",
        EmulationError,
        "deadlock|with nothing to order",
    ),
    "a release before the products are done": (
        'asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");\n'
        "      if (thread < 2) arrive_at(empty + 8 * s, thread);",
        "if (thread < 2) arrive_at(empty + 8 * s, thread);\n"
        '      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");',
        RaceError,
        "which a product of the warpgroup of warp .* has read",
    ),
    "no wait for the products": (
        'asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");',
        "",
        RaceError,
        "no wgmma.wait_group has waited",
    ),
    "no wgmma.fence": (
        'asm volatile("wgmma.fence.sync.aligned;" ::: "memory");',
        "",
        RaceError,
        "no wgmma.fence lies between",
    ),
    "no proxy fence before the store": (
        'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");',
        "",
        RaceError,
        "has passed no fence.proxy.async",
    ),
    "no barrier before the store": (
        'asm volatile("bar.sync %0, 128;" ::"r"(1 + consumer) : "memory");',
        "",
        RaceError,
        "with nothing to order the two",
    ),
    "no fence behind the making of mbarriers": (
        'asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");',
        "",
        RaceError,
        "no fence.mbarrier_init",
    ),
    "a store that is not waited for": (
        r"\ncp.async.bulk.wait_group 0;",
        "",
        RaceError,
        "its block has ended without waiting",
    ),
    "registers that are not there": (
        "aligned.u32 232",
        "aligned.u32 240",
        BarrierError,
        "deadlock.*setmaxnreg",
    ),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str, rng: np.random.Generator) -> None:
    original, changed, error, message = FAULTS[name]
    assert SOURCE.count(original) == 1
    a, b = operands(rng, 100, 60, 8 * BLOCK_K)
    with pytest.raises(error, match=message):
        run(
            compiled(SOURCE.replace(original, changed)),
            a,
            b,
            order=int(rng.integers(1 << 30)),
            detect_races=True,
        )
